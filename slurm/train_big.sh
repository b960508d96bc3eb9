#!/usr/bin/env bash
# The big model on WMT14: checks the nodes, trains, averages, evaluates.
#
#     sbatch slurm/train_big.sh                          # 128 packs of 3584 tokens a step (Ott et al. 2018), 20,000 steps
#     sbatch --nodes=1 --gpus-per-node=2 --mincpus=16 slurm/train_big.sh --preset big    # the paper's 25k tokens a step
#     PAIR=en-fr sbatch slurm/train_big.sh
#     sbatch slurm/train_big.sh --max-steps 1000         # any flag of dist_transformer.train
#
# Data that are not there are prepared first: the job submits slurm/prepare.sh, which needs no GPUs, and waits for it in the
# queue. So this one command is enough, and GPUs are held for seconds, not hours, before they are used.
#
# It takes as many nodes as it gets, up to 16; a step is the same on any number of GPUs up to 128. Before its time limit,
# and when it is preempted, it saves and goes back into the queue. Without GPUs: --gpus-per-node=0 --ntasks-per-node=N.
#
# CPUs are asked for a node, not a task: SLURM counts the tasks of a job when it first starts, and one that was started on
# two nodes by --ntasks-per-node would wait for two for ever when one is lost.
#SBATCH --job-name=train_big
#SBATCH --nodes=1-16
#SBATCH --gpus-per-node=8
#SBATCH --mincpus=64
#SBATCH --mem-per-cpu=4G
#SBATCH --time=24:00:00
#SBATCH --signal=USR1@300
#SBATCH --requeue
#SBATCH --kill-on-invalid-dep=yes
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.out
[[ -f slurm/lib.sh ]] || { echo "error: $PWD is not the checkout: sbatch in its root, or with --chdir" >&2 && exit 1; }
source slurm/lib.sh
flags=(--preset big_large_batch)
# The paper drops less out on the larger corpus.
[[ $PAIR != en-fr ]] || flags+=(--model.dropout 0.1)
train_and_evaluate big "${flags[@]}" "$@"
