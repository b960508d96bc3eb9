"""No rank decides alone that a shard cannot be used."""

import threading

from dist_transformer.data.folder.reader import Split
from dist_transformer.data.loading.plan import Window
from dist_transformer.errors import UserError
from dist_transformer.runtime import distributed


class ShardAgreement:
    """Lets a plan use the shards of a window that all ranks can read. Works in the thread that plans ahead.

    Args:
        skip: leave the others out. Otherwise they end the run on all ranks.
        timeout_minutes: how long a rank that is ahead waits for the others.
    """

    def __init__(self, *, skip: bool, timeout_minutes: float) -> None:
        self.skip = skip
        self.problems: dict[tuple[int, int], str] = {}
        """By corpus and shard: why it is left out."""
        # The training loop's collectives go on at the same time: ours need a group of their own.
        self._group = distributed.new_cpu_group(timeout_minutes)
        self._begun = 0
        self._closed = False
        self._counting, self._agreeing = threading.Lock(), threading.Lock()

    def admit(self, split: Split, window: Window) -> dict[int, int]:
        """Read a window's shards, and let the following be fetched; gives those that are left out. A collective.

        They are held until the window is past, so no shard goes bad inside it but between a run and its resumption:
        the plan then goes on without the shard from the next pack on.

        Raises:
            UserError: a shard cannot be read; the same on all ranks.
        """
        problems = split.hold(window.shards)
        with self._counting:
            if self._closed:
                raise UserError("the run has ended")
            self._begun += 1
        agreed = self._agree(problems)
        split.fetch_ahead(window.following)
        if agreed and not self.skip:
            raise UserError(agreed[min(agreed)])
        self.problems.update({(window.corpus, shard): problem for shard, problem in agreed.items()})
        return dict.fromkeys(agreed, window.packs_consumed)

    def close(self) -> None:
        """End without leaving any rank in a window that others will not reach. A collective."""
        with self._counting:
            self._closed = True
            begun = self._begun
        for _ in range(max(distributed.gather_objects(begun)) - begun):
            self._agree({})

    def _agree(self, problems: dict[int, str]) -> dict[int, str]:
        """The problems of all ranks; of several with one shard, that of the lowest rank."""
        with self._agreeing:
            merged: dict[int, str] = {}
            for found in reversed(distributed.gather_objects(problems, self._group)):
                merged.update(found)
            return merged
