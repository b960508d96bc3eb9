"""Run several processes of one command on this machine, with no process between them and this one."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress

from dist_transformer.base.errors import UserError
from dist_transformer.runtime.launch import LAUNCH_VARIABLE, environment_of_child, free_port, without_place
from dist_transformer.runtime.world import require_no_launch

MOST_PROCESSES = 1024
"""Most processes of one machine. A loop that is asked for 2^40 would take all memory."""

_PROGRAM = ("-m", "dist_transformer")
_PAUSE = 0.05
# Ranks that are told to end have this long.
_GRACE_SECONDS = 30.0
_SAME_CTRL_C_SECONDS = 0.2

Process = subprocess.Popen[bytes]


def run_processes(count: int, words: Sequence[str], check: Callable[[], object] = lambda: None) -> int:
    """Run `dist-transformer` with these words as `count` ranks, which have this process's standard streams.

    When a rank fails, the others are ended. SIGTERM, SIGUSR1, SIGUSR2, SIGHUP and Ctrl-C are passed on to
    all ranks.

    Args:
        check: called before the ranks start, which takes seconds; it may raise.

    Returns:
        status: 0; or that of the first rank that failed, as a shell gives it; or 130 after Ctrl-C.

    Raises:
        UserError: `count` is below 1 or above 1,024, or this process is one of several ranks already.
    """
    if not 1 <= count <= MOST_PROCESSES:
        raise UserError(f"--processes is {count}: it must be 1 to {MOST_PROCESSES:,}")
    require_no_launch("--processes")
    check()
    environment = {
        **without_place(environment_of_child()),
        "WORLD_SIZE": str(count),
        "LOCAL_WORLD_SIZE": str(count),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        LAUNCH_VARIABLE: f"{socket.gethostname()} {os.getpid()}",
    }
    ranks: list[Process] = []
    with _passing_on(ranks) as received:
        try:
            for rank in range(count):
                place = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
                ranks.append(subprocess.Popen([sys.executable, *_PROGRAM, *words], env={**environment, **place}))
            status = _wait(ranks)
        finally:
            _end(ranks)
    return 130 if signal.SIGINT in received and status != 0 else status


def _wait(ranks: Sequence[Process]) -> int:
    """Wait until all ranks have ended or one has failed; gives its status."""
    while True:
        statuses = [rank.poll() for rank in ranks]
        for status in statuses:
            if status:
                return 128 - status if status < 0 else status
        if None not in statuses:
            return 0
        time.sleep(_PAUSE)


def _end(ranks: Sequence[Process]) -> None:
    """End the ranks that still run."""
    deadline = time.monotonic() + _GRACE_SECONDS
    _send(ranks, signal.SIGTERM)
    while any(rank.poll() is None for rank in ranks) and time.monotonic() < deadline:
        time.sleep(_PAUSE)
    _send(ranks, signal.SIGKILL)
    for rank in ranks:
        rank.wait()


def _send(ranks: Sequence[Process], number: int) -> None:
    for rank in ranks:
        # It does nothing for a rank whose end was noticed.
        with suppress(ProcessLookupError):
            rank.send_signal(number)


@contextmanager
def _passing_on(ranks: Sequence[Process]) -> Iterator[set[int]]:
    """Pass signals on to the ranks; gives the numbers of those that came."""
    received: set[int] = set()

    def pass_on(number: int, _: object) -> None:
        received.add(number)
        if number == signal.SIGINT:
            # A terminal sends its Ctrl-C to the ranks as well. To a training, two close ones are one.
            timer = threading.Timer(_SAME_CTRL_C_SECONDS, _send, (ranks, number))
            timer.daemon = True
            timer.start()
        else:
            _send(ranks, number)

    before = {
        number: signal.signal(number, pass_on)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP)
        # In the background of a shell, Ctrl-C is ignored by this process and its ranks; under nohup, SIGHUP is.
        if signal.getsignal(number) != signal.SIG_IGN
    }
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
