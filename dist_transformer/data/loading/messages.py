"""Encode steps as JSON and arrays, to send them to the other processes of a node."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from dist_transformer.base.verified import Content
from dist_transformer.config.plain import from_plain, to_plain
from dist_transformer.data.loading.events import EpochSummary, LeftOut
from dist_transformer.data.loading.mixture import position_from_json
from dist_transformer.data.loading.packs import Packs
from dist_transformer.data.loading.plan import Step

_ARRAYS = ("pair_ids", "stops", "source_tokens", "target_tokens")


def encode(steps: Sequence[Step]) -> tuple[list[dict[str, Any]], list[bytes]]:
    """Return a description per step, and the arrays of their packs: each holds all steps end to end."""
    texts = [
        {
            "epoch": step.epoch,
            "pairs": len(step.packs.pair_ids),
            "packs": len(step.packs.stops),
            "empty": step.packs.empty,
            "position": step.position.to_json(),
            "left_out": [to_plain(shard) for shard in step.left_out],
            "ended": [to_plain(epoch) for epoch in step.ended],
        }
        for step in steps
    ]
    columns = ([getattr(step.packs, name) for step in steps] for name in _ARRAYS)
    nothing = np.empty(0, dtype=np.int64)
    return texts, [np.concatenate([nothing, *column], dtype=np.int64).tobytes() for column in columns]


def decode(texts: Sequence[dict[str, Any]], content: Content) -> list[Step]:
    """Return the steps that were passed to `encode`.

    Args:
        content: the arrays of `encode`, end to end. The steps keep a reference to it.
    """
    counts = [sum(text["pairs"] for text in texts), *[sum(text["packs"] for text in texts)] * 3]
    arrays = np.split(np.frombuffer(content, dtype=np.int64), np.cumsum(counts)[:-1])
    steps, pairs, packs = [], 0, 0
    for text in texts:
        of_pairs, of_packs = slice(pairs, pairs + text["pairs"]), slice(packs, packs + text["packs"])
        chosen = {name: array[of_packs] for name, array in zip(_ARRAYS, arrays, strict=True) if name != "pair_ids"}
        steps.append(
            Step(
                epoch=text["epoch"],
                packs=Packs(pair_ids=arrays[0][of_pairs], empty=text["empty"], **chosen),
                position=position_from_json(text["position"]),
                left_out=tuple(from_plain(LeftOut, shard, "a message") for shard in text["left_out"]),
                ended=tuple(from_plain(EpochSummary, epoch, "a message") for epoch in text["ended"]),
            )
        )
        pairs, packs = of_pairs.stop, of_packs.stop
    return steps
