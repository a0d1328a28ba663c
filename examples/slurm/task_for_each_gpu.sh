#!/bin/bash
# Several nodes, where Slurm itself starts a task for each GPU. The script needs no launcher: what follows is its path and arguments.
#     sbatch examples/slurm/task_for_each_gpu.sh train.py --epochs 3
#SBATCH --job-name=train
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=4
#SBATCH --gpus-per-node=4
#SBATCH --cpus-per-task=8
#SBATCH --time=12:00:00
#SBATCH --signal=TERM@120 # 120 seconds before the end: a script with accelerator.stop_on_signal() saves, and ends
#SBATCH --requeue         # begin again after a node has failed: a script that resumes goes on
#SBATCH --output=%x-%j.out

set -euo pipefail

# Since Slurm 22.05, srun does not take --cpus-per-task from the job: without this, each task would have one core.
[ -z "${SLURM_CPUS_PER_TASK:-}" ] || export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK

export ACCELERATE_MIXED_PRECISION=bf16 # options reach the script by variables: docs/reference/environment.md
srun --kill-on-bad-exit=1 python "$@"
