#!/usr/bin/env bash
# Train the big model on WMT14: check the nodes, train, average, evaluate.
#
#     sbatch slurm/train_big.sh                          # 128 packs of 3584 tokens per step (Ott et al. 2018), 20,000 steps
#     sbatch --nodes=1 --gpus-per-node=2 --mincpus=16 slurm/train_big.sh --preset big    # the paper's 25k tokens per step
#     PAIR=en-fr sbatch slurm/train_big.sh
#     sbatch slurm/train_big.sh --max-steps 1000         # any flag of dist-transformer train
#
# Missing data is prepared first: the job submits slurm/prepare.sh, which needs no GPUs, and waits for it in the queue.
# This one command is enough, and GPUs are held for seconds, not hours, before they are used.
#
# It uses as many nodes as it gets, up to 4; a step is the same on any number of GPUs up to 128. Before its time limit
# and on preemption, it saves and is requeued. Without GPUs: --gpus-per-node=0 --ntasks-per-node=N.
#
# CPUs are requested per node, not per task: SLURM counts the tasks of a job when it first starts. With
# --ntasks-per-node, a job that started on two nodes would wait for two forever after one is lost.
#SBATCH --job-name=train_big
#SBATCH --nodes=1-4
#SBATCH --gpus-per-node=8
#SBATCH --mincpus=64
#SBATCH --mem-per-cpu=4G
#SBATCH --gres-flags=enforce-binding
#SBATCH --time=24:00:00
#SBATCH --signal=USR1@300
#SBATCH --requeue
#SBATCH --kill-on-invalid-dep=yes
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.out
[[ -f slurm/lib.sh ]] || { echo "error: $PWD is not the checkout: sbatch in its root, or with --chdir" >&2 && exit 1; }
source slurm/lib.sh
flags=(--preset big_large_batch)
# The paper uses less dropout on the larger corpus.
[[ $PAIR != en-fr ]] || flags+=(--model.dropout 0.1)
mapfile -t flags < <(unless_given "${flags[@]}" -- "$@")
train_and_evaluate big "${flags[@]}" "$@"
