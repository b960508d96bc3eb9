# shellcheck shell=bash
# Shared functions of the jobs of this folder, which source it in the root of the checkout. It reads cluster.env and
# defines steps.
#
# A step runs one task per GPU, or --ntasks-per-node tasks per node without GPUs, with ranks from SLURM's variables. An
# interrupted step requeues the job, and so does a lost node. A step was interrupted if its tasks end with status 75
# (saved, to be restarted), or with SIGUSR1, SIGUSR2 or SIGTERM before they handle signals. A task that hung or was
# killed requeues the job too, once per checkpoint, without the nodes that doctor then finds unfit. Any other failure
# ends the job with its status.
set -euo pipefail
shopt -s nullglob

# The job fails after this many consecutive starts without progress.
max_idle_starts=5

say() { printf '%s %s\n' "$(date '+%F %T')" "$*" >&2; }

# finish STATUS: remove the job's state and its copies of the environment, and end the job.
finish() {
    rm -rf "$state"
    [[ -z ${ARCHIVE:-} ]] || on_each_node rm -rf "${NODE_FOLDER:-}" || true
    exit "$1"
}

fail() {
    printf 'error: %s\n' "$*" >&2
    finish 1
}

# A task of an array is named by the array's job number and its index.
job=${SLURM_JOB_ID:?is not set: start this script with sbatch}
[[ -z ${SLURM_ARRAY_TASK_ID:-} ]] || job=${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID
state=$PWD/.slurm/$job
mkdir -p "$state"

set +u # `module` fails with it
# shellcheck source=slurm/cluster.env
source slurm/cluster.env || fail "slurm/cluster.env cannot be used, see the message above: correct it"
set -u
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1

# on_each_node COMMAND...: run COMMAND once on each node.
on_each_node() {
    srun --mpi=none --nodes="$SLURM_JOB_NUM_NODES" --ntasks="$SLURM_JOB_NUM_NODES" --ntasks-per-node=1 \
        --cpus-per-task=1 --kill-on-bad-exit=1 "$@"
}

# Where the file system is cold, the first imports take minutes.
examine=("${PYTHON[@]}" -m dist_transformer doctor --timeout 600)

# need NAME...: these settings must not be empty.
need() {
    local name
    for name; do
        [[ -n ${!name:-} ]] || fail "$name is not set: set it in slurm/cluster.env, or before sbatch ($name=... sbatch ...)"
    done
}

# Tasks per node: one per GPU.
tasks_per_node() {
    if has_gpus; then echo "$SLURM_GPUS_ON_NODE"; else echo "${SLURM_NTASKS_PER_NODE:-1}"; fi
}

has_gpus() { ((${SLURM_GPUS_ON_NODE:-0} > 0)); }

# A free port on this node, the job's first; below the range from which the system assigns ports.
free_port() {
    local port=$((10000 + RANDOM % 22000))
    while (: <"/dev/tcp/127.0.0.1/$port") 2>/dev/null; do port=$((10000 + RANDOM % 22000)); done
    echo "$port"
}

# run_step MPI NODES TASKS COMMAND...: run COMMAND as a step and wait for it. It returns if the step succeeds; otherwise
# the job ends, with the message in `remedy` if the caller has set it.
run_step() {
    local step status=0
    rm -rf "$state/ended"
    mkdir "$state/ended"
    # Run in the background, because bash runs no trap while a command is in the foreground.
    start_step "$@" &
    step=$!
    # SLURM signals the tasks itself. This trap is for signals to the batch script (--signal=B:..., scancel --batch).
    trap 'kill -USR1 "$step" 2>/dev/null || true' USR1 USR2 TERM
    while kill -0 "$step" 2>/dev/null; do wait "$step" || true; done
    wait "$step" || status=$?
    trap - USR1 USR2 TERM
    judge_step "$status"
}

# start_step MPI NODES TASKS COMMAND...: become srun, which runs COMMAND as TASKS tasks on each of NODES nodes, in the
# container if there is one; on the node in `only` if the caller has set it. Each line of the log begins with the number
# of its task.
#
# Each task sees all GPUs of its node and uses the one with its local number (--gpu-bind=none), because NCCL copies
# between GPUs over NVLink only if a process sees both. SLURM would bind tasks to CPUs in the order of their numbers,
# mostly alternating between the sockets, but the first half of the GPUs is on the first socket. Therefore SLURM binds
# none (--cpu-bind=none), and each task limits itself to the CPUs close to its GPU, as the PCI bus reports them.
start_step() {
    local mpi=$1 nodes=$2 tasks=$3 cpus options=()
    shift 3
    if has_gpus; then options=(--gpu-bind=none --cpu-bind=none); fi
    [[ -z ${only:-} ]] || options+=(--nodelist="$only" --time=20)
    cpus=$((SLURM_CPUS_ON_NODE > tasks ? SLURM_CPUS_ON_NODE / tasks : 1))
    export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$cpus} MASTER_ADDR MASTER_PORT
    MASTER_ADDR=${only:-$(nodes_of_job | head -n 1)} MASTER_PORT=$(free_port)
    exec srun --mpi="$mpi" --nodes="$nodes" --ntasks=$((nodes * tasks)) --ntasks-per-node="$tasks" \
        --cpus-per-task="$cpus" "${options[@]}" --label --kill-on-bad-exit=1 "${SRUN_OPTIONS[@]}" \
        slurm/task.sh "$state/ended" "$@"
}

nodes_of_job() { scontrol show hostnames "$SLURM_JOB_NODELIST"; }

# write_step FILE COMMAND...: run COMMAND as one task and write its output to FILE.
write_step() {
    run_step none 1 1 bash -c '"${@:2}" >"$1"' _ "$@"
}

# judge_step STATUS: decide from its tasks' exit statuses how a step ended. Returns if it succeeded.
judge_step() {
    local file interrupted='' bad='' broken='' status task node
    for file in "$state"/ended/*; do
        IFS=. read -r status task node <<<"${file##*/}"
        case $status in
        75 | 138 | 140 | 143) interrupted=yes ;; # saved, or killed by SIGUSR1, SIGUSR2, SIGTERM
        # The watchdog found a hang; killed by SIGABRT (as by NCCL), SIGBUS, SIGKILL, SIGSEGV. The others may then fail too.
        76 | 134 | 135 | 137 | 139) broken=${broken:-"task $task on $node ended with status $status"} ;;
        *) bad=${bad:-"task $task on $node ended with status $status"} ;;
        esac
    done
    bad=${broken:-$bad}
    [[ -z $bad && -n $interrupted ]] && requeue "interrupted; progress is saved"
    [[ -z $bad && $1 == 0 ]] && return
    nodes_answer || requeue "a node was lost"
    [[ -z ${remedy:-} ]] || fail "$remedy"
    status=${bad##* }
    [[ -z $broken ]] || requeue_on_fit_nodes "$bad"
    [[ $status != 134 ]] || bad+=' (aborted, as by NCCL if a collective fails, see docs/fault_tolerance.md)'
    say "failed: ${bad:-srun ended with status $1}; fix the cause in the message above, then run the same sbatch command to resume"
    finish "${status:-$1}"
}

# requeue_on_fit_nodes WHY: requeue the job without the nodes that doctor finds unfit, each on its own. Returns if this
# has happened since the newest checkpoint, or if no node is fit.
requeue_on_fit_nodes() {
    local reached unfit listed='ExcNodeList=([^[:space:](]+)'
    reached=$(newest_checkpoint)
    if [[ -e $state/broken && $(<"$state/broken") == "$reached" ]]; then
        say "$1, again without a new checkpoint (newest: ${reached:-none})"
        return
    fi
    echo "$reached" >"$state/broken"
    say "$1"
    unfit=$(unfit_nodes | sort | paste -sd,)
    [[ -n $unfit ]] || requeue "no node is known to be unfit"
    if ((SLURM_JOB_NUM_NODES > 1)) && [[ $unfit == "$(nodes_of_job | sort | paste -sd,)" ]]; then
        say "doctor finds all nodes of the job unfit, see its remedies above"
        return
    fi
    say "back into the queue, without $unfit"
    [[ ! $(scontrol show job "$job") =~ $listed ]] || unfit+=,${BASH_REMATCH[1]}
    requeue_changed "ExcNodeList=$unfit" ||
        fail "SLURM does not exclude $unfit from job $job: run the same sbatch command with --exclude=$unfit"
}

# Print the nodes that doctor finds unfit; none without doctor.
unfit_nodes() {
    local only
    [[ $DOCTOR == yes ]] || return 0
    say "doctor looks for the cause on each node"
    for only in $(nodes_of_job); do
        {
            (start_step none 1 "$(tasks_per_node)" "${examine[@]}" ${RUN_DIR:+--run-dir "$RUN_DIR"}) >&2 ||
                [[ $? =~ ^(138|140|143)$ ]] || echo "$only" # interrupted by SIGUSR1, SIGUSR2, SIGTERM
        } &
    done
    wait
}

# Test whether every node of the job can run a trivial step.
nodes_answer() {
    timeout --kill-after=5 60 srun --nodes="$SLURM_JOB_NUM_NODES" --ntasks="$SLURM_JOB_NUM_NODES" --ntasks-per-node=1 \
        --cpus-per-task=1 --kill-on-bad-exit=1 true
}

# requeue WHY: requeue the job, unless SLURM has done so or it was cancelled. Does not return.
requeue() {
    local record
    record=$(scontrol show job "$job")
    case $record in
    *JobState=RUNNING* | *JobState=TIMEOUT* | *JobState=PREEMPTED* | *JobState=NODE_FAIL*)
        say "$1; back into the queue"
        scontrol requeue "$job" ||
            fail "SLURM does not put job $job back into the queue: run the same sbatch command again to resume"
        ;;
    *" Restarts=${SLURM_RESTART_COUNT:-0} "*)
        say "$1; the job was cancelled: run the same sbatch command to resume"
        finish 75
        ;;
    *) say "$1; SLURM has put the job back into the queue" ;;
    esac
    await_end
}

# requeue_changed SETTING: requeue the job with a setting that only a queued job takes. Returns only if SLURM refuses.
requeue_changed() {
    # Meanwhile SLURM ends the processes of this job, first with SIGTERM.
    trap '' TERM
    scontrol requeuehold "$job" && scontrol update "JobId=$job" "$1" && scontrol release "$job" || return 1
    trap - TERM
    await_end
}

# Wait until SLURM ends this script.
await_end() {
    sleep 60 &
    wait
    exit 75
}

newest_checkpoint() {
    [[ -z ${RUN_DIR:-} || ! -e $RUN_DIR/checkpoints/latest ]] || cat "$RUN_DIR/checkpoints/latest"
}

# count_start [REACHED]: count this start, and fail after too many starts without progress. REACHED describes the
# progress; default: the newest checkpoint.
count_start() {
    local reached=${1:-} seen='' idle=0 more='more of the text'
    if [[ -z $reached ]]; then
        more='a new checkpoint' reached=$(newest_checkpoint)
    fi
    if ((${SLURM_RESTART_COUNT:-0} > 0)) && [[ -e $state/starts ]]; then
        IFS=$'\t' read -r idle seen <"$state/starts" || true
        if [[ $seen == "$reached" ]]; then idle=$((idle + 1)); else idle=0; fi
    fi
    printf '%s\t%s\n' "$idle" "$reached" >"$state/starts"
    ((idle < max_idle_starts)) ||
        fail "started $((idle + 1)) times without $more (newest: ${reached:-none}): fix the cause in the log above, then run the same sbatch command again"
}

# Test whether Python can load an MPI library on every node.
loads_mpi() {
    on_each_node "${SRUN_OPTIONS[@]}" "${PYTHON[@]}" -c 'import mpi4py; mpi4py.rc.initialize = False; import mpi4py.MPI' &>/dev/null
}

# prepare_data FLAGS: make the data folder and the test set, unless they exist.
prepare_data() {
    need DATA TEST_SRC TEST_REF
    if [[ ! -e $DATA/index.json ]]; then
        has_source "$@"
        # Tasks on several nodes find each other with MPI; a single task needs none.
        local mpi=none nodes=1
        if ((SLURM_JOB_NUM_NODES > 1)); then
            if loads_mpi; then
                mpi=$MPI nodes=$SLURM_JOB_NUM_NODES
            else
                say "one node of $SLURM_JOB_NUM_NODES prepares the data, because Python finds no MPI library: install the extra [mpi] as docs/cluster.md says, or load the cluster's MPI in slurm/cluster.env"
            fi
        fi
        run_step "$mpi" "$nodes" 1 "${PYTHON[@]}" -m dist_transformer prepare "$@" --out "$DATA"
    fi
    fetch_test_set src "$TEST_SRC"
    fetch_test_set ref "$TEST_REF"
}

# has_source WORDS: fail if there is no source of the data.
has_source() {
    (($# > 0)) || fail "PREPARE is empty: set it in slurm/cluster.env to the flags that make $DATA"
}

fetch_test_set() {
    [[ ! -e $2 ]] || return 0
    need TEST_SET PAIR
    mkdir -p "$(dirname "$2")"
    remedy="$2 does not exist, and sacreBLEU cannot fetch $TEST_SET: set TEST_SRC and TEST_REF in slurm/cluster.env" \
        write_step "$2.part" "${PYTHON[@]}" -m sacrebleu --test-set "$TEST_SET" --language-pair "$PAIR" --echo "$1"
    mv "$2.part" "$2"
}

# await_data: return if the data folder and the test set exist. Otherwise a job without GPUs makes them, and this job
# waits for it in the queue, so that no GPUs are idle for the hours of preparation.
await_data() {
    need DATA TEST_SRC TEST_REF
    [[ ! -e $DATA/index.json || ! -e $TEST_SRC || ! -e $TEST_REF ]] || return 0
    [[ -e $DATA/index.json ]] || has_source "${PREPARE[@]}"
    [[ ! -e $state/preparation ]] ||
        fail "job $(<"$state/preparation") has prepared the data, but $DATA/index.json, $TEST_SRC or $TEST_REF is missing: put these folders on storage that all nodes share"
    local preparation
    preparation=$(submit_preparation) ||
        fail "the preparation cannot be submitted from this job, see the message above: set PREPARE_JOB in slurm/cluster.env, or submit it from a login node with slurm/pipeline.sh"
    echo "$preparation" >"$state/preparation"
    say "job $preparation prepares $DATA and the test set on CPUs; this job waits for it in the queue"
    wait_behind "$preparation"
}

# submit_preparation: submit prepare.sh as a separate job in this job's account and partition, and print its number.
submit_preparation() (
    local options=(--partition="$SLURM_JOB_PARTITION")
    [[ -z ${SLURM_JOB_ACCOUNT:-} ]] || options+=(--account="$SLURM_JOB_ACCOUNT")
    # Otherwise the other job would inherit this job's variables, such as its GPUs.
    local name
    for name in "${!SLURM_@}"; do [[ $name == SLURM_CONF ]] || unset "$name"; done
    sbatch --parsable "${options[@]}" "${PREPARE_JOB[@]}" slurm/prepare.sh
)

# wait_behind JOB: requeue this job to wait until JOB has succeeded. Does not return.
wait_behind() {
    requeue_changed "Dependency=afterok:$1" ||
        fail "SLURM does not let job $job wait: run the same sbatch command with --dependency=afterok:$1"
}

# doctor: check that the nodes are fit to train.
doctor() {
    [[ $DOCTOR == yes ]] || return 0
    remedy="the job is not fit to train: follow the remedies above and run the same sbatch command again (DOCTOR=no skips the check)" \
        run_step none "$SLURM_JOB_NUM_NODES" "$(tasks_per_node)" "${examine[@]}" --run-dir "$RUN_DIR" --data "$DATA"
}

# train FLAGS: train to the last step.
train() {
    doctor
    run_step none "$SLURM_JOB_NUM_NODES" "$(tasks_per_node)" "${PYTHON[@]}" -m dist_transformer train --data "$DATA" --run-dir "$RUN_DIR" "$@"
}

# check_flags FLAGS: check the flags of training before hours of preparation.
check_flags() {
    local flag
    for flag; do
        case $flag in
        --data | --data=*) fail "$flag is not for this job: set DATA in slurm/cluster.env or before sbatch, so that every part of the job knows it" ;;
        --run?dir | --run?dir=*) fail "$flag is not for this job: set RUN_DIR=... before sbatch, so that every part of the job knows it" ;;
        esac
    done
}

# evaluate FLAGS: write the mean of weights to RUN_DIR/model, and its scores to RUN_DIR/bleu.json. Without AVERAGE, the
# command leaves out weights of interruptions and of the warm-up.
evaluate() {
    need RUN_DIR TEST_SRC TEST_REF
    local weights=("$RUN_DIR"/weights/step-*.safetensors) number=()
    ((${#weights[@]} > 0)) || fail "$RUN_DIR has no weights: train first, or correct RUN_DIR"
    [[ -z ${AVERAGE:-} ]] || number=(--last $((AVERAGE < ${#weights[@]} ? AVERAGE : ${#weights[@]})))
    run_step none 1 1 "${PYTHON[@]}" -m dist_transformer average --run-dir "$RUN_DIR" --out "$RUN_DIR/model" "${number[@]}"
    run_step none "$SLURM_JOB_NUM_NODES" "$(tasks_per_node)" "${PYTHON[@]}" -m dist_transformer evaluate --model "$RUN_DIR/model" \
        --src "$TEST_SRC" --ref "$TEST_REF" --json "$RUN_DIR/bleu.json" "$@"
}

# choose_run MODEL: set RUN_DIR to the run folder of big or base, unless it is given. The paper averages 20 weight files
# of big, and 5 of base.
choose_run() {
    need RUNS PAIR
    RUN_DIR=${RUN_DIR:-$RUNS/$1-$PAIR}
    [[ $1 != big ]] || AVERAGE=${AVERAGE:-20}
}

# unless_given NAME VALUE … -- FLAGS: prints a script's own flags, a word on each line, without those that FLAGS has.
unless_given() {
    local own=() word at
    while [[ $1 != -- ]]; do own+=("$1") && shift; done
    shift
    for ((at = 0; at < ${#own[@]}; at += 2)); do
        for word in "$@"; do [[ ${word%%=*} != "${own[at]}" ]] || continue 2; done
        printf '%s\n' "${own[at]}" "${own[at + 1]}"
    done
}

# train_and_evaluate MODEL FLAGS: the whole job of a training script, from text to score. STAGES limits it to some
# stages.
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

# An environment on shared storage is thousands of small files; a copy of its archive on a disk of each node is one.
if [[ -n ${ARCHIVE:-} ]]; then
    need NODE_FOLDER
    on_each_node bash -c 'rm -rf "$1" && mkdir -p "$1"' _ "$NODE_FOLDER" &&
        sbcast "$ARCHIVE" "$NODE_FOLDER/archive" &&
        on_each_node bash -c 'tar -xf "$1/archive" -C "$1" && rm "$1/archive"' _ "$NODE_FOLDER" ||
        fail "$ARCHIVE cannot be unpacked to $NODE_FOLDER on each node, see the message above: correct ARCHIVE and NODE_FOLDER in slurm/cluster.env"
fi

remedy="PYTHON in slurm/cluster.env (${PYTHON[*]}) does not run Python 3.11 or newer on the nodes: correct it or its container, or install as docs/cluster.md says" \
    run_step none 1 1 "${PYTHON[@]}" -c 'import sys; sys.exit(sys.version_info < (3, 11))'
