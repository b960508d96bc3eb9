import asyncio
import threading

import pytest

from dist_transformer.serving.worker import TooBusyError, Worker


def test_work_is_done_in_order_one_at_a_time() -> None:
    done: list[int] = []

    async def main() -> list[int]:
        worker = Worker(most_waiting=8)
        return await asyncio.gather(
            *(worker.run(lambda i=i: done.append(i) or threading.get_ident()) for i in range(5))
        )

    threads = asyncio.run(main())
    assert done == list(range(5))
    assert len(set(threads)) == 1
    assert threads[0] != threading.get_ident()


def test_more_than_may_wait_are_refused_and_dropped_work_is_never_begun() -> None:
    begun, release, done = threading.Event(), threading.Event(), []

    def first() -> None:
        begun.set()
        assert release.wait(30)

    async def main() -> None:
        worker = Worker(most_waiting=2)
        running = asyncio.create_task(worker.run(first))
        await asyncio.to_thread(begun.wait, 30)
        waiting = [asyncio.create_task(worker.run(lambda i=i: done.append(i))) for i in range(2)]
        await asyncio.sleep(0)
        with pytest.raises(TooBusyError):
            await worker.run(lambda: done.append(2))
        # The client of the first that waits is gone: there is room again.
        waiting[0].cancel()
        await asyncio.sleep(0.01)
        third = asyncio.create_task(worker.run(lambda: done.append(3)))
        await asyncio.sleep(0)
        assert worker.is_busy
        release.set()
        await asyncio.gather(running, waiting[1], third)
        assert done == [1, 3]
        assert not worker.is_busy

    asyncio.run(main())


def test_a_client_that_leaves_during_its_search_keeps_its_place() -> None:
    """A search cannot be stopped, so that the next one waits for it."""
    begun, release = threading.Event(), threading.Event()

    async def main() -> None:
        worker = Worker(most_waiting=0)
        running = asyncio.create_task(worker.run(lambda: begun.set() or release.wait(30)))
        await asyncio.to_thread(begun.wait, 30)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        with pytest.raises(TooBusyError):
            await worker.run(lambda: None)
        release.set()
        while worker.is_busy:
            await asyncio.sleep(0.01)
        assert await worker.run(lambda: 5) == 5

    asyncio.run(main())


def test_a_panic_of_compiled_code_is_an_error_of_its_work() -> None:
    class PanicException(BaseException):
        """Panic as Rust raises it: not an Exception."""

    def panic() -> None:
        raise PanicException("index out of bounds")

    async def main() -> None:
        with pytest.raises(RuntimeError, match="index out of bounds"):
            await Worker(most_waiting=1).run(panic)

    asyncio.run(main())
