"""Compute what each step of a run must have trained on, from the data and the left-out shards in its ledger."""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from dist_transformer.base.errors import UserError
from dist_transformer.config.settings import TrainConfig
from dist_transformer.data.folder.split import Split
from dist_transformer.data.loading.loader import open_training_data
from dist_transformer.data.loading.packing import LeftOut
from dist_transformer.data.loading.plan import Step, Window
from dist_transformer.run.ledger import batch_hash


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedStep:
    """A step of a run as it must have been trained."""

    step: Step
    pair_hash: str
    """Hash of the step's pairs as in the ledger: 16 hexadecimal digits."""


def planned_steps(config: TrainConfig, left_out: Sequence[LeftOut] = ()) -> Iterator[PlannedStep]:
    """Yield the steps of a run without end, from the data alone: no model, no rank, no interruption.

    Args:
        left_out: shards that the run left out.

    Raises:
        UserError: a shard that the run used cannot be read.
    """
    packs = config.batch.packs_per_step
    # The hash does not depend on how a step was cut into micro-batches, so the whole step is one.
    whole = dataclasses.replace(config.batch, packs_per_micro_batch=packs)
    data = open_training_data(config.corpora, whole, seed=config.seed, admit=_Replay(left_out).admit)
    for step in data.plan.steps(data.plan.start(), packs):
        pair_hash = int(batch_hash(data.collator.build(step.packs)))
        data.collator.pairs.forget_past()
        yield PlannedStep(step=step, pair_hash=f"{pair_hash % 2**64:016x}")


class _Replay:
    """Replace the agreement of a run's ranks: leave out what the run left out, and nothing else."""

    def __init__(self, left_out: Sequence[LeftOut]) -> None:
        self._missing: dict[tuple[int, int, int], dict[int, int]] = {}
        for shard in left_out:
            self._missing.setdefault((shard.corpus, shard.epoch, shard.window), {})[shard.shard] = shard.packs

    def admit(self, split: Split, window: Window) -> Mapping[int, int]:
        missing = self._missing.get((window.corpus, window.epoch, window.number), {})
        problems = split.hold([shard for shard in window.shards if missing.get(shard) != 0])
        split.fetch_ahead(window.following)
        if problems:
            raise UserError(f"epoch {window.epoch + 1} needs a shard that cannot be read: {problems[min(problems)]}")
        return missing
