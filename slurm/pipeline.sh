#!/usr/bin/env bash
# Preparation, training and evaluation as three jobs, each with its own resources, in sequence.
#
#     slurm/pipeline.sh big|base [FLAGS OF SBATCH] [-- FLAGS OF THE TRAINING]
#     PAIR=en-fr slurm/pipeline.sh big --partition=gpu --nodes=2-8 -- --max-steps 10000
#
# Run it on a login node: it submits the jobs, prints their numbers, and ends. The flags of sbatch go to all three jobs.
# If one fails, the jobs that wait for it are cancelled.
set -euo pipefail
cd "$(dirname "$0")/.."

model=${1:-}
[[ -f slurm/train_$model.sh ]] || {
    echo "error: the model is '$model': pass big or base, then flags of sbatch, then -- and flags of the training" >&2
    exit 2
}
shift
options=()
while (($# > 0)) && [[ $1 != -- ]]; do
    options+=("$1")
    shift
done
(($# == 0)) || shift

submit() { sbatch --parsable --kill-on-invalid-dep=yes "$@"; }

prepare=$(submit "${options[@]}" slurm/prepare.sh)
echo "prepare:  job $prepare"
train=$(STAGES=train submit --dependency="afterok:$prepare" "${options[@]}" "slurm/train_$model.sh" "$@")
echo "train:    job $train"
evaluate=$(MODEL=$model submit --dependency="afterok:$train" "${options[@]}" slurm/evaluate.sh)
echo "evaluate: job $evaluate"
