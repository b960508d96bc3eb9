"""The best number of nodes, on a GPU of round rates."""

import dataclasses
from typing import Any

import pytest

from dist_transformer.config.presets import PRESETS
from dist_transformer.config.settings import TrainConfig
from dist_transformer.cost.hardware import ENOUGH, GPUS
from dist_transformer.cost.memory import ZeroSettings
from dist_transformer.cost.nodes import Machines, choose_nodes, fewer_nodes

LARGE = PRESETS["big_large_batch"]
LARGE = dataclasses.replace(LARGE, precision="bf16", model=dataclasses.replace(LARGE.model, vocab_size=37_000))
ZERO_1 = ZeroSettings(stage=1, reduce_bucket_size=25_000_000)


def machines(nodes: int, **changes: Any) -> Machines:
    return Machines(gpu=GPUS["h100"], gpus_per_node=8, nodes=nodes, **changes)


def with_packs(packs: int) -> TrainConfig:
    return dataclasses.replace(LARGE, batch=dataclasses.replace(LARGE.batch, packs_per_step=packs))


def test_the_host_limits_the_number_of_nodes() -> None:
    """128 packs: 4 nodes compute 4 packs per GPU in 56 ms, 6 compute 3 in 42 ms, which is below the host's 49 ms.

    Numbers with the same packs per GPU as fewer nodes, such as 5, are left out.
    """
    found = choose_nodes(LARGE, ZERO_1, machines(16), source_budget=3584)
    assert list(found.seconds) == [1, 2, 3, 4, 6, 8, 16]
    assert found.nodes == 6
    assert min(found.seconds, key=found.seconds.__getitem__) == 6
    # Three passes of 127 messages more.
    assert found.seconds[16] > found.seconds[8] > found.seconds[6] > ENOUGH * found.seconds[16]


def test_stage_2_needs_one_micro_batch() -> None:
    """A node has 16 packs of 3,584 tokens per GPU, in two micro-batches; two nodes have 8, in one."""
    assert choose_nodes(LARGE, ZERO_1, machines(1), source_budget=3584).stage == 1
    assert choose_nodes(LARGE, ZERO_1, machines(2), source_budget=3584).stage == 2
    fixed = dataclasses.replace(LARGE, batch=dataclasses.replace(LARGE.batch, packs_per_micro_batch=1))
    assert choose_nodes(fixed, ZERO_1, machines(2), source_budget=3584).stage == 1


def test_a_slow_network_wants_fewer_nodes() -> None:
    assert choose_nodes(LARGE, ZERO_1, machines(16, network_gbit=10), source_budget=3584).nodes == 1


@pytest.mark.parametrize(("packs", "nodes", "fewer"), [(128, 16, 6), (128, 5, 4), (128, 4, None), (256, 4, None)])
def test_fewer_nodes_are_named_where_they_are_as_fast(packs: int, nodes: int, fewer: int | None) -> None:
    found = fewer_nodes(with_packs(packs), ZERO_1, machines(nodes), source_budget=3584)
    assert (
        (found is None) if fewer is None else found is not None and found.startswith(f"{fewer} node(s) would have 10")
    )
