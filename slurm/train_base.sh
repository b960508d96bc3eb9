#!/usr/bin/env bash
# Train the base model on WMT14: check the nodes, train, average, evaluate.
#
#     sbatch slurm/train_base.sh                         # 25k tokens per step, 100,000 steps, as in the paper
#     PAIR=en-fr sbatch --gpus-per-node=4 slurm/train_base.sh
#     sbatch slurm/train_base.sh --max-steps 1000        # any flag of dist-transformer train
#
# Missing data is prepared first, by a job without GPUs; this job waits for it in the queue.
#
# A step is 64 packs, so at most 64 GPUs share it. Before its time limit and on preemption, the job saves and is
# requeued. Without GPUs: --gpus-per-node=0 --ntasks-per-node=N.
#SBATCH --job-name=train_base
#SBATCH --nodes=1
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
mapfile -t flags < <(unless_given --preset base -- "$@")
train_and_evaluate base "${flags[@]}" "$@"
