"""Points vary one thing at a time; batches are full; what is modelled is what planning says."""

import pytest
import torch

from benchmarks.training.cost_curve import cost_table, curve_of, measure_point, model_scaling
from dist_transformer.model.transformer import Transformer


def test_a_scaling_by_hand() -> None:
    """1 million parameters: fp32 gradients go round twice, bf16 weights once, 10 MB in three
    passes. 8 devices: 7/8 · 10 MB ÷ 10 GB/s = 0.875 ms, and 3 · 7 messages of 5 µs. 16 nodes: 127/128 · 10 MB ÷
    25 Gbit/s = 3.175 ms, and 3 times 15 messages of 15 µs and 112 of 5 µs."""
    base = {"parameters": 1e6, "step_seconds": {"median": 0.01}}
    scaling = model_scaling(base, torch.device("cpu"), target_tokens=1000)
    rows = {row["nodes"]: row for row in scaling["rows"]}
    assert rows[1]["communication_seconds"] == pytest.approx(0.875e-3 + 0.105e-3)
    assert rows[16]["communication_seconds"] == pytest.approx(3.175e-3 + 2.355e-3)
    assert rows[16]["target_tokens_per_second"] == pytest.approx(128 * 1000 / 0.01553)
    assert rows[16]["efficiency"] == pytest.approx(0.01 / 0.01553)
    assert "not a measurement" in scaling["is"]


@pytest.mark.slice(name="benchmarks")
def test_a_point_is_measured_in_a_process_of_its_own() -> None:
    curve = curve_of(torch.device("cpu"), repeats=2)
    _, point = curve.axes()["tokens"][0]
    found = measure_point(point, repeats=2)
    assert found["parameters"] == sum(p.numel() for p in Transformer(point.model).parameters())
    assert len(found["step_seconds"]["values"]) == 2
    assert found["step_seconds"]["lowest"] > 0
    assert found["target_tokens_per_second"] == pytest.approx(256 / found["step_seconds"]["median"])
    # Weights in bf16, fp32 masters and both moments are 14 bytes a parameter.
    assert found["peak_mib"] > 14 * found["parameters"] / 2**20
    figures = {
        "unit": "CPU seconds",
        "axes": {"tokens": [{"tokens": 256, **found}]},
        "modelled_scaling": model_scaling(found, torch.device("cpu"), target_tokens=256),
    }
    assert max(map(len, cost_table(figures).splitlines())) <= 80
