"""Runs programs of this project quickly: see fork_server.py."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dist_transformer.runtime.launch import RANK_VARIABLES, free_port

ROOT = Path(__file__).resolve().parents[1]
SERVER = Path(__file__).with_name("fork_server.py")


@dataclass(frozen=True, kw_only=True, slots=True)
class Ended:
    """The status and the output of a command, as a user sees them."""

    status: int
    """The first that is not 0, of several processes."""
    output: str
    """Standard output, and standard error if that was not asked for apart."""
    errors: str = ""
    """Standard error."""


class Commands:
    """Starts commands, one after the other.

    Args:
        seconds: after which a command is ended, by a signal.
    """

    def __init__(self, scratch: Path, *, seconds: float = 600) -> None:
        self.scratch, self.seconds = scratch, seconds
        answers, theirs = os.pipe()
        self.server = subprocess.Popen(
            [sys.executable, SERVER, str(theirs)],
            cwd=ROOT,
            env=environment_of({"OMP_NUM_THREADS": "1"}),
            text=True,
            pass_fds=[theirs],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
        )
        os.close(theirs)
        self.answers = os.fdopen(answers)

    def close(self) -> None:
        assert self.server.stdin is not None
        self.server.stdin.close()
        self.server.wait(timeout=600)
        self.answers.close()

    def run(
        self, words: Sequence[object], folder: Path, *, stdin: Path = Path(os.devnull), **environment: str
    ) -> Ended:
        """Run `dist-transformer` with these words."""
        return self.start(["-m", "dist_transformer", *words], folder, stdin=stdin, environment=environment)

    def start(
        self,
        program: Sequence[object],
        folder: Path,
        *,
        ranks: int = 1,
        stdin: Path = Path(os.devnull),
        environment: dict[str, str] | None = None,
        seconds: float | None = None,
        apart: bool = False,
    ) -> Ended:
        """Run what a user types after `python`, in so many processes of one launch; waits for all of them.

        Args:
            apart: standard error is read apart from standard output.
        """
        files = [self.scratch / name for name in ("output", "errors")]
        for file in files:
            file.write_bytes(b"")
        master = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())} if ranks > 1 else {}
        job = self._job(program, folder, [stdin, files[0], files[1 if apart else 0]], master | (environment or {}))
        statuses: list[int] = self._ask({**job, "ranks": ranks, "seconds": seconds or self.seconds})
        output, errors = (file.read_bytes().decode(errors="replace") for file in files)
        return Ended(status=next(filter(None, statuses), 0), output=output, errors=errors)

    def begin(
        self,
        program: Sequence[object],
        folder: Path,
        *,
        output: Path,
        errors: Path | None = None,
        stdin: Path = Path(os.devnull),
        environment: dict[str, str] | None = None,
    ) -> "Begun":
        """Start what a user types after `python`, in a session of its own, and do not wait for it.

        Args:
            output: file that is appended to; and `errors`, if that is another one.
        """
        for file in filter(None, (output, errors)):
            file.touch()
        job = self._job(program, folder, [stdin, output, errors or output], environment or {})
        pid = self._ask({**job, "background": True})
        return Begun(pid=pid, output=output, errors=errors, status=lambda: self._ask({"asked": pid}))

    def _job(
        self, program: Sequence[object], folder: Path, files: Sequence[Path], environment: dict[str, str]
    ) -> dict[str, Any]:
        return {
            "words": [str(word) for word in program],
            "folder": str(folder),
            "environment": environment_of(environment),
            "files": [str(file) for file in files],
            "umask": current_umask(),
            "seconds": self.seconds,
            "ranks": 1,
            "background": False,
        }

    def _ask(self, job: dict[str, Any]) -> Any:
        assert self.server.stdin is not None
        print(json.dumps(job), file=self.server.stdin, flush=True)
        answer = self.answers.readline()
        assert answer, "fork_server.py has ended: its errors are above"
        return json.loads(answer)


@dataclass(kw_only=True, slots=True)
class Begun:
    """A program that was begun, as subprocess.Popen has it."""

    pid: int
    output: Path
    errors: Path | None
    status: Callable[[], int | None]
    returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None:
            self.returncode = self.status()
        return self.returncode

    def wait(self, timeout: float = 600) -> int:
        deadline = time.monotonic() + timeout
        while self.poll() is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(str(self.pid), timeout)
            time.sleep(0.02)
        assert self.returncode is not None
        return self.returncode

    def communicate(self, timeout: float = 600) -> tuple[str, str]:
        """Wait for its end; gives what it has written to each file."""
        self.wait(timeout)
        return self.written(), self.errors.read_text(errors="replace") if self.errors else ""

    def first_line(self, timeout: float = 600) -> str:
        """Wait for a line of its output, or its end."""
        deadline = time.monotonic() + timeout
        while "\n" not in (text := self.written()) and self.poll() is None:
            assert time.monotonic() < deadline, "no line is written"
            time.sleep(0.02)
        return text.partition("\n")[0] + "\n"

    def written(self) -> str:
        """Give its output until now."""
        return self.output.read_text(errors="replace")

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def current_umask() -> int:
    umask = os.umask(0)
    os.umask(umask)
    return umask


def environment_of(changes: dict[str, Any]) -> dict[str, str]:
    """Give this process's environment with changes, and without the group that it may hold."""
    no_rank = {name: value for name, value in os.environ.items() if name not in RANK_VARIABLES}
    return {"PYTHONPATH": str(ROOT), **no_rank, "DS_ACCELERATOR": "cpu", **changes}


def rank_variables(rank: int, world: int) -> dict[str, str]:
    """Give what a launcher tells a process of its place, on one machine."""
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
    return {name: str(value) for name, value in place.items()}
