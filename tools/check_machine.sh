#!/bin/sh
# Report in one sentence what the machine lacks, before anything is installed. Usage: check_machine.sh PYTHON
python=${1:-python3}

fail() {
    echo "error: $1" >&2
    exit 1
}

case $PWD in
*" "*) fail "the path of this folder has a space, with which the deepspeed command fails: move it, for example to $HOME/dist_transformer" ;;
esac
command -v "$python" >/dev/null 2>&1 ||
    fail "$python was not found: install Python 3.11 or newer, or name one with PYTHON=/path/to/python3"
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
    fail "$("$python" --version) is too old: install Python 3.11 or newer, or name one with PYTHON=/path/to/python3"
"$python" -c 'import ensurepip, venv' 2>/dev/null ||
    fail "$python has no venv module: install it (Debian and Ubuntu: apt-get install python3-venv)"
