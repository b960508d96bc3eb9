"""A thread that runs one search at a time, so that the event loop can answer meanwhile."""

import asyncio
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")


class TooBusyError(Exception):
    """Too many requests are waiting."""


class Worker:
    """A thread that runs work in the order of arrival.

    Args:
        most_waiting: most pieces of work that may wait while one runs.
    """

    def __init__(self, most_waiting: int) -> None:
        self._most_waiting = most_waiting
        self._jobs: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]]] = queue.SimpleQueue()
        # Number of pieces of work that are neither cancelled nor done.
        self._pending = 0
        self._lock = threading.Lock()
        # A daemon thread, so that the process does not wait for a search when it ends.
        threading.Thread(target=self._work, name="search", daemon=True).start()

    @property
    def is_busy(self) -> bool:
        return self._pending > 0

    async def run(self, work: Callable[[], T]) -> T:
        """Run work in the worker's thread. Work that is cancelled while it waits never starts.

        Raises:
            TooBusyError: the queue is full.
        """
        if self._pending > self._most_waiting:
            raise TooBusyError
        self._count(1)
        future: Future[T] = Future()
        future.add_done_callback(lambda _: self._count(-1))
        self._jobs.put((future, work))
        # Cancelling the wrapper cancels the future, unless its work has started.
        return await asyncio.wrap_future(future)

    def _count(self, change: int) -> None:
        # The worker's thread counts finished work; the event loop's thread counts new and cancelled work.
        with self._lock:
            self._pending += change

    def _work(self) -> None:
        while True:
            future, work = self._jobs.get()
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(work())
            except Exception as error:
                future.set_exception(error)
            except BaseException as error:
                # A failure of compiled code, such as a panic of Rust; past a handler, it would end the connection.
                future.set_exception(RuntimeError(repr(error)))
