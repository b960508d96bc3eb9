"""Commands that start other commands of this project: what is typed is printed before it runs."""

import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TextIO

from dist_transformer.errors import UserError
from dist_transformer.interpreter import typed_path

RANK_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""What a launcher tells a process of its place, and a process of another job must not believe."""

_TOOLS = Path(__file__).resolve().parents[1] / "tools"


def deepspeed_command(ranks: int) -> list[object]:
    """DeepSpeed's launcher beside this interpreter, for `ranks` processes, on a port that is free."""
    return [installed_program("deepspeed"), "--quiet", "--num_gpus", ranks, "--master_port", free_port()]


def tool_command(name: str, *arguments: object) -> list[object]:
    """A script of tools/ under this interpreter."""
    return [sys.executable, typed_path(_TOOLS / name), *arguments]


def installed_program(name: str) -> Path:
    """A program that a package brought into the environment of this interpreter."""
    return Path(sys.executable).with_name(name)


def as_typed(command: Sequence[object]) -> str:
    """Return a command, which begins with a program's path, as one types it in a new shell in this folder.

    A program's name is enough if the shell finds it by that: where the environment of this interpreter is active.
    """
    program, *arguments = map(str, command)
    folder, name = os.path.split(program)
    found = shutil.which(name)
    # The folders are compared: python is a link in each environment, and all of them lead to one file.
    if found and os.path.samefile(os.path.dirname(found), folder):
        return shlex.join([name, *arguments])
    return shlex.join([typed_path(program), *arguments])


def free_port() -> int:
    """A port of this machine that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        port: int = probe.getsockname()[1]
    return port


def run_printed(command: Sequence[object], *, output: TextIO = sys.stdout, seconds: float | None = None) -> str:
    """Print a command to `output` and run it with its output there.

    Returns:
        the command for a record: its program by name, as it is typed where its environment is active.

    Raises:
        UserError: it failed, or took longer than `seconds` and was ended.
    """
    import torch

    words = [str(word) for word in command]
    print(f"$ {as_typed(words)}", file=output, flush=True)
    # Without a GPU, DeepSpeed's launcher would warn that it found none.
    environment = os.environ if torch.cuda.is_available() else {**os.environ, "DS_ACCELERATOR": "cpu"}
    try:
        status = subprocess.run(words, check=False, env=environment, stdout=output, timeout=seconds).returncode
    except subprocess.TimeoutExpired:
        raise UserError(f"the command above took more than {seconds:.0f} s: give it more time, or less to do") from None
    if status < 0:
        name = signal.Signals(-status).name
        raise UserError(f"the command above was ended by {name}: SIGKILL mostly comes where memory does not suffice")
    if status != 0:
        raise UserError(f"the command above ended with status {status}: mend what it says and run this one again")
    return shlex.join([Path(words[0]).name, *words[1:]])
