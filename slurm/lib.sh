# shellcheck shell=bash
# What the jobs of this folder share. They source it in the root of the checkout: it reads cluster.env and defines steps.
#
# A step runs one task a GPU, or --ntasks-per-node tasks a node where there are none, with ranks from SLURM's variables.
# A step that was interrupted (status 75 of its tasks: saved, start me again; or SIGUSR1, SIGUSR2, SIGTERM before they
# listen) puts the job back into the queue, and so does a lost node. Any other failure ends the job with its status.
set -euo pipefail
shopt -s nullglob

# So many starts of a job that reach no more, and it is given up.
max_idle_starts=5

say() { printf '%s %s\n' "$(date '+%F %T')" "$*" >&2; }

# The end of the job: nothing of its state is needed any more.
finish() {
    rm -rf "$state"
    exit "$1"
}

fail() {
    printf 'error: %s\n' "$*" >&2
    finish 1
}

# A task of an array goes by the array's number and its own.
job=${SLURM_JOB_ID:?is not set: start this script with sbatch}
[[ -z ${SLURM_ARRAY_TASK_ID:-} ]] || job=${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID
state=$PWD/.slurm/$job
mkdir -p "$state"

set +u # `module` does not survive it
# shellcheck source=slurm/cluster.env
source slurm/cluster.env || fail "slurm/cluster.env cannot be used, see the message above: correct it"
set -u
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1

# need NAME...: these settings must not be empty.
need() {
    local name
    for name; do
        [[ -n ${!name:-} ]] || fail "$name is not set: set it in slurm/cluster.env, or give it before sbatch ($name=... sbatch ...)"
    done
}

# Tasks on each node: one a GPU.
tasks_per_node() {
    if has_gpus; then echo "$SLURM_GPUS_ON_NODE"; else echo "${SLURM_NTASKS_PER_NODE:-1}"; fi
}

has_gpus() { ((${SLURM_GPUS_ON_NODE:-0} > 0)); }

# A port where nobody listens on this node, the job's first; below those that the system gives out by itself.
free_port() {
    local port=$((10000 + RANDOM % 22000))
    while (: <"/dev/tcp/127.0.0.1/$port") 2>/dev/null; do port=$((10000 + RANDOM % 22000)); done
    echo "$port"
}

# run_step MPI NODES TASKS COMMAND...: COMMAND as TASKS tasks on each of NODES nodes, in the container if there is one.
# Returns when it is done; otherwise the job ends, with the sentence in `remedy` if the caller has set it. Each line of
# the log begins with the number of its task.
#
# Each task sees all GPUs of its node and takes the one of its local number (--gpu-bind=none): NCCL copies between GPUs
# over NVLink only where a process sees both. SLURM would bind the tasks to CPUs in the order of their numbers, mostly
# alternating between the sockets, while the first half of the GPUs is on the first socket. So it binds none
# (--cpu-bind=none), and each task keeps to the CPUs beside its GPU, as the PCI bus reports them.
run_step() {
    local mpi=$1 nodes=$2 tasks=$3 step status=0 cpus bind=()
    shift 3
    if has_gpus; then bind=(--gpu-bind=none --cpu-bind=none); fi
    cpus=$((SLURM_CPUS_ON_NODE > tasks ? SLURM_CPUS_ON_NODE / tasks : 1))
    rm -rf "$state/ended"
    mkdir "$state/ended"
    # In the background, because bash runs no trap while a command is in the foreground.
    MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1) MASTER_PORT=$(free_port) \
        OMP_NUM_THREADS=${OMP_NUM_THREADS:-$cpus} \
        srun --mpi="$mpi" --nodes="$nodes" --ntasks=$((nodes * tasks)) --ntasks-per-node="$tasks" \
        --cpus-per-task="$cpus" "${bind[@]}" --label --kill-on-bad-exit=1 "${SRUN_OPTIONS[@]}" \
        slurm/task.sh "$state/ended" "$@" &
    step=$!
    # SLURM signals the tasks itself; this is for signals to the batch script (--signal=B:..., scancel --batch).
    trap 'kill -USR1 "$step" 2>/dev/null || true' USR1 USR2 TERM
    while kill -0 "$step" 2>/dev/null; do wait "$step" || true; done
    wait "$step" || status=$?
    trap - USR1 USR2 TERM
    judge_step "$status"
}

# write_step FILE COMMAND...: COMMAND as one task, which writes its output to FILE.
write_step() {
    run_step none 1 1 bash -c '"${@:2}" >"$1"' _ "$@"
}

# What the ends of its tasks make of a step. Returns when it is done.
judge_step() {
    local file interrupted='' bad='' status task node
    for file in "$state"/ended/*; do
        IFS=. read -r status task node <<<"${file##*/}"
        case $status in
        75 | 138 | 140 | 143) interrupted=yes ;; # saved, or ended by SIGUSR1, SIGUSR2, SIGTERM
        *) bad="task $task on $node ended with status $status" && break ;;
        esac
    done
    [[ -z $bad && -n $interrupted ]] && requeue "interrupted; what was reached is saved"
    [[ -z $bad && $1 == 0 ]] && return
    nodes_answer || requeue "a node is lost"
    [[ -z ${remedy:-} ]] || fail "$remedy"
    [[ $bad != *" 134" ]] || bad+=' (aborted, as NCCL does when a collective fails: docs/fault_tolerance.md tells where to look)'
    say "failed: ${bad:-srun ended with status $1}; see the message above. With its cause gone, the same sbatch command continues"
    [[ -n $bad ]] || status=$1
    finish "$status"
}

# Whether every node of the job runs a trivial step.
nodes_answer() {
    timeout --kill-after=5 60 srun --nodes="$SLURM_JOB_NUM_NODES" --ntasks="$SLURM_JOB_NUM_NODES" --ntasks-per-node=1 \
        --cpus-per-task=1 --kill-on-bad-exit=1 true
}

# requeue WHY: put the job back into the queue, unless SLURM has done so or a user cancelled it. Does not return.
requeue() {
    local record
    record=$(scontrol show job "$job")
    case $record in
    *JobState=RUNNING* | *JobState=TIMEOUT* | *JobState=PREEMPTED* | *JobState=NODE_FAIL*)
        say "$1; back into the queue"
        scontrol requeue "$job" ||
            fail "SLURM does not put job $job back into the queue: give the same sbatch command again, it continues"
        ;;
    *" Restarts=${SLURM_RESTART_COUNT:-0} "*)
        say "$1; the job was cancelled: the same sbatch command continues"
        finish 75
        ;;
    *) say "$1; SLURM has put the job back into the queue" ;;
    esac
    await_end
}

# SLURM ends this script.
await_end() {
    sleep 60 &
    wait
    exit 75
}

# count_start [REACHED]: count this start; give the job up after too many that reached no more. REACHED says how far the job
# is, the newest checkpoint when not given.
count_start() {
    local reached=${1:-} seen='' idle=0 more='more of the text'
    if [[ -z $reached ]]; then
        more='a new checkpoint'
        [[ -z ${RUN_DIR:-} || ! -e $RUN_DIR/checkpoints/latest ]] || reached=$(<"$RUN_DIR/checkpoints/latest")
    fi
    if ((${SLURM_RESTART_COUNT:-0} > 0)) && [[ -e $state/starts ]]; then
        IFS=$'\t' read -r idle seen <"$state/starts" || true
        if [[ $seen == "$reached" ]]; then idle=$((idle + 1)); else idle=0; fi
    fi
    printf '%s\t%s\n' "$idle" "$reached" >"$state/starts"
    ((idle < max_idle_starts)) ||
        fail "started $((idle + 1)) times without $more (newest: ${reached:-none}): look for the cause in the log above, then give the same sbatch command again"
}

# Whether Python can load an MPI library on every node.
loads_mpi() {
    srun --mpi=none --nodes="$SLURM_JOB_NUM_NODES" --ntasks="$SLURM_JOB_NUM_NODES" --ntasks-per-node=1 \
        --cpus-per-task=1 --kill-on-bad-exit=1 "${SRUN_OPTIONS[@]}" \
        "${PYTHON[@]}" -c 'import mpi4py; mpi4py.rc.initialize = False; import mpi4py.MPI' &>/dev/null
}

# prepare_data FLAGS: text to data folder, and the test set, unless they are there.
prepare_data() {
    need DATA TEST_SRC TEST_REF
    if [[ ! -e $DATA/index.json ]]; then
        has_source "$@"
        # Tasks on several nodes find each other by MPI; one task needs none.
        local mpi=none nodes=1
        if ((SLURM_JOB_NUM_NODES > 1)); then
            if loads_mpi; then
                mpi=$MPI nodes=$SLURM_JOB_NUM_NODES
            else
                say "one node of $SLURM_JOB_NUM_NODES prepares the data, because Python finds no MPI library: install the extra [mpi] as docs/cluster.md says, or load the cluster's MPI in slurm/cluster.env"
            fi
        fi
        run_step "$mpi" "$nodes" 1 "${PYTHON[@]}" tools/prepare_data.py "$@" --out "$DATA"
    fi
    fetch_test_set src "$TEST_SRC"
    fetch_test_set ref "$TEST_REF"
}

# has_source WORDS: what the data are made from must be known.
has_source() {
    (($# > 0)) || fail "PREPARE is empty: say in slurm/cluster.env what $DATA is made from"
}

fetch_test_set() {
    [[ ! -e $2 ]] || return 0
    need TEST_SET PAIR
    mkdir -p "$(dirname "$2")"
    remedy="$2 does not exist, and sacreBLEU cannot fetch $TEST_SET: set TEST_SRC and TEST_REF in slurm/cluster.env" \
        write_step "$2.part" "${PYTHON[@]}" -m sacrebleu --test-set "$TEST_SET" --language-pair "$PAIR" --echo "$1"
    mv "$2.part" "$2"
}

# await_data: returns when the data folder and the test set are there. Otherwise a job of CPUs makes them, and this job
# waits for it in the queue: hours of preparation would hold GPUs that are idle.
await_data() {
    need DATA TEST_SRC TEST_REF
    [[ ! -e $DATA/index.json || ! -e $TEST_SRC || ! -e $TEST_REF ]] || return 0
    [[ -e $DATA/index.json ]] || has_source "${PREPARE[@]}"
    [[ ! -e $state/preparation ]] ||
        fail "job $(<"$state/preparation") has prepared, but $DATA/index.json, $TEST_SRC or $TEST_REF is missing: see that all nodes share these folders"
    local preparation
    preparation=$(submit_preparation) ||
        fail "the preparation cannot be submitted from this job, see the message above: set PREPARE_JOB in slurm/cluster.env, or submit it from a login node: slurm/pipeline.sh"
    echo "$preparation" >"$state/preparation"
    say "job $preparation prepares $DATA and the test set on CPUs; this job waits for it in the queue"
    wait_behind "$preparation"
}

# submit_preparation: prepare.sh as a job of its own, in the account and the partition of this one; prints its number.
submit_preparation() (
    local options=(--partition="$SLURM_JOB_PARTITION")
    [[ -z ${SLURM_JOB_ACCOUNT:-} ]] || options+=(--account="$SLURM_JOB_ACCOUNT")
    # The other job would take this one's variables for its own: its GPUs, for example.
    local name
    for name in "${!SLURM_@}"; do [[ $name == SLURM_CONF ]] || unset "$name"; done
    sbatch --parsable "${options[@]}" "${PREPARE_JOB[@]}" slurm/prepare.sh
)

# wait_behind JOB: put this job back into the queue, where it waits until JOB has succeeded. Does not return.
wait_behind() {
    # Only a job that is in the queue takes a dependency. SLURM ends what runs of this one meanwhile, by SIGTERM first.
    trap '' TERM
    scontrol requeuehold "$job" && scontrol update "JobId=$job" "Dependency=afterok:$1" && scontrol release "$job" ||
        fail "SLURM does not let job $job wait: give the same sbatch command with --dependency=afterok:$1"
    trap - TERM
    await_end
}

# doctor: whether the nodes are fit to train, before they do.
doctor() {
    [[ $DOCTOR == yes ]] || return 0
    remedy="the job is not fit to train: follow the remedies above and give the same sbatch command again (DOCTOR=no leaves the check out)" \
        run_step none "$SLURM_JOB_NUM_NODES" "$(tasks_per_node)" "${PYTHON[@]}" tools/doctor.py --run-dir "$RUN_DIR" --data "$DATA"
}

# train FLAGS: to the last step.
train() {
    doctor
    run_step none "$SLURM_JOB_NUM_NODES" "$(tasks_per_node)" "${PYTHON[@]}" -m dist_transformer.train --data "$DATA" --run-dir "$RUN_DIR" "$@"
}

# check_flags FLAGS: of the training, before hours of preparation.
check_flags() {
    local flag
    for flag; do
        case $flag in
        --data | --data=*) fail "$flag: set DATA in slurm/cluster.env or before sbatch, so that every part of the job knows it" ;;
        --run?dir | --run?dir=*) fail "$flag: give RUN_DIR=... before sbatch, so that every part of the job knows it" ;;
        esac
    done
}

# evaluate FLAGS: the mean of the newest weights in RUN_DIR/model, its scores in RUN_DIR/bleu.json.
evaluate() {
    need RUN_DIR TEST_SRC TEST_REF
    local weights=("$RUN_DIR"/weights/step-*.safetensors) count=${AVERAGE:-5}
    ((${#weights[@]} > 0)) || fail "$RUN_DIR has no weights: train first, or correct RUN_DIR"
    run_step none 1 1 "${PYTHON[@]}" tools/average_checkpoints.py --run-dir "$RUN_DIR" --out "$RUN_DIR/model" \
        --last $((count < ${#weights[@]} ? count : ${#weights[@]}))
    run_step none "$SLURM_JOB_NUM_NODES" "$(tasks_per_node)" "${PYTHON[@]}" tools/evaluate_bleu.py --model "$RUN_DIR/model" \
        --src "$TEST_SRC" --ref "$TEST_REF" --json "$RUN_DIR/bleu.json" "$@"
}

# choose_run MODEL: the run folder of big or base, unless another is given. The paper averages 20 weight files of big, and
# 5 of base.
choose_run() {
    need RUNS PAIR
    RUN_DIR=${RUN_DIR:-$RUNS/$1-$PAIR}
    [[ $1 != big ]] || AVERAGE=${AVERAGE:-20}
}

# train_and_evaluate MODEL FLAGS: the whole job of a training script, from text to score. STAGES leaves parts to others.
train_and_evaluate() {
    choose_run "$1"
    shift
    need DATA
    check_flags "$@"
    count_start
    local stage
    for stage in ${STAGES:-prepare train evaluate}; do
        case $stage in
        prepare) await_data ;;
        train) train "$@" ;;
        evaluate) evaluate "${EVALUATE[@]}" ;;
        *) fail "STAGES names $stage: choose from prepare, train and evaluate" ;;
        esac
    done
    finish 0
}

remedy="PYTHON in slurm/cluster.env (${PYTHON[*]}) does not run Python 3.11 or newer on the nodes: correct it or its container, or install as docs/cluster.md says" \
    run_step none 1 1 "${PYTHON[@]}" -c 'import sys; sys.exit(sys.version_info < (3, 11))'
