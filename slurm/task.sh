#!/usr/bin/env bash
# One task of a step: runs a command, and notes how it ended. Usage: task.sh FOLDER COMMAND...
#
# A status other than 0 becomes the empty file FOLDER/STATUS.TASK.NODE. srun tells one number for all tasks, the largest,
# in which a failure (1) is lost among tasks that were ended because of it (143). Status 75, "interrupted and saved",
# ends as 0: srun ends the others as soon as one has failed (--kill-on-bad-exit), and these are still saving.

# Signals reach the command too; only it decides what to do.
trap : USR1 USR2 TERM
ended=$1
shift
"$@"
status=$?
((status == 0)) || : >"$ended/$status.$SLURM_PROCID.$SLURMD_NODENAME"
((status == 75)) || exit "$status"
