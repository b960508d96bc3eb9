#!/usr/bin/env bash
# Average a run's newest weights, decode the test set on all GPUs, and compute BLEU with its signature.
#
#     MODEL=big sbatch slurm/evaluate.sh                 # or base: the run of slurm/train_big.sh or train_base.sh
#     RUN_DIR=runs/mine AVERAGE=20 sbatch --nodes=2 slurm/evaluate.sh --beam 5    # any flag of dist-transformer evaluate
#
# The model is written to RUN_DIR/model, the scores to RUN_DIR/bleu.json.
#SBATCH --job-name=evaluate
#SBATCH --nodes=1
#SBATCH --gpus-per-node=8
#SBATCH --mincpus=32
#SBATCH --mem-per-cpu=4G
#SBATCH --time=01:00:00
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.out
[[ -f slurm/lib.sh ]] || { echo "error: $PWD is not the checkout: sbatch in its root, or with --chdir" >&2 && exit 1; }
source slurm/lib.sh
if [[ -n ${MODEL:-} ]]; then choose_run "$MODEL"; fi
count_start
evaluate "${EVALUATE[@]}" "$@"
finish 0
