#!/bin/sh
# Says in one sentence what the machine lacks before anything is installed. Usage: check_machine.sh PYTHON
python=${1:-python3}

fail() {
    echo "error: $1" >&2
    exit 1
}

case $PWD in
*" "*) fail "the path of this folder has a space, which PyTorch's compiler calls do not survive: move it, for example to $HOME/dist_transformer" ;;
esac
command -v "$python" >/dev/null 2>&1 ||
    fail "$python was not found: install Python 3.11 or newer, or name one with PYTHON=/path/to/python3"
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
    fail "$("$python" --version) is too old: install Python 3.11 or newer, or name one with PYTHON=/path/to/python3"
"$python" -c 'import ensurepip, venv' 2>/dev/null ||
    fail "$python has no venv module: install it (Debian and Ubuntu: apt-get install python3-venv)"
{ command -v c++ || command -v g++ || command -v clang++; } >/dev/null 2>&1 ||
    fail "no C++ compiler was found, and DeepSpeed builds a small module: install one (Debian and Ubuntu: apt-get install g++)"
"$python" -c 'import os, sys, sysconfig; sys.exit(not os.path.exists(sysconfig.get_path("include") + "/Python.h"))' ||
    fail "$python has no headers, and DeepSpeed builds a small module: install them (Debian and Ubuntu: apt-get install python3-dev)"
