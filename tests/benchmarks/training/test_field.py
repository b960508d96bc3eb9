"""The contenders do the same work, and what is reported is what they did."""

import copy
import itertools
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from benchmarks.training.contenders import MasterAdamW
from benchmarks.training.field import LABELS, Contender, Field, open_field, train_table
from benchmarks.training.peers import in_bf16, peer_variants
from benchmarks.training.text import IGNORED_LABEL, TextSample
from dist_transformer.config.settings import BatchConfig, OptimizerConfig, TrainConfig
from dist_transformer.data.folder.reader import DataFolder
from dist_transformer.data.loading.plan import Position
from dist_transformer.data.vocabulary.tokenizer import BOS_ID, EOS_ID, PAD_ID
from dist_transformer.runtime.process_group import process_group
from dist_transformer.runtime.world import World
from tests.conftest import run_command
from tests.support.tiny import tiny_config

pytestmark = pytest.mark.slice(name="benchmarks")


@pytest.fixture(scope="module")
def field(toy_data: DataFolder) -> Iterator[Field]:
    config = TrainConfig.of(
        data=(str(toy_data.path),),
        run_dir=Path("unused"),
        model=tiny_config(width=32, ffn_width=64, decoder_layers=2, dropout=0.0),
        precision="fp32",
        batch=BatchConfig(max_target_tokens=256, packs_per_step=2),
        optimizer=OptimizerConfig(schedule="inverse_sqrt", peak_lr=1e-2, warmup_steps=4),
    )
    with process_group(World(), single=True) as device:
        yield open_field(config, device)


@pytest.fixture(scope="module")
def contenders(field: Field) -> dict[str, Contender]:
    # Compiling takes a minute; P3 is otherwise P4.
    names = [name for name in LABELS if name != "compiled"]
    return {name: field.make(name, peer_variants(name, field.config)[0]) for name in names}


def test_all_do_as_much_from_the_same_weights(field: Field, contenders: dict[str, Contender]) -> None:
    """Under DeepSpeed and under plain torch the same packs give the same weights; all learn, by about as much."""
    first = {name: contender.nll(field.valid) for name, contender in contenders.items()}
    assert first == pytest.approx(dict.fromkeys(first, first["ours"]), rel=1e-5)
    timings = {name: contender.train(4) for name, contender in contenders.items()}
    losses = {name: contender.nll(field.valid) for name, contender in contenders.items()}
    assert losses == pytest.approx(dict.fromkeys(losses, losses["ours"]), rel=0.05)
    assert max(losses.values()) < first["ours"] - 0.2
    for name, timing in timings.items():
        assert timing.steps == 4
        assert 0.6 * 4 * 512 < timing.target_tokens <= 1.5 * 4 * 512, name
        assert timing.source_tokens + timing.target_tokens <= timing.computed_tokens
    ours, plain = timings["ours"], timings["plain"]
    assert (ours.source_tokens, ours.target_tokens) == (plain.source_tokens, plain.target_tokens)
    assert (losses["plain"], losses["stock"]) == pytest.approx((losses["ours"], losses["ours"]), rel=1e-4)


def test_steps_of_peers_have_as_many_tokens_as_ours(field: Field, contenders: dict[str, Contender]) -> None:
    """On average over all batches, to 2%."""
    packs = field.data.plan.steps(Position(), 2)
    ours = np.mean([step.target_tokens for step in itertools.islice(packs, 200)])
    batches = itertools.islice(field.make("loop", "sdpa attention, fp32").rows, 400)  # type: ignore[union-attr]
    assert np.mean([field.sample.sizes[rows, 1].sum() for rows in batches]) == pytest.approx(ours, rel=0.02)


def test_each_contender_is_a_process_in_its_fastest_variant(toy_data: DataFolder, tmp_path: Path) -> None:
    small = ["--precision", "fp32", "--model.width", 32, "--model.heads", 2, "--batch.max-target-tokens", 256]
    measured = ["train", "--data", toy_data.path, "--peers", "plain", "loop", "--steps", 2, "--rounds", 2]
    output = run_command(sys.executable, "tools/benchmark.py", *measured, "--json", tmp_path / "r.json", "--", *small)
    figures = json.loads((tmp_path / "r.json").read_text())["figures"]
    assert figures["loss_curves_agree"]
    found = figures["contenders"]
    assert list(found) == ["ours", "plain", "loop"]
    assert all(0 < each["peak_gib"] < 4 and len(each["nll"]) == 3 for each in found.values())
    assert sorted(found["loop"]["trials"]) == ["eager attention, fp32", "sdpa attention, fp32"]
    assert found["loop"]["variant"] == max(found["loop"]["trials"], key=found["loop"]["trials"].get)
    assert train_table(figures) in output


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


def test_buckets_hold_each_pair_once_under_the_budget(toy_data: DataFolder) -> None:
    """And a padded batch, by hand."""
    sample = TextSample(toy_data.train, pairs=300, longest=40, seed=3)
    batches = sample.bucketed(max_tokens=200, seed=0)
    assert sorted(np.concatenate(batches)) == list(range(len(sample)))
    sizes = [(b.source_BS.numel(), b.target_BT.numel()) for b in map(sample.batch, batches)]
    assert np.max(sizes) <= 200
    useful, whole = (sample.sizes.sum() / padded for padded in (np.sum(sizes), 300 * sample.sizes.max(axis=0).sum()))
    assert useful > whole + 0.1
    sample.sources, sample.targets = [np.array([7, 8]), np.array([9])], [np.array([5]), np.array([4, 6, 4])]
    batch = sample.batch([0, 1])
    assert batch.source_BS.tolist() == [[7, 8, EOS_ID], [9, EOS_ID, PAD_ID]]
    assert batch.source_mask_BS.tolist() == [[1, 1, 1], [1, 1, 0]]
    assert batch.target_BT.tolist() == [[BOS_ID, 5, PAD_ID, PAD_ID], [BOS_ID, 4, 6, 4]]
    assert batch.labels_BT.tolist() == [[5, EOS_ID, IGNORED_LABEL, IGNORED_LABEL], [4, 6, 4, EOS_ID]]
