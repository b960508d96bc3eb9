"""The model of a step, against figures worked out by hand."""

import dataclasses
from typing import Any

import pytest

from dist_transformer.config.presets import PRESETS
from dist_transformer.planning.hardware import GpuKind
from dist_transformer.planning.memory import ZeroSettings
from dist_transformer.planning.speed import StepTime, predict_step

BIG = dataclasses.replace(PRESETS["big"].model, vocab_size=37_000)
# Round rates: 100 and 10 TFLOP/s, 1,000 GB/s of memory, 100 GB/s between GPUs.
GPU = GpuKind(
    memory_gib=80, bf16_tflops=100, fp32_tflops=10, memory_gb_per_second=1000, link_gb_per_second=100, node_gbit=400
)


def step(stage: int, **changes: Any) -> StepTime:
    settings: dict[str, Any] = {
        "parameters": 200_000_000,
        "gpus_per_node": 4,
        "nodes": 1,
        "network_gbit": 400,
        "precision": "bf16",
        "accumulation": 1,
        "source_tokens": 1000,
        "target_tokens": 1000,
        "mfu": 0.5,
        **changes,
    }
    return predict_step(BIG, ZeroSettings(stage=stage), GPU, **settings)


def test_operations_are_the_papers_model() -> None:
    """A source and a target token of big cost 1.289 GFLOP; a thousand of them at half of 100 TFLOP/s.

    0.4% of that is attention, which is left out.
    """
    assert step(1).compute == pytest.approx(1.289e12 / 50e12, rel=5e-3)
    assert step(1, precision="fp32").compute == pytest.approx(10 * step(1).compute)


def test_the_update_moves_thirty_bytes_a_parameter() -> None:
    assert step(0).update == pytest.approx(200e6 * 30 / 1000e9)
    assert step(1).update == pytest.approx(200e6 * 30 / 4 / 1000e9)


@pytest.mark.parametrize(
    ("stage", "accumulation", "precision", "sent"),
    [
        # An all-reduce of fp32 gradients is 8 bytes per parameter on a ring, a gathered bf16 weight 2.
        (0, 1, "bf16", 8),
        (0, 8, "bf16", 8),
        (1, 1, "bf16", 10),
        (1, 8, "bf16", 10),
        (1, 8, "fp32", 12),
        (2, 1, "bf16", 10),
        (2, 8, "bf16", 66),
        (3, 1, "bf16", 8),
        (3, 8, "bf16", 64),
        (3, 1, "fp32", 12),
    ],
)
def test_bytes_that_go_round(stage: int, accumulation: int, precision: str, sent: int) -> None:
    """Of 200 million parameters, three quarters of which pass each of 4 GPUs."""
    found = step(stage, accumulation=accumulation, precision=precision).communication
    assert found == pytest.approx(sent * 0.75 * 200e6 / 100e9)


def test_between_nodes_the_slower_of_both_links_counts() -> None:
    two = step(1, nodes=2, network_gbit=400).communication
    assert two == pytest.approx(10 * 7 / 8 * 200e6 / 50e9)
    assert step(1, nodes=2, network_gbit=8000).communication == pytest.approx(10 * 7 / 8 * 200e6 / 100e9)


def test_alone_nothing_is_sent() -> None:
    assert step(3, gpus_per_node=1).communication == 0


def test_the_whole_is_its_parts() -> None:
    found = step(2)
    assert found.total == found.compute + found.update + found.communication
