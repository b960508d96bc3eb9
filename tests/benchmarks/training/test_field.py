"""The contenders do the same work, and what is reported is what they did."""

import copy
import itertools
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from benchmarks.launching import deepspeed_command
from benchmarks.training.field import (
    LABELS,
    Field,
    open_field,
    train_table,
)
from benchmarks.training.peers import MasterAdamW, in_bf16
from dist_transformer.config.settings import BatchConfig, ModelConfig, OptimizerConfig, TrainConfig
from dist_transformer.data.folder.reader import DataFolder
from dist_transformer.data.loading.plan import Position
from dist_transformer.runtime.process_group import process_group
from dist_transformer.runtime.world import World
from tests.conftest import run_command

pytestmark = pytest.mark.slice(name="benchmarks")

MODEL = ModelConfig(width=32, heads=2, ffn_width=64, encoder_layers=1, decoder_layers=2, dropout=0.0)


def make_config(data: DataFolder) -> TrainConfig:
    return TrainConfig.of(
        data=(str(data.path),),
        run_dir=Path("unused"),
        model=MODEL,
        precision="fp32",
        batch=BatchConfig(max_target_tokens=256, packs_per_step=2),
        optimizer=OptimizerConfig(schedule="inverse_sqrt", peak_lr=1e-2, warmup_steps=4),
    )


@pytest.fixture(scope="module")
def field(toy_data: DataFolder) -> Iterator[Field]:
    with process_group(World(), single=True) as device:
        yield open_field(make_config(toy_data), World(), device)


@pytest.fixture(scope="module")
def contenders(field: Field) -> dict[str, object]:
    # Compiling takes a minute; P3 is otherwise the loop of P1 with the model of P2.
    return {name: field.make(name) for name in LABELS if name != "compiled"}


def test_all_start_with_the_same_function(field: Field, contenders: dict) -> None:
    losses = {name: contender.nll(field.valid) for name, contender in contenders.items()}
    assert list(losses) == ["ours", "stock", "plain", "torch", "trainer"]
    for name, loss in losses.items():
        assert loss == pytest.approx(losses["ours"], rel=1e-5), name


def test_a_stretch_counts_what_was_trained(field: Field, contenders: dict) -> None:
    """Under DeepSpeed and under plain torch the same packs give the same weights; all learn, by about as much."""
    before = contenders["ours"].nll(field.valid)
    timings = {name: contender.train(4) for name, contender in contenders.items()}
    losses = {name: contender.nll(field.valid) for name, contender in contenders.items()}
    for name, timing in timings.items():
        assert timing.steps == 4
        assert 0.6 * 4 * 512 < timing.target_tokens <= 1.5 * 4 * 512, name
        assert timing.source_tokens + timing.target_tokens <= timing.computed_tokens
        assert losses[name] == pytest.approx(losses["ours"], rel=0.05), name
        assert losses[name] < before - 0.2
    ours, plain = timings["ours"], timings["plain"]
    assert (ours.source_tokens, ours.target_tokens) == (plain.source_tokens, plain.target_tokens)
    assert losses["plain"] == pytest.approx(losses["ours"], rel=1e-4)
    assert losses["stock"] == pytest.approx(losses["ours"], rel=1e-4)


def test_steps_of_peers_have_as_many_tokens_as_ours(field: Field) -> None:
    """On average over all batches, to 2%."""
    packs = field.make("ours").data.plan.steps(Position(), 2)  # type: ignore[attr-defined]
    ours = np.mean([step.target_tokens for step in itertools.islice(packs, 200)])
    batches = itertools.islice(field.make("torch").rows, 400)  # type: ignore[attr-defined]
    theirs = np.mean([field.sample.sizes[rows, 1].sum() for rows in batches])
    assert theirs == pytest.approx(ours, rel=0.02)


def test_the_command_on_two_ranks(toy_data: DataFolder, tmp_path: Path) -> None:
    """The table and the file of a real launch, in which the ranks share a step."""
    small = ["--precision", "fp32", "--model.width", 32, "--model.heads", 2, "--batch.max-target-tokens", 256]
    measured = ["train", "--data", toy_data.path, "--peers", "plain", "--steps", 2, "--rounds", 2]
    command = [*deepspeed_command(2), "tools/benchmark.py", *measured, "--json", tmp_path / "r.json", "--", *small]
    output = run_command(*command)
    result = json.loads((tmp_path / "r.json").read_text())
    figures = result["figures"]
    assert figures["world_size"] == 2
    assert figures["loss_curves_agree"]
    assert list(figures["contenders"]) == ["ours", "plain"]
    assert train_table(figures) in output
    assert all(len(line) <= 80 for line in train_table(figures).splitlines())
    # Each rank computes one of the step's two packs.
    assert 0.8 * 256 < figures["contenders"]["ours"]["tokens_per_step"] <= 256


def test_weights_in_bf16_follow_exact_ones() -> None:
    """Steps that are smaller than the spacing of bf16 change some weights, as their exact values pass a boundary."""
    torch.manual_seed(0)
    model = nn.Linear(64, 64)
    exact = copy.deepcopy(model)
    before = model.weight.detach().to(torch.bfloat16)
    in_bf16(model)
    for weights in (model, exact):
        optimizer = MasterAdamW(weights, TrainConfig.of(data=("unused",), run_dir=Path("unused")))
        optimizer.param_groups[0]["lr"] = 1e-6
        for _ in range(3):
            for weight in weights.parameters():
                weight.grad = torch.ones_like(weight)
            optimizer.step()
    assert torch.equal(model.weight, exact.weight.to(torch.bfloat16))
    assert not torch.equal(model.weight, before)
