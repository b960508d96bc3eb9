"""Commands that start other commands of this project: what is typed is printed before it runs."""

import os
import shlex
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TextIO

from dist_transformer.errors import UserError

RANK_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""What a launcher tells a process of its place, and a process of another job must not believe."""


def deepspeed_command(ranks: int) -> list[object]:
    """DeepSpeed's launcher beside this interpreter, for `ranks` processes, on a port that is free."""
    script = Path(sys.executable).with_name("deepspeed")
    return [script, "--quiet", "--num_gpus", ranks, "--master_port", free_port()]


def free_port() -> int:
    """A port of this machine that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        port: int = probe.getsockname()[1]
    return port


def run_printed(command: Sequence[object], *, output: TextIO = sys.stdout, seconds: float | None = None) -> str:
    """Print a command to `output`, run it with its output there, and give it as one would type it.

    Raises:
        UserError: it failed, or took longer than `seconds` and was ended.
    """
    import torch

    words = [str(word) for word in command]
    typed = shlex.join([Path(words[0]).name, *words[1:]])
    print(f"$ {typed}", file=output, flush=True)
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
    return typed
