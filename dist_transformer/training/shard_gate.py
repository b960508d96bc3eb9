"""No rank decides alone that a shard cannot be used."""

import threading
from collections.abc import Sequence

from dist_transformer import distributed
from dist_transformer.data.folder import Split
from dist_transformer.errors import UserError


class ShardGate:
    """Lets a plan use the shards of a window that all ranks can read. Works in the thread that plans ahead.

    Args:
        skip: leave the others out. Otherwise they end the run on all ranks.
        timeout_minutes: how long a rank that is ahead waits for the others.
    """

    def __init__(self, *, skip: bool, timeout_minutes: float) -> None:
        self.skip = skip
        self._left_out: dict[str, str] = {}
        # The training loop's collectives go on at the same time: ours need a group of their own.
        self._group = distributed.new_cpu_group(timeout_minutes)
        self._begun = 0
        self._closed = False
        self._counting, self._agreeing = threading.Lock(), threading.Lock()

    def admit(self, split: Split, shards: Sequence[int], following: Sequence[int]) -> set[int]:
        """Open a window's shards, and let the following be fetched; gives those that are left out. A collective.

        Raises:
            UserError: a shard cannot be read; the same on all ranks.
        """
        problems = split.read_problems(shards)
        with self._counting:
            if self._closed:
                raise UserError("the run has ended")
            self._begun += 1
        agreed = self._agree(problems)
        split.fetch_ahead(following)
        if agreed and not self.skip:
            raise UserError(agreed[min(agreed)])
        for shard in sorted(agreed):
            self._left_out[f"{split.folder}/{split.info.shards[shard].file}"] = agreed[shard]
        return set(agreed)

    def take_left_out(self) -> dict[str, str]:
        """Shards that were left out since the last call, and why."""
        taken, self._left_out = self._left_out, {}
        return taken

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
