#!/usr/bin/env bash
# The rows of the paper's Table 3: a job array trains one row per job. A last job decodes them and writes the table,
# with the paper's figures, to $RUNS/table3-$PAIR/table3.md. At the paper's sizes, or relative to another --preset.
#
#     slurm/ablations.sh [FLAGS OF SBATCH] [-- FLAGS OF tools/table3.py]
#     slurm/ablations.sh --partition=gpu --array=0,7-13 -- --average 1
#
# Run it on a login node: it submits the jobs, prints their numbers, and ends. Array indices number the rows in the
# table's order, from 0 for base (`tools/table3.py --help`). The same command trains missing rows and writes the table
# again.
#SBATCH --job-name=ablations
#SBATCH --nodes=1
#SBATCH --gpus-per-node=8
#SBATCH --mincpus=64
#SBATCH --mem-per-cpu=4G
#SBATCH --gres-flags=enforce-binding
#SBATCH --time=24:00:00
#SBATCH --signal=USR1@300
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.out
set -euo pipefail

submit_all() {
    cd "$(dirname "$0")/.."
    local array=--array=0-19 options=() prepare rows table
    while (($# > 0)) && [[ $1 != -- ]]; do
        case $1 in
        --array=*) array=$1 ;;
        *) options+=("$1") ;;
        esac
        shift
    done
    (($# == 0)) || shift
    submit() { sbatch --parsable --kill-on-invalid-dep=yes "${options[@]}" "$@"; }
    prepare=$(submit slurm/prepare.sh)
    echo "prepare: job $prepare"
    rows=$(submit --dependency="afterok:$prepare" "$array" slurm/ablations.sh "$@")
    echo "rows:    job $rows"
    table=$(submit --dependency="afterany:$rows" slurm/ablations.sh "$@")
    echo "table:   job $table"
}

# train_row FLAGS: train the row of this job's array index to its last step.
train_row() {
    local rows row flags
    write_step "$state/rows" "${PYTHON[@]}" -c 'from dist_transformer.config.presets import VARIANTS; print(*VARIANTS)'
    read -ra rows <"$state/rows"
    ((SLURM_ARRAY_TASK_ID < ${#rows[@]})) || fail "--array goes to $SLURM_ARRAY_TASK_ID: the rows are 0 to $((${#rows[@]} - 1))"
    row=${rows[SLURM_ARRAY_TASK_ID]}
    RUN_DIR=$out/$row
    count_start
    remedy="tools/table3.py refuses its flags, see the message above" \
        write_step "$state/flags" "${PYTHON[@]}" tools/table3.py "${settings[@]}" --flags-of "$row" "$@"
    mapfile -t flags <"$state/flags"
    doctor
    run_step none "$SLURM_JOB_NUM_NODES" "$(tasks_per_node)" "${PYTHON[@]}" -m dist_transformer train "${flags[@]}"
    : >"$RUN_DIR/trained"
}

# make_table FLAGS: decode the trained rows on one node, and write the table.
make_table() {
    local trained=("$out"/*/trained)
    trained=("${trained[@]%/trained}")
    [[ -e $out/base/trained ]] || fail "row base is not trained in $out: the others are compared with it"
    run_step none 1 1 "${PYTHON[@]}" tools/table3.py "${settings[@]}" --rows "${trained[@]##*/}" --ranks "$(tasks_per_node)" "$@"
}

if [[ -z ${SLURM_JOB_ID:-} ]]; then
    submit_all "$@"
    exit
fi
[[ -f slurm/lib.sh ]] || { echo "error: $PWD is not the checkout: sbatch in its root, or with --chdir" >&2 && exit 1; }
source slurm/lib.sh
need DATA RUNS
out=$RUNS/table3-$PAIR
mapfile -t settings < <(unless_given --preset base -- "$@")
settings+=(--data "$DATA" --out "$out")
if [[ -n ${SLURM_ARRAY_TASK_ID:-} ]]; then train_row "$@"; else make_table "$@"; fi
finish 0
