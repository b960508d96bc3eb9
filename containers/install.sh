#!/bin/sh
# Install the package, with everything that training on a cluster needs, into a bare Debian 12 system: as root, from the
# checkout. containers/Dockerfile and containers/dist_transformer.def run it. It installs into /opt/dist_transformer, a
# virtual environment with the versions of constraints.txt.
#
# TORCH is pip's argument for torch; by default, the wheel of pip's index. It is built for CUDA 13, which needs an
# NVIDIA driver of version 580 or newer on the nodes (nvidia-smi shows it). For a build for CUDA 12, which needs driver
# 525 or newer, or for CPUs, give the index that torch's own page names: TORCH="--index-url URL torch".
set -eu
[ -f constraints.txt ] || { echo "error: $PWD is not the checkout: run containers/install.sh in its root" >&2 && exit 1; }
prefix=/opt/dist_transformer

# g++ and Python's headers: DeepSpeed and torch.compile build small extensions at first use. ibverbs: NCCL needs it for
# InfiniBand; without it, NCCL uses TCP and gives no warning.
export DEBIAN_FRONTEND=noninteractive
apt-get update -q
apt-get install -q -y --no-install-recommends ca-certificates g++ ibverbs-providers libibverbs1 python3-dev python3-venv
rm -rf /var/lib/apt/lists/*

# Training needs no root permissions; a cluster starts the container as the job's user.
useradd --create-home --shell /bin/bash trainer

python3 -m venv "$prefix"
pip() { "$prefix/bin/python" -m pip --no-cache-dir install --quiet -c constraints.txt "$@"; }
# shellcheck disable=SC2086 # words of pip
pip ${TORCH:-torch}
# With an MPI library, for preparation on several nodes.
pip ".[mpi]"
