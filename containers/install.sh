#!/bin/sh
# Installs the package, with all that training on a cluster needs, into a Debian 12 system that has nothing: as root, from
# the checkout. containers/Dockerfile and containers/dist_transformer.def run it. What it installs is in
# /opt/dist_transformer, a virtual environment with the versions of constraints.txt.
#
# TORCH is what pip installs as torch, the wheel of its index by default. That one is built for CUDA 13, which needs an
# NVIDIA driver of version 580 or newer on the nodes (nvidia-smi shows it). For a build for CUDA 12, which runs from
# driver 525 on, or for CPUs, give the index that torch's own page names: TORCH="--index-url URL torch".
set -eu
[ -f constraints.txt ] || { echo "error: $PWD is not the checkout: run containers/install.sh in its root" >&2 && exit 1; }
prefix=/opt/dist_transformer

# g++ and Python's headers: DeepSpeed and torch.compile build small extensions at their first use. ibverbs: NCCL loads it
# to use InfiniBand; without it, it takes TCP and does not complain.
export DEBIAN_FRONTEND=noninteractive
apt-get update -q
apt-get install -q -y --no-install-recommends ca-certificates g++ ibverbs-providers libibverbs1 python3-dev python3-venv
rm -rf /var/lib/apt/lists/*

# Training needs no rights; a cluster starts the container as its user anyway.
useradd --create-home --shell /bin/bash trainer

python3 -m venv "$prefix"
pip() { "$prefix/bin/python" -m pip --no-cache-dir install --quiet -c constraints.txt "$@"; }
# shellcheck disable=SC2086 # words of pip
pip ${TORCH:-torch}
# With an MPI library, for preparations on several nodes.
pip ".[mpi]"
