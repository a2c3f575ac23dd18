#!/bin/bash
# Slurm: srun starts the workers, hvdkit exec brings them together. Neither ssh nor MPI is needed.
#
#   sbatch examples/cluster/slurm_exec.sh --epochs 4
#
# To change: the resources below, VENV, and the script that is trained; the arguments go to it.
#SBATCH --job-name=digits
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=1
#SBATCH --time=00:30:00
#SBATCH --output=%x-%j.out
# With GPUs, a worker for each:
##SBATCH --ntasks-per-node=4
##SBATCH --gpus-per-node=4

set -euo pipefail

# The environment that has hvdkit, at the same path on all nodes.
# shellcheck source=/dev/null
source "${VENV:-$HOME/venv}/bin/activate"

# srun takes the cores of a task from the batch script only since Slurm 23.02 (and not in 22.05).
export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK OMP_NUM_THREADS=$SLURM_CPUS_PER_TASK

# -np is a check: a job of another size ends with an error before anything starts.
srun hvdkit exec -np "$SLURM_NTASKS" -- python "${SCRIPT:-examples/torch/digits.py}" "$@"
