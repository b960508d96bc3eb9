#!/usr/bin/env bash
# Text to data folder, on all nodes of the job by MPI (on one without it), with all cores; and the test set.
#
#     sbatch slurm/prepare.sh
#     sbatch --nodes=4 slurm/prepare.sh --vocab-size 32000    # any flag of tools/prepare_data.py
#
# Data that are there stay. A preparation that was interrupted goes on when it is started again.
#SBATCH --job-name=prepare
#SBATCH --nodes=1
#SBATCH --mincpus=32
#SBATCH --mem-per-cpu=4G
#SBATCH --time=12:00:00
#SBATCH --signal=USR1@120
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.out
[[ -f slurm/lib.sh ]] || { echo "error: $PWD is not the checkout: sbatch in its root, or with --chdir" >&2 && exit 1; }
source slurm/lib.sh
count_start
prepare_data "${PREPARE[@]}" "$@"
finish 0
