#!/usr/bin/env bash
# Make the data folder and the test set from text, with all cores of all nodes (without MPI, of one node).
#
#     sbatch slurm/prepare.sh
#     sbatch --nodes=4 slurm/prepare.sh --vocab-size 32000    # any flag of dist-transformer prepare
#
# Existing data is kept. An interrupted preparation resumes when it is started again.
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
