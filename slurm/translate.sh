#!/usr/bin/env bash
# Translate text of any size on all GPUs of the job, for example for back-translation.
#
#     MODEL=big OUTPUT=/text/mono.de sbatch --nodes=4 slurm/translate.sh --input /text/mono.en.gz
#     RUN_DIR=runs/mine OUTPUT=/text/mono.de sbatch slurm/translate.sh --input /text/mono.*.en --sample --top-k 10
#
# The model is RUN_DIR/model (slurm/evaluate.sh makes it); the flags are those of dist-transformer translate. Finished parts are
# in OUTPUT.parts, on storage that all nodes share. An interrupted job is requeued and resumes.
#SBATCH --job-name=translate
#SBATCH --nodes=1
#SBATCH --gpus-per-node=8
#SBATCH --mincpus=32
#SBATCH --mem-per-cpu=4G
#SBATCH --time=24:00:00
#SBATCH --signal=USR1@60
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.out
[[ -f slurm/lib.sh ]] || { echo "error: $PWD is not the checkout: sbatch in its root, or with --chdir" >&2 && exit 1; }
source slurm/lib.sh
if [[ -n ${MODEL:-} ]]; then choose_run "$MODEL"; fi
need RUN_DIR OUTPUT
finished=("$OUTPUT.parts"/[0-9]*)
count_start "${#finished[@]} chunks"
run_step none "$SLURM_JOB_NUM_NODES" "$(tasks_per_node)" "${PYTHON[@]}" -m dist_transformer translate --model "$RUN_DIR/model" \
    --output "$OUTPUT" "$@"
finish 0
