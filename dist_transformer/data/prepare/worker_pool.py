"""Pool of worker processes on this machine that run tasks in parallel.

A task is a value with a method `run`: it is sent to a process, and its result comes back. The death of a process is
detected at once, because its pipe closes. A process whose parent dies ends itself.
"""

import multiprocessing
import os
import signal
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing import connection, resource_tracker
from multiprocessing.context import SpawnProcess
from types import TracebackType
from typing import Any, Protocol

from dist_transformer.base.errors import TransientError, UserError

Progress = Callable[[int], None]
"""Function to call with the number of pairs done since the last call."""

# Interval of checks for errors of other ranks.
_POLL_SECONDS = 0.5
_JOIN_SECONDS = 5.0
# A batch system ends every process of a job. This process gets time to handle its own signal before it reports that a
# worker was killed.
_TERMINATED_SECONDS = 0.3


class Task(Protocol):
    def run(self, progress: Progress) -> Any:
        """Do the task. Written files must be complete or absent, because the process may be killed at any moment."""


@dataclass(frozen=True, slots=True)
class _Worker:
    process: SpawnProcess
    pipe: connection.Connection


class WorkerPool:
    """Pool of at most `size` processes, which start when there is more than one task and end with the block."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._workers: list[_Worker] = []

    def __enter__(self) -> "WorkerPool":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for worker in self._workers:
            if kind is not None:
                worker.process.kill()
            worker.pipe.close()
        for worker in self._workers:
            worker.process.join(_JOIN_SECONDS)
            worker.process.kill()
            worker.process.join()
        self._workers.clear()

    def run(self, tasks: Sequence[Task], progress: Progress, poll: Callable[[], None]) -> Iterator[tuple[int, Any]]:
        """Do the tasks in order of their start; yield (index, result) of each when it is done.

        A pool of one process, or a single task, runs in the calling process.

        Args:
            poll: called regularly; it may raise to stop the work.

        Raises:
            TransientError: a process died.
        """
        if self.size == 1 or len(tasks) <= 1:
            for index, task in enumerate(tasks):
                poll()
                yield index, task.run(progress)
            return
        self._hire(min(self.size, len(tasks)))
        waiting = deque(enumerate(tasks))
        busy: dict[connection.Connection, int] = {}
        idle = [worker.pipe for worker in self._workers]
        while waiting or busy:
            while waiting and idle:
                pipe = idle.pop()
                busy[pipe], task = waiting.popleft()
                self._send(pipe, task)
            ready = connection.wait(list(busy), _POLL_SECONDS)
            for pipe in [pipe for pipe in busy if pipe in ready]:
                kind, value = self._receive(pipe)
                if kind == "progress":
                    progress(value)
                elif kind == "error":
                    raise value
                else:
                    idle.append(pipe)
                    yield busy.pop(pipe), value
            poll()

    def _hire(self, size: int) -> None:
        # Ctrl-C in a terminal reaches every process of the group. Only the parent handles it: the children inherit a
        # signal mask that blocks it, so they print nothing. The resource tracker is started before, because its start
        # would unblock the signal.
        resource_tracker.ensure_running()
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            spawn = multiprocessing.get_context("spawn")
            while len(self._workers) < size:
                ours, theirs = spawn.Pipe()
                process = spawn.Process(target=_serve, args=(theirs,), daemon=True)
                process.start()
                theirs.close()
                self._workers.append(_Worker(process, ours))
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def _send(self, pipe: connection.Connection, task: Task) -> None:
        try:
            pipe.send(task)
        except OSError:
            raise self._loss(pipe) from None

    def _receive(self, pipe: connection.Connection) -> tuple[str, Any]:
        try:
            return pipe.recv()
        except (EOFError, OSError):
            raise self._loss(pipe) from None

    def _loss(self, pipe: connection.Connection) -> TransientError:
        (process,) = [worker.process for worker in self._workers if worker.pipe is pipe]
        process.join(_JOIN_SECONDS)
        code = process.exitcode or 0
        if code == -signal.SIGTERM:
            time.sleep(_TERMINATED_SECONDS)
        how = f"killed by signal {-code}" if code < 0 else f"ended with status {code}"
        return TransientError(
            f"a worker process was {how}, often because memory is short: run the same command again to resume, with "
            "fewer --workers if memory is short"
        )


def _serve(pipe: connection.Connection) -> None:
    """Run as a worker: receive tasks and send results until the parent closes the pipe."""
    # Threads of the tokenizers library would compete with the other workers for the same cores.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    threading.Thread(target=_end_with_parent, daemon=True).start()
    while True:
        try:
            task = pipe.recv()
        except EOFError:
            return
        try:
            answer = ("done", task.run(lambda pairs: pipe.send(("progress", pairs))))
        except (UserError, OSError) as error:
            answer = ("error", error)
        except Exception as error:
            # The first line is what a user sees.
            summary = f"{type(error).__name__} in a worker process: {error}".splitlines()[0]
            answer = ("error", RuntimeError(f"{summary}\n{traceback.format_exc()}"))
        pipe.send(answer)


def _end_with_parent() -> None:
    """End this process when its parent ends; otherwise a worker that reads a long file would outlive it."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    connection.wait([parent.sentinel])
    os._exit(1)
