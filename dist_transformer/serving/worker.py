"""One search at a time in a thread of its own, so that the event loop answers meanwhile."""

import asyncio
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")


class TooBusyError(Exception):
    """As many requests wait as may."""


class Worker:
    """Does work in the order of its arrival.

    Args:
        most_waiting: work that may wait behind what is being done.
    """

    def __init__(self, most_waiting: int) -> None:
        self._most_waiting = most_waiting
        self._jobs: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]]] = queue.SimpleQueue()
        # Work that nobody has dropped and that is not done.
        self._pending = 0
        self._lock = threading.Lock()
        # A daemon: the process does not wait for a search when it ends.
        threading.Thread(target=self._work, name="search", daemon=True).start()

    @property
    def is_busy(self) -> bool:
        return self._pending > 0

    async def run(self, work: Callable[[], T]) -> T:
        """Do work in the worker's thread. Cancelled while it waits, it is never begun.

        Raises:
            TooBusyError: no more may wait.
        """
        if self._pending > self._most_waiting:
            raise TooBusyError
        self._count(1)
        future: Future[T] = Future()
        future.add_done_callback(lambda _: self._count(-1))
        self._jobs.put((future, work))
        # Cancelling what this gives cancels the future, unless its work was begun.
        return await asyncio.wrap_future(future)

    def _count(self, change: int) -> None:
        # Done work is counted in the worker's thread, new and cancelled work in the event loop's.
        with self._lock:
            self._pending += change

    def _work(self) -> None:
        while True:
            future, work = self._jobs.get()
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(work())
            except BaseException as error:
                future.set_exception(error)
