"""Run a command of this program as a child of a Python program that uses the package."""

import os
import signal
import subprocess
import threading
from collections.abc import Callable, Sequence
from typing import IO

from dist_transformer.base.errors import log_line, logger
from dist_transformer.runtime.launch import CALLER_VARIABLE, environment_of_child

_ERROR = "error: "


def run_child(command: Sequence[object]) -> tuple[int, str | None]:
    """Run a command and log its lines: those on stdout by `log_line`, those on stderr as warnings.

    Ctrl-C is passed to the command once; KeyboardInterrupt is raised after the command has ended.

    Returns:
        exit status, and the text of its last error line, if there is one.
    """
    process = subprocess.Popen(
        [str(word) for word in command],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        encoding="utf-8",
        errors="replace",
        env={**environment_of_child(), CALLER_VARIABLE: str(os.getpid()), "PYTHONUNBUFFERED": "1"},
        # Otherwise the command would get a terminal's Ctrl-C a second time.
        start_new_session=True,
    )
    assert process.stdout is not None
    assert process.stderr is not None
    errors: list[str] = []
    readers = [
        threading.Thread(target=_forward, args=(process.stdout, log_line, [])),
        threading.Thread(target=_forward, args=(process.stderr, logger.warning, errors)),
    ]
    for reader in readers:
        reader.start()
    try:
        process.wait()
    except KeyboardInterrupt:
        process.send_signal(signal.SIGINT)
        process.wait()
        raise
    finally:
        for reader in readers:
            reader.join()
    return process.returncode, errors[-1] if errors else None


def _forward(pipe: IO[str], log: Callable[[str], None], errors: list[str]) -> None:
    for line in pipe:
        log(line.rstrip("\n"))
        if line.startswith(_ERROR):
            errors.append(line.removeprefix(_ERROR).strip())
