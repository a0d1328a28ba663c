#!/bin/bash
# One node: a process for each of its GPUs. What follows goes to `accel launch`: options, the script, its arguments.
#     sbatch examples/slurm/one_node.sh --bf16 train.py --epochs 3
#SBATCH --job-name=train
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=4
#SBATCH --cpus-per-task=32
#SBATCH --time=12:00:00
#SBATCH --signal=TERM@120 # 120 seconds before the end: a script with accelerator.stop_on_signal() saves, and ends
#SBATCH --output=%x-%j.out

set -euo pipefail

# Since Slurm 22.05, srun does not take --cpus-per-task from the job: without this, the task would have one core.
[ -z "${SLURM_CPUS_PER_TASK:-}" ] || export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK

# One task, in which accel launch starts the processes. Their number has to be given: Slurm says that the job has one task.
srun accel launch --num-processes "$SLURM_GPUS_ON_NODE" --shutdown-timeout 100 "$@"
