"""Processes of this machine that do tasks side by side.

A task is a value with a method `run`: it is sent to a process, and its result comes back. A process that dies is
noticed at once, for its pipe closes; a process whose parent dies ends itself.
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

from dist_transformer.errors import TransientError, UserError

Progress = Callable[[int], None]
"""Called with the number of pairs done since the last call."""

# Between looks at what the other ranks of a launch say.
_POLL_SECONDS = 0.5
_JOIN_SECONDS = 5.0
# A batch system ends every process of a job: time for our own signal to be answered, before a worker's is reported.
_TERMINATED_SECONDS = 0.3


class Task(Protocol):
    def run(self, progress: Progress) -> Any:
        """Do it. What is written must be whole or absent, for the process may be killed at any moment."""


@dataclass(frozen=True, slots=True)
class _Worker:
    process: SpawnProcess
    pipe: connection.Connection


class WorkerPool:
    """At most `size` processes, started when there is more than one task, and gone when the block ends."""

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
        """Do the tasks, the first ones first; gives (index, result) as they are done.

        `poll` is called now and then, and may raise to stop. With one process, or one task, it is done in this one.

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
        # Ctrl-C in a terminal reaches every process of the group. The parent alone answers it: its children inherit a
        # mask that holds it back, and so print nothing. The tracker that `spawn` needs would lift the mask again.
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
            f"a worker process was {how}, often for lack of memory: run the same command again, which goes on, "
            "with fewer --workers if memory is short"
        )


def _serve(pipe: connection.Connection) -> None:
    """The life of a worker: tasks in, results out, until the parent closes the pipe."""
    # Its own threads would compete with the other workers for the same cores.
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
        except Exception:
            answer = ("error", RuntimeError(f"in a worker process:\n{traceback.format_exc()}"))
        pipe.send(answer)


def _end_with_parent() -> None:
    """Without it, a worker in the middle of a long file would outlive a parent that was killed."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    connection.wait([parent.sentinel])
    os._exit(1)
