"""Share data within a node: one process opens, plans, reads and verifies, and the others get the results.

The leading process of a node keeps verified data in memory that the other processes map. So a shard is read,
hashed and held once per node. The leader sends the steps that it plans to the others as
they are prefetched.
"""

import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dist_transformer.base.errors import UserError
from dist_transformer.base.messages import as_kind
from dist_transformer.base.verified import Content, Held
from dist_transformer.config.settings import BatchConfig, DataConfig
from dist_transformer.data.folder.reader import DataFolder, read_index
from dist_transformer.data.folder.split import Split
from dist_transformer.data.loading.loader import TrainingData, open_training_data
from dist_transformer.data.loading.mixture import position_from_json
from dist_transformer.data.loading.packing import EpochSummary, LeftOut, Packs
from dist_transformer.data.loading.plan import Step, Window
from dist_transformer.runtime import distributed
from dist_transformer.runtime.node import join_node

Draw = Callable[[int], list[Step]]
"""Returns the next steps, about as many as requested; none at the end."""


class Sharing:
    """The data of a run on this rank. Collective: every rank must construct it.

    All nodes use only those shards of a window that every node can read; no node decides alone.

    Args:
        skip: leave out shards that some node cannot read. Otherwise they end the run on all ranks.
        timeout_minutes: how long a node that is ahead waits for the others.
    """

    def __init__(self, *, skip: bool, timeout_minutes: float) -> None:
        self.skip = skip
        self.problems: dict[tuple[int, int], str] = {}
        """Reason why a shard is left out, by corpus and shard."""
        self.node = join_node()
        # Collectives of the training loop run at the same time, so sharing needs a process group of its own.
        self._group = distributed.new_cpu_group(timeout_minutes, self.node.leaders)
        self._splits: list[Split] = []
        self._begun = 0
        self._closed = False
        self._counting, self._agreeing = threading.Lock(), threading.Lock()

    def load(self, corpora: DataConfig, batch: BatchConfig, *, seed: int) -> TrainingData:
        """Open the data folders of a run and plan it.

        Raises:
            UserError: on all ranks of a node: a folder cannot be used, or several do not fit together.
        """
        if not self.node.leads:
            data = self._open_shared(corpora, batch, seed=seed)
        else:
            try:
                data = open_training_data(corpora, batch, seed=seed, admit=self.admit)
            except UserError as error:
                self._tell(["error", str(error)])
                raise
            for folder in data.folders:
                self._tell(["folder", str(folder.path)], folder.train.held_lengths)
            self._tell(["opened", data.skipped])
        self._splits = [folder.train for folder in data.folders]
        return data

    def admit(self, split: Split, window: Window) -> dict[int, int]:
        """Read a window's shards and prefetch the next ones; return those that are left out.

        Collective: the leading rank of every node must call it, in the thread that plans ahead.

        Raises:
            UserError: on all ranks: a shard cannot be read.
        """
        # Shards are held until the window is past, so a shard cannot go bad inside it, but only between a run and its
        # resume. The plan then continues without the shard from the next pack on.

        def share(shard: int, content: Held) -> None:
            self._tell(["shard", window.corpus, shard], content)

        problems = split.hold(window.shards, share)
        with self._counting:
            if self._closed:
                raise UserError("the run has ended")
            self._begun += 1
        agreed = self._agree(problems)
        split.fetch_ahead(window.following)
        if agreed and not self.skip:
            raise UserError(agreed[min(agreed)])
        self.problems |= {(window.corpus, shard): problem for shard, problem in agreed.items()}
        self._tell(["window", window.corpus, window.shards, list(agreed.items())])
        return dict.fromkeys(agreed, window.packs_consumed)

    def draw_from(self, steps: Iterator[Step]) -> Draw:
        """Make a function that draws from the steps of the node's plan.

        Args:
            steps: steps of this rank's plan, which are used if it leads its node.
        """

        def plan(count: int) -> list[Step]:
            try:
                block = list(itertools.islice(steps, count))
            except UserError as error:
                self._tell(["error", str(error)])
                raise
            if self.node.is_shared:
                texts, arrays = encode(block)
                # Shared memory: with sockets, each other process would copy arrays that it hardly uses.
                self._tell(["steps", texts], Held.copy_of(arrays) if block else None)
            return block

        return plan if self.node.leads else self._hear_steps

    def close(self) -> None:
        """End without leaving a node in a window that others do not reach. Collective: every rank must call it."""
        with self._counting:
            self._closed = True
            begun = self._begun
        missed = max(distributed.gather_objects(begun)) - begun
        for _ in range(missed if self.node.leads else 0):
            self._agree({})
        self.node.hang_up()

    def _open_shared(self, corpora: DataConfig, batch: BatchConfig, *, seed: int) -> TrainingData:
        folders: list[DataFolder] = []
        while True:
            (kind, content), held = self._hear()
            if kind == "opened":
                return open_training_data(corpora, batch, seed=seed, folders=folders, skipped=content)
            assert held is not None
            folders.append(DataFolder(Path(content), read_index(Path(content)), lengths=held))

    def _hear_steps(self, _: int) -> list[Step]:
        while True:
            message, held = self._hear()
            match message:
                case "shard", corpus, shard:
                    assert held is not None
                    self._splits[corpus].put(shard, held)
                case "window", corpus, shards, problems:
                    self._splits[corpus].want(shards)
                    self.problems |= {(corpus, shard): problem for shard, problem in problems}
                case "steps", texts:
                    return decode(texts, held.content) if held else []

    def _tell(self, message: Any, content: Held | None = None) -> None:
        self.node.tell(message, None if content is None else content.descriptor)

    def _hear(self) -> tuple[Any, Held | None]:
        """Receive the leader's next message, and the content that comes with it.

        Raises:
            UserError: the leader has ended, or found an error.
        """
        message, descriptor = self.node.hear()
        if message[0] == "error":
            raise UserError(message[1])
        return message, None if descriptor is None else Held.of(descriptor)

    def _agree(self, problems: dict[int, str]) -> dict[int, str]:
        """Merge the problems of all nodes; if several nodes report the same shard, the lowest rank's text counts."""
        with self._agreeing:
            merged: dict[int, str] = {}
            for found in reversed(distributed.gather_objects(list(problems.items()), self._group)):
                merged.update(found)
            return merged


_ARRAYS = ("pair_ids", "stops", "source_tokens", "target_tokens")


def encode(steps: Sequence[Step]) -> tuple[list[dict[str, Any]], list[bytes]]:
    """Return a description per step, and the arrays of their packs."""
    texts, arrays = [], []
    for step in steps:
        of_step = [np.asarray(getattr(step.packs, name), dtype=np.int64) for name in _ARRAYS]
        arrays += [array.tobytes() for array in of_step]
        texts.append(
            {
                "sizes": list(map(len, of_step)),
                "epoch": step.epoch,
                "empty": step.packs.empty,
                "position": step.position.to_json(),
                "left_out": step.left_out,
                "ended": step.ended,
            }
        )
    return texts, arrays


def decode(texts: Sequence[dict[str, Any]], content: Content) -> list[Step]:
    """Return the steps that were passed to `encode`.

    Args:
        content: the arrays of `encode`, end to end. The steps keep a reference to it.
    """
    edges = np.cumsum([size for text in texts for size in text["sizes"]])[:-1]
    arrays = iter(np.split(np.frombuffer(content, dtype=np.int64), edges))
    return [
        Step(
            epoch=text["epoch"],
            packs=Packs(**{name: next(arrays) for name in _ARRAYS}, empty=text["empty"]),
            position=position_from_json(text["position"]),
            left_out=as_kind(tuple[LeftOut, ...], text["left_out"]),
            ended=as_kind(tuple[EpochSummary, ...], text["ended"]),
        )
        for text in texts
    ]
