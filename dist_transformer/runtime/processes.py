"""Run several processes of one command on this machine, under DeepSpeed's launcher and without its messages.

The launcher's own output goes to a file, and is shown only if the launcher fails before any rank has started. The ranks
open the terminal themselves, because the launcher would give them its own outputs.
"""

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from dist_transformer.base.errors import UserError
from dist_transformer.runtime.launch import deepspeed_command, environment_of_no_task
from dist_transformer.runtime.world import require_no_launch

MOST_PROCESSES = 1024
"""Most processes of one machine. A launcher that is asked for 2^40 takes all memory for their names."""

_VARIABLE = "DIST_TRANSFORMER_STREAMS"
_STREAMS = {0: os.O_RDONLY, 1: os.O_WRONLY | os.O_APPEND, 2: os.O_WRONLY | os.O_APPEND}


def run_processes(count: int, words: Sequence[str], check: Callable[[], object] = lambda: None) -> int:
    """Run `dist-transformer` with these words as `count` ranks; return the launcher's exit status.

    Args:
        check: called before the ranks start, which takes seconds; it may raise.

    Raises:
        UserError: `count` is below 1 or above 1,024, this process is one of several ranks already, or the launcher
            fails before a rank has started.
    """
    if not 1 <= count <= MOST_PROCESSES:
        raise UserError(f"--processes is {count}: give 1 to {MOST_PROCESSES:,}")
    require_no_launch("--processes")
    check()
    import torch

    with tempfile.TemporaryDirectory(prefix="dist_transformer-ranks-") as folder:
        for number in _STREAMS:
            (Path(folder) / str(number)).symlink_to(f"/proc/{os.getpid()}/fd/{number}")
        environment = {**environment_of_no_task(), _VARIABLE: folder}
        if not torch.cuda.is_available():
            # Otherwise the launcher looks for an accelerator, and warns.
            environment.setdefault("DS_ACCELERATOR", "cpu")
        launcher = [*deepspeed_command(count), "--no_local_rank", "--module", "dist_transformer", *words]
        log = Path(folder) / "launcher.log"
        with log.open("wb") as output:
            process = subprocess.Popen(
                [str(word) for word in launcher], env=environment, stdout=output, stderr=subprocess.STDOUT
            )
        status = _wait(process)
        for number in (1, 2):
            # If an output is a file, the ranks have appended to it, but this process's offset is still the old one. A
            # pipe has no offset.
            with suppress(OSError):
                os.lseek(number, 0, os.SEEK_END)
        if status != 0 and not any(Path(folder).glob("rank-*")):
            lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines() or ["it printed nothing"]
            raise UserError(f"DeepSpeed's launcher failed before any process started: {lines[-1]:.300}")
    return status


def adopt_streams() -> None:
    """In a rank of `run_processes`, use the standard streams of the process that called it."""
    folder = os.environ.pop(_VARIABLE, None)
    if folder is None:
        return
    for number, flags in _STREAMS.items():
        # A socket cannot be opened by name: then the rank keeps the stream that the launcher gave it.
        with suppress(OSError):
            opened = os.open(f"{folder}/{number}", flags)
            os.dup2(opened, number)
            os.close(opened)
    (Path(folder) / f"rank-{os.environ.get('RANK', '0')}").touch()


def _wait(process: "subprocess.Popen[bytes]") -> int:
    """Wait for the launcher, which gets a terminal's Ctrl-C as well; forward other signals to it."""

    def pass_on(number: int, _: object) -> None:
        process.send_signal(number)

    before = {
        signal.SIGINT: signal.signal(signal.SIGINT, signal.SIG_IGN),
        signal.SIGTERM: signal.signal(signal.SIGTERM, pass_on),
        signal.SIGUSR1: signal.signal(signal.SIGUSR1, pass_on),
        signal.SIGUSR2: signal.signal(signal.SIGUSR2, pass_on),
    }
    try:
        status = process.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        sys.stdout.flush()
    return 128 - status if status < 0 else status
