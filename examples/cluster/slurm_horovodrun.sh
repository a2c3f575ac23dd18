#!/bin/bash
# Slurm: horovodrun starts the workers by ssh, which must let you in on each node without a
# password (`hvdkit doctor --hosts a:1,b:1` says whether it does). slurm_exec.sh needs no ssh.
#
#   sbatch examples/cluster/slurm_horovodrun.sh --epochs 4
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
export OMP_NUM_THREADS=$SLURM_CPUS_PER_TASK

# "a,b" becomes "a:1,b:1".
hosts=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | sed "s/\$/:$SLURM_NTASKS_PER_NODE/" |
  paste --serial --delimiters=,)

# For example --ssh-port 2222, or --network-interfaces ib0 (each host takes those that it has).
read -ra options <<<"${HOROVODRUN_OPTIONS:-}"

horovodrun --gloo -np "$SLURM_NTASKS" -H "$hosts" ${options[@]+"${options[@]}"} \
  python "${SCRIPT:-examples/torch/digits.py}" "$@"
