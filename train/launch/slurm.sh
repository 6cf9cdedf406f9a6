#!/usr/bin/env bash
# A training run on a SLURM cluster: a process for each GPU. From the root of the repository:
#
#   sbatch --nodes=4 train/launch/slurm.sh --config=configs/small.py --workdir=/shared/runs/small
#
# What follows the script is handed to `python -m train`. Every node must see the repository, its
# .venv and the workdir under the same paths. The same command resumes a run that has stopped.
#
# JAX finds the other processes by itself, and gives each the GPU of its number on the node. So there
# are as many tasks as GPUs on a node, and every task must see all GPUs of it (no --gpus-per-task).
# Options of sbatch on the command line win over these:
#SBATCH --job-name=tessera
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=8
#SBATCH --time=24:00:00
#SBATCH --output=%x-%j.log
# Two minutes before the time is up the run saves and stops:
#SBATCH --signal=TERM@120
set -euo pipefail
cd "$SLURM_SUBMIT_DIR"
source .venv/bin/activate
# Without --kill-on-bad-exit the others would wait a minute or two for a task that failed.
exec srun --cpus-per-task="$SLURM_CPUS_PER_TASK" --gpu-bind=none --kill-on-bad-exit=1 \
  python -u -m train "$@"
