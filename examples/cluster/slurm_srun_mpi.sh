#!/bin/bash
# Slurm: srun starts the workers, which find and talk to each other by MPI. Horovod must be built
# with MPI (hvdkit install --with-mpi), and srun and Open MPI must share a PMI: `srun --mpi=list`
# shows Slurm's, and Open MPI needs pmix. Where they do not, take slurm_exec.sh.
#
#   sbatch examples/cluster/slurm_srun_mpi.sh --epochs 4
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

# Built with Gloo and MPI, Horovod takes MPI for both.
export HOROVOD_CONTROLLER=mpi HOROVOD_CPU_OPERATIONS=mpi

srun --mpi=pmix python "${SCRIPT:-examples/torch/digits.py}" "$@"
