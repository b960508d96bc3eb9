#!/usr/bin/env bash
# One task of a step: runs a command and records its exit status. Usage: task.sh FOLDER COMMAND...
#
# A status other than 0 becomes the empty file FOLDER/STATUS.TASK.NODE. srun reports only the largest status of all
# tasks, which hides a failure (1) behind tasks that were killed because of it (143). Status 75, "interrupted and
# saved", is returned as 0, because srun kills the other tasks, which are still saving, as soon as one fails
# (--kill-on-bad-exit).

# Signals also reach the command, which alone handles them.
trap : USR1 USR2 TERM
ended=$1
shift
"$@"
status=$?
((status == 0)) || : >"$ended/$status.$SLURM_PROCID.$SLURMD_NODENAME"
((status == 75)) || exit "$status"
