"""Parts of the engine that need no DeepSpeed."""

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dist_transformer.config.presets import PRESETS
from dist_transformer.model.packed import PackedTokens
from dist_transformer.model.transformer import Transformer
from dist_transformer.training.engine.deepspeed_engine import Engine, _parameter_groups
from tests.model.small_batches import BATCH, make_model


def test_weight_decay_is_for_matrices_only() -> None:
    with torch.device("meta"):
        model = Transformer(dataclasses.replace(PRESETS["tiny"].model, vocab_size=100))
    decayed, others = _parameter_groups(model, 0.1)
    assert (decayed["weight_decay"], others["weight_decay"]) == (0.1, 0.0)
    assert {p.dim() for p in decayed["params"]} == {2}
    assert {p.dim() for p in others["params"]} == {1}
    assert len(decayed["params"]) + len(others["params"]) == len(list(model.parameters()))
    (every,) = _parameter_groups(model, 0.0)
    assert len(every["params"]) == len(list(model.parameters()))


@torch.no_grad()
def test_validation_is_one_pass_also_with_rdrop(monkeypatch: pytest.MonkeyPatch) -> None:
    model, preset = make_model(dropout=0.3).eval(), PRESETS["tiny"]
    expected = model(BATCH, 0.1)
    engine = Engine.__new__(Engine)
    engine.ds = model
    engine.config = preset.changed(optimizer=dataclasses.replace(preset.optimizer, rdrop_alpha=5.0))
    monkeypatch.delattr(PackedTokens, "twice")
    assert engine.evaluate(BATCH) == expected


@pytest.mark.parametrize(
    ("device", "fixed", "triton", "given", "expected"),
    [
        ("cuda:0", True, True, "auto", (True, "12,544 target tokens at once, at least 6,000")),
        ("cuda:0", True, True, "off", (False, "--compile off")),
        # A machine without a C compiler trains, as it does with `off`.
        ("cuda:0", True, False, "auto", (False, "Triton's kernels are not in use")),
        ("cuda:0", True, False, "on", (True, "--compile on")),
        ("cuda:0", False, True, "on", (False, "attention has no fixed shapes")),
        ("cpu", True, False, "on", (False, "no GPU")),
    ],
)
def test_layers_are_compiled_only_where_they_can_be(
    device: str, fixed: bool, triton: bool, given: str, expected: tuple[bool, str]
) -> None:
    engine, preset = Engine.__new__(Engine), PRESETS["big"]
    module: Any = SimpleNamespace(has_fixed_shapes=fixed, has_triton_kernels=triton)
    engine.ds, engine.stage = SimpleNamespace(device=device, module=module), 1
    batch = dataclasses.replace(preset.batch, packs_per_micro_batch=32)
    engine.config = preset.changed(batch=batch, compile=given)
    assert engine._choose_compilation() == expected
