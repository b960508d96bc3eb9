"""Pool of worker processes on this machine that run tasks in parallel.

A task is sent to a process, and its result comes back. A process whose parent dies ends itself.
"""

import contextlib
import multiprocessing
import os
import queue
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import connection, resource_tracker
from multiprocessing.process import BaseProcess
from multiprocessing.queues import SimpleQueue
from types import TracebackType
from typing import Any

from dist_transformer.base.errors import TransientError

Progress = Callable[[int], None]
"""Function to call with the number of pairs done since the last call."""
Task = Callable[[Progress], Any]
"""Work that is sent to a process. Written files must be complete or absent: the process may be killed at any moment."""

# Interval of checks for errors of other ranks.
_POLL_SECONDS = 0.5
# A batch system ends every process of a job. This process gets time to handle its own signal before it reports that a
# worker was killed.
_TERMINATED_SECONDS = 0.3


class WorkerPool:
    """Pool of at most `size` processes, which start when there is more than one task and end with the block."""

    def __init__(self, size: int) -> None:
        self.size = size
        spawn = multiprocessing.get_context("spawn")
        self._progress: SimpleQueue[int] = spawn.SimpleQueue()
        self._executor = ProcessPoolExecutor(size, spawn, initializer=_start, initargs=(self._progress,))
        self._processes: list[BaseProcess] = []

    def __enter__(self) -> "WorkerPool":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            for process in self._processes:
                process.kill()
        self._executor.shutdown(cancel_futures=True)

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
                yield index, task(progress)
            return
        try:
            yield from self._run(tasks, progress, poll)
        except BrokenProcessPool:
            raise self._loss() from None

    def _run(self, tasks: Sequence[Task], progress: Progress, poll: Callable[[], None]) -> Iterator[tuple[int, Any]]:
        done: queue.SimpleQueue[Future[Any]] = queue.SimpleQueue()
        left = self._submit(tasks)
        for future in left:
            future.add_done_callback(done.put)
        while left:
            with contextlib.suppress(queue.Empty):
                found = done.get(timeout=_POLL_SECONDS)
                self._report(progress)
                yield left.pop(found), found.result()
            self._report(progress)
            # The executor does not watch a process that it started after its last wait (CPython 3.11).
            if any(process.exitcode is not None for process in self._processes):
                raise BrokenProcessPool
            poll()

    def _report(self, progress: Progress) -> None:
        while not self._progress.empty():
            progress(self._progress.get())

    def _submit(self, tasks: Sequence[Task]) -> dict[Future[Any], int]:
        # Ctrl-C in a terminal reaches every process of the group. Only the parent handles it: the children inherit a
        # signal mask that blocks it, so they print nothing. The resource tracker is started before, because its start
        # would unblock the signal.
        resource_tracker.ensure_running()
        # A program that uses the package may have children of its own.
        others = multiprocessing.active_children()
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            return {self._executor.submit(_work, task): index for index, task in enumerate(tasks)}
        finally:
            self._processes += [each for each in multiprocessing.active_children() if each not in others]
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def _loss(self) -> TransientError:
        self._executor.shutdown()
        # The executor ends the others by SIGTERM.
        codes = [process.exitcode or 0 for process in self._processes]
        code = next((code for code in codes if code not in (0, -signal.SIGTERM)), -signal.SIGTERM)
        if code == -signal.SIGTERM:
            time.sleep(_TERMINATED_SECONDS)
        how = f"killed by signal {-code}" if code < 0 else f"ended with status {code}"
        return TransientError(
            f"a worker process was {how}, often because memory is short: run the same command again to resume, with "
            "fewer --workers if memory is short"
        )


_progress: list["SimpleQueue[int]"] = []
"""Queue of a worker for its progress."""


def _start(progress: "SimpleQueue[int]") -> None:
    """Prepare a worker."""
    # Threads of the tokenizers library would compete with the other workers for the same cores.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    _progress.append(progress)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _work(task: Task) -> Any:
    return task(_progress[0].put)


def _end_with_parent() -> None:
    """End this process when its parent ends; otherwise a worker that reads a long file would outlive it."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    connection.wait([parent.sentinel])
    os._exit(1)
