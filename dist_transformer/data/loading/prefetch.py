"""Prefetch micro-batches: a thread builds them before the training loop needs them."""

import queue
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace

from dist_transformer.data.loading.collate import Collator, MicroBatch
from dist_transformer.data.loading.plan import Step
from dist_transformer.data.loading.sharing import Draw

# Target tokens per rank that are built together, and how many such blocks may wait. Between two windows, shards are
# read, verified and planned, and nothing is built; the waiting blocks then last one second at 600,000 tokens/s. While a
# block is built, the training thread waits for the interpreter now and then: 0.8% of the time at that rate with blocks
# of 50,000 tokens, and 0.1% with these (Intel Xeon, 2026-11-24). Larger blocks would take less CPU time: with one pack
# per micro-batch, 25 million tokens per CPU second instead of 23.
BLOCK_TOKENS, _WAITING = 25_000, 24

Share = tuple[Step, list[MicroBatch]]


class Prefetcher:
    """Iterate over steps, each with this rank's micro-batches and the seconds that the caller waited for them.

    Args:
        draw: returns the next steps. It is called in the thread, so planning runs ahead, too.
        pin: copy micro-batches to page-locked memory, from which a GPU can copy while it computes.
    """

    def __init__(self, draw: Draw, collator: Collator, *, rank: int, world_size: int, pin: bool) -> None:
        self.collator, self.rank, self.world_size, self.pin = collator, rank, world_size, pin
        self._ready: queue.Queue[list[Share] | BaseException | None] = queue.Queue(_WAITING)
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._work, args=(draw,), name="prefetch", daemon=True)
        self._thread.start()

    def __iter__(self) -> Iterator[tuple[Step, list[MicroBatch], float]]:
        while True:
            started = time.monotonic()
            block = self._ready.get()
            stall = time.monotonic() - started
            if isinstance(block, BaseException):
                raise block
            if block is None:
                return
            for step, micro_batches in block:
                yield step, micro_batches, stall
                stall = 0.0

    def close(self) -> None:
        """Stop building, and wait until the thread has ended."""
        self._closing.set()
        while self._thread.is_alive():
            try:
                self._ready.get(timeout=0.05)
            except queue.Empty:
                continue

    def _work(self, draw: Draw) -> None:
        try:
            # The first step is built alone, because the training loop is waiting for it.
            size = 1
            while not self._closing.is_set() and (block := draw(size)):
                built = self._build(block)
                self.collator.pairs.forget_past()
                self._ready.put(built)
                size = steps_of_a_block(block, self.world_size)
            self._ready.put(None)
        except BaseException as error:  # the reader raises it
            self._ready.put(error)

    def _build(self, steps: list[Step]) -> list[Share]:
        shares = self.collator.micro_batches_of(steps, rank=self.rank, world_size=self.world_size)
        if self.pin:
            shares = [[replace(micro, batch=micro.batch.pin_memory()) for micro in share] for share in shares]
        return list(zip(steps, shares, strict=True))


def steps_of_a_block(steps: Sequence[Step], world_size: int) -> int:
    """Return how many steps like these are drawn and built together."""
    return max(1, BLOCK_TOKENS * world_size // max(1, steps[0].target_tokens))
