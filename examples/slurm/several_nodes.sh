#!/bin/bash
# Several nodes: a process for each GPU of each of them. What follows goes to `accel launch`: options, the script, its arguments.
#     sbatch examples/slurm/several_nodes.sh --fsdp --bf16 train.py --epochs 3
#SBATCH --job-name=train
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=4
#SBATCH --cpus-per-task=32
#SBATCH --time=12:00:00
#SBATCH --signal=TERM@120 # 120 seconds before the end: a script with accelerator.stop_on_signal() saves, and ends
#SBATCH --requeue         # begin again after a node has failed: a script that resumes goes on
#SBATCH --output=%x-%j.out

set -euo pipefail

# Since Slurm 22.05, srun does not take --cpus-per-task from the job: without this, each task would have one core.
[ -z "${SLURM_CPUS_PER_TASK:-}" ] || export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK

# One task on each node, in which accel launch starts the processes of that node. Where they meet, and which node is which, it
# takes from Slurm. When one fails, all end: they tell each other. With --kill-on-bad-exit=1, which some clusters have as
# their default, srun would kill those that still save when the first one has been told to stop and has ended, with status 143.
srun --kill-on-bad-exit=0 accel launch \
    --num-processes $((SLURM_NNODES * SLURM_GPUS_ON_NODE)) --shutdown-timeout 100 "$@"
