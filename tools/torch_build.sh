#!/bin/sh
# Print pip's options for the build of torch that suits this machine, and report on stderr what will be downloaded.
# Usage: torch_build.sh PYTHON
python=$1

if command -v nvidia-smi >/dev/null 2>&1; then
    echo "this machine has an NVIDIA driver: downloading libraries with CUDA, 3 GB, 6 GB when installed" >&2
elif "$python" -m pip install --quiet --dry-run --ignore-installed --no-deps --no-index -c constraints.txt torch \
    >/dev/null 2>&1; then
    echo "torch comes from a wheel on this machine: downloading the other libraries, 0.3 GB" >&2
else
    echo "no NVIDIA driver: downloading libraries with PyTorch's build for CPUs, 0.5 GB, 2 GB when installed" >&2
    echo "--extra-index-url https://download.pytorch.org/whl/cpu"
fi
