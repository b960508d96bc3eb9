"""Explain why the loss curves of some trainers zig-zag: one model, one set of budgets, three orders of the batches.

tools/batch_order.py --data DATA --out DIR --preset multi30k --epochs 4

`sorted` cuts all pairs, sorted by length, into packs and visits the packs in that order each epoch, like a trainer that
sorts and does not shuffle. `buckets` visits the same packs in a new random order each epoch. `random` is the order of
dist_transformer: every pack has pairs of all lengths. Initial weights, dropout seeds, budgets, learning rates and
epochs are the same. One process trains without DeepSpeed, with bf16 weights and fp32 masters, or in fp32 (--precision).

Writes DIR/batch_order.json (loss and mean pair length of every step) and DIR/batch_order.png, and prints figures that
explain the picture. "Within an epoch" means that the mean over the surrounding epoch is subtracted from each step's
loss.
"""

import dataclasses
import json
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from benchmarks.measure import read_flags
from benchmarks.training.contenders import PlainDriver
from dist_transformer.base.errors import UserError
from dist_transformer.config.presets import preset_with_variant
from dist_transformer.config.settings import TrainConfig
from dist_transformer.data.folder.reader import DataFolder
from dist_transformer.data.folder.split import Split
from dist_transformer.data.loading.collate import Collator
from dist_transformer.data.loading.packing import Budgets, Pack, Packs
from dist_transformer.data.loading.plan import Plan, Position, Step, resolve_budgets
from dist_transformer.model.transformer import Transformer
from dist_transformer.reporting.figures import as_png, new_figure
from dist_transformer.training.trainer import micro_batch_seed

Precision = Literal["bf16", "fp32"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Curve:
    """One run; entry i of each array is step i."""

    epoch: np.ndarray
    loss: np.ndarray
    """Label-smoothed training loss per target token."""
    pair_tokens: np.ndarray
    """Mean tokens per pair, source and target together."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """Flags."""

    data: Path
    """Data folder."""
    out: Path
    """Folder of figures and picture."""
    preset: str = "multi30k"
    """Model, batch and rates."""
    epochs: int = 4
    """Passes over the pairs, 2 or more."""
    precision: Precision = "bf16"
    """Precision of the weights."""
    seed: int = 1
    """Seed of weights, order and dropout."""


def main() -> None:
    arguments = read_flags(Settings)
    if arguments.epochs < 2:
        raise UserError(f"--epochs is {arguments.epochs}: it must be 2 or more, because an epoch's mean is subtracted")
    folder = DataFolder.open(arguments.data)
    config, budgets = settings_of(folder, arguments.preset, seed=arguments.seed, precision=arguments.precision)
    arguments.out.mkdir(parents=True, exist_ok=True)
    curves: dict[str, Curve] = {}
    for name, order in orders(folder.train, budgets, config).items():
        print(f"== {name}", file=sys.stderr, flush=True)
        curves[name] = train(folder.train, budgets, config, order, epochs=arguments.epochs)
        figures = {name: explain(curve) for name, curve in curves.items()}
        write_results(arguments.out, arguments.preset, config, curves, figures)
    print(json.dumps(figures, indent=1))


def settings_of(folder: DataFolder, name: str, *, seed: int, precision: Precision) -> tuple[TrainConfig, Budgets]:
    """Return a preset in which a step is one micro-batch, and the budgets of its packs."""
    preset = preset_with_variant(name, "base")
    config = dataclasses.replace(
        preset,
        seed=seed,
        precision=precision,
        model=preset.model.for_vocabularies(*folder.index.vocab_sizes),
        batch=dataclasses.replace(preset.batch, packs_per_micro_batch=preset.batch.packs_per_step),
    )
    info = folder.train.info
    return config, resolve_budgets(config.batch, source_tokens=info.source_tokens, target_tokens=info.target_tokens)


def orders(split: Split, budgets: Budgets, config: TrainConfig) -> dict[str, Callable[[int], Iterator[Step]]]:
    """Map the name of each order to a function that gives the steps of an epoch."""
    size = config.batch.packs_per_step
    plan = Plan(
        split.lengths, split.shard_starts, budgets=budgets, window_shards=config.batch.window_shards, seed=config.seed
    )
    steps = join_packs(cut_by_length(np.asarray(split.lengths), budgets), size)

    def shuffled(epoch: int) -> Iterator[Step]:
        order = np.random.default_rng([config.seed, epoch]).permutation(len(steps))
        return (dataclasses.replace(steps[number], epoch=epoch) for number in order)

    def random(epoch: int) -> Iterator[Step]:
        for step in plan.steps(Position(epoch=epoch), size):
            if step.epoch > epoch:
                return
            yield step

    return {
        "sorted": lambda epoch: (dataclasses.replace(step, epoch=epoch) for step in steps),
        "random": random,
        "buckets": shuffled,
    }


def cut_by_length(lengths: np.ndarray, budgets: Budgets) -> list[Pack]:
    """Cut all pairs that fit a pack, shortest first, into packs that end where a budget is full."""
    limits = (budgets.max_source_tokens, budgets.max_target_tokens)
    fits = np.flatnonzero((lengths <= limits).all(axis=1))
    order = fits[np.lexsort((lengths[fits, 0], lengths[fits, 1]))]
    packs, start = [], 0
    while start < len(order):
        sums = np.cumsum(lengths[order[start : start + budgets.max_sentences]], axis=0, dtype=np.int64)
        count = int((sums <= limits).all(axis=1).sum())
        source_tokens, target_tokens = (int(total) for total in sums[count - 1])
        ids = order[start : start + count]
        packs.append(Pack(pair_ids=ids, source_tokens=source_tokens, target_tokens=target_tokens))
        start += count
    return packs


def join_packs(packs: list[Pack], packs_per_step: int) -> list[Step]:
    """Group consecutive packs into steps, as the plan does. Packs of weight zero fill the last step."""
    groups = [packs[first : first + packs_per_step] for first in range(0, len(packs), packs_per_step)]
    return [
        Step(epoch=0, packs=Packs.of(group, empty=packs_per_step - len(group)), position=Position()) for group in groups
    ]


def train(
    split: Split, budgets: Budgets, config: TrainConfig, order: Callable[[int], Iterator[Step]], *, epochs: int
) -> Curve:
    """Train from the seed's initial weights, with one micro-batch per step."""
    torch.manual_seed(config.seed)
    driver = PlainDriver(Transformer(config.model), config)
    collator = Collator(split, budgets, packs_per_micro_batch=config.batch.packs_per_step)
    rows, number, started = [], 0, time.monotonic()
    for epoch in range(epochs):
        for step in order(epoch):
            number += 1
            torch.manual_seed(micro_batch_seed(config.seed, epoch, number, 0))
            sums = driver.forward_backward(collator.build(step.packs), step_tokens=step.target_tokens)
            driver.end_micro_batch()
            pairs = len(step.packs.pair_ids)
            pair_tokens = (step.source_tokens + step.target_tokens) / pairs
            rows.append((epoch, sums.loss.item() / step.target_tokens, pair_tokens))
        print(f"epoch {epoch}: {number} steps, {time.monotonic() - started:.0f} s", file=sys.stderr, flush=True)
    epoch_column, loss, lengths = (np.array(column) for column in zip(*rows, strict=True))
    return Curve(epoch=epoch_column, loss=loss, pair_tokens=lengths)


def explain(curve: Curve) -> dict[str, float]:
    """Compute figures that show how much the order of the batches contributes to the curve."""
    per_epoch = round(len(curve.loss) / (int(curve.epoch[-1]) + 1))
    rest, inside = off_trend(curve.loss, per_epoch)
    epochs, lengths = curve.epoch[inside], curve.pair_tokens[inside]
    starts = np.flatnonzero(np.diff(curve.epoch)) + 1
    return {
        "steps_per_epoch": per_epoch,
        "last_epoch_mean_loss": float(curve.loss[curve.epoch == curve.epoch[-1]].mean()),
        "within_epoch_std": float(rest.std()),
        "within_epoch_range": float(np.mean([np.ptp(rest[epochs == epoch]) for epoch in np.unique(epochs)])),
        "neighbour_std": float(np.diff(rest).std() / 2**0.5),
        "jump_between_epochs": float(np.mean(curve.loss[starts] - curve.loss[starts - 1])),
        "pair_tokens_min": float(curve.pair_tokens.min()),
        "pair_tokens_max": float(curve.pair_tokens.max()),
        "correlation_of_loss_and_length": float(np.corrcoef(rest, lengths)[0, 1]),
    }


def off_trend(loss: np.ndarray, per_epoch: int) -> tuple[np.ndarray, slice]:
    """Subtract from the loss its mean over the epoch around each step; also return which steps have such an epoch."""
    window = per_epoch + 1 - per_epoch % 2
    trend = np.convolve(loss, np.full(window, 1 / window), mode="valid")
    inside = slice(window // 2, window // 2 + len(trend))
    return loss[inside] - trend, inside


def write_results(
    out: Path, preset: str, config: TrainConfig, curves: dict[str, Curve], figures: dict[str, dict[str, float]]
) -> None:
    """Write DIR/batch_order.json and DIR/batch_order.png."""
    described = {"preset": preset, "seed": config.seed, "precision": config.arithmetic, "figures": figures}
    steps = {
        name: {field.name: np.round(getattr(curve, field.name), 4).tolist() for field in dataclasses.fields(curve)}
        for name, curve in curves.items()
    }
    (out / "batch_order.json").write_text(json.dumps({**described, "curves": steps}) + "\n", encoding="utf-8")
    (out / "batch_order.png").write_bytes(draw(curves))


def draw(curves: dict[str, Curve]) -> bytes:
    """Draw the loss of every order, and below it the mean length of a step's pairs, as PNG."""
    figure = new_figure(9, 6)
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=[2, 1])
    colours = {"sorted": "tab:red", "buckets": "tab:orange", "random": "tab:blue"}
    for name, curve in curves.items():
        numbers = np.arange(1, len(curve.loss) + 1)
        # The curve of buckets swings from step to step, so it is thin and behind the others.
        width, depth = (0.7, 1) if name == "buckets" else (1.3, 2)
        style: dict[str, Any] = {"color": colours[name], "linewidth": width, "zorder": depth, "label": name}
        upper.plot(numbers, curve.loss, **style)
        lower.plot(numbers, curve.pair_tokens, **style)
    starts = np.flatnonzero(np.diff(curves["sorted"].epoch)) + 1
    for axis in (upper, lower):
        axis.spines[["top", "right"]].set_visible(False)
        for start in starts:
            axis.axvline(start + 0.5, color="0.85", zorder=0)
    upper.set_ylabel("training loss per token (nats)")
    upper.legend(frameon=False)
    lower.set_ylabel("mean tokens per pair")
    lower.set_xlabel("step (lines: epochs)")
    return as_png(figure)
