"""Tell the user what a run trains on, for how long and how, and warn of settings that are probably not meant."""

import math
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import torch

from dist_transformer.base.errors import UserError
from dist_transformer.config.directions import tag_caution
from dist_transformer.config.settings import TrainConfig
from dist_transformer.cost.hardware import Cluster, kind_of_device
from dist_transformer.cost.memory import ZeroSettings
from dist_transformer.cost.speed import fewer_nodes
from dist_transformer.data.loading.loader import TrainingData
from dist_transformer.reporting.reporter import Reporter
from dist_transformer.run.checkpoint.reader import CheckpointReader
from dist_transformer.run.environment import describe_environment
from dist_transformer.run.folder import settings_of
from dist_transformer.run.warm_start import InitialWeights
from dist_transformer.runtime.device import load_caution, load_of_machine
from dist_transformer.runtime.world import World
from dist_transformer.training.engine.deepspeed_engine import Engine
from dist_transformer.training.engine.schedule import learning_rate
from dist_transformer.training.logbook import peak_flops_of

# Presets on the corpora that they are made for stay far below: `multi30k` plans about 170 epochs at most, WMT's `big`
# 60, the demo 6. Even a few thousand sentences are memorized long before. A preset on the wrong corpus is far above:
# `big` on 5,000 sentences plans tens of thousands.
ABSURD_EPOCHS = 1000
# Epochs that the remedy suggests: many for a small corpus, but a length that is used in practice.
_LONG_EPOCHS = 100
# Share of a learning rate by which a schedule that continues may differ: a cosine with a few more steps.
_LARGEST_JUMP = 0.05


def introduce(
    config: TrainConfig, world: World, data: TrainingData, engine: Engine, reporter: Reporter, notes: list[str]
) -> None:
    """Report what is trained, on which data, for how long and how; warn of settings that are probably not intended."""
    index = data.first.index
    corpora = " + ".join(folder.index.corpus for folder in data.folders)
    pairs = sum(folder.index.train.pairs for folder in data.folders)
    batch, packs = config.batch.packs_per_step * data.budgets.max_target_tokens, config.batch.packs_at_once
    languages = f"{', '.join(map(str, data.directions))}{', synthetic' if index.synthetic else ''}"
    epochs, target_tokens = (
        planned_epochs(config, data),
        sum(folder.index.train.target_tokens for folder in data.folders),
    )
    threads = f", {torch.get_num_threads()} thread(s) each" if engine.device.type == "cpu" else ""
    compiled, why = engine.compilation
    compilation = f", {'' if compiled else 'not '}compiled ({why})" if config.compile == "on" or not threads else ""
    per_step, accumulation = epochs / config.max_steps, config.batch.accumulation_steps(world.size)
    sentences = (pairs - data.plan.skipped) * per_step
    skipped = f", {data.plan.skipped:,} of them too long for a pack" if data.plan.skipped else ""
    reporter.say(
        f"{corpora} ({languages}): {pairs:,} pairs{skipped}\n"
        f"{engine.parameters:,} parameters; a step has about {sentences:,.0f} sentences and "
        f"{target_tokens * per_step:,.0f} target tokens ({config.batch.packs_per_step} packs, at most {batch:,}: "
        f"--batch.target-tokens-per-step {batch})\n"
        f"{config.max_steps:,} steps, about {epochs:,.{1 if epochs < 100 else 0}f} epochs of {target_tokens:,} "
        f"target tokens in about {max(1, round(1 / per_step)):,} steps\n"
        f"{world.size} rank(s) on {engine.device.type}{threads}, ZeRO-{engine.stage}, {config.arithmetic}{compilation}"
        f"; in a step each computes {accumulation} x about {sentences / (world.size * accumulation):,.0f} sentences "
        f"({packs} pack(s) at a time)"
    )
    if config.cuda_graphs == "yes" and engine.graph_problem is not None:
        reporter.say(f"no CUDA graphs are used ({engine.graph_problem})")
    for note in notes:
        reporter.say(note)
    for caution in cautions(config, epochs=epochs, target_tokens=target_tokens):
        reporter.say(f"warning: {caution}")
    slow = load_caution(load_of_machine(), torch.get_num_threads()) if threads else None
    if slow:
        reporter.say(f"warning: {slow}")


def note_on_nodes(
    config: TrainConfig, ds_config: dict[str, Any], source_budget: int, world: World, device: torch.device
) -> str | None:
    """Name the fewer nodes that would be as fast; None on one node, and where the planner predicts no speed."""
    zero, nodes = ZeroSettings.from_ds_config(ds_config), world.size // world.local_size
    if nodes == 1 or zero.offload_optimizer or peak_flops_of(config, world, device) is None:
        return None
    name = kind_of_device(describe_environment()["gpus"][device.index])
    assert name is not None
    cluster = Cluster(gpu=name, gpus=world.local_size, nodes=nodes)
    return fewer_nodes(config, zero, cluster, source_budget=source_budget)


def tag_cautions(config: TrainConfig, data: TrainingData, origin: InitialWeights) -> Iterator[str]:
    """Yield a warning for each data folder without the tags that the model to start from was trained with."""
    place = f"--init-from {config.checkpoints.init_from}"
    for text, folder in zip(config.corpora.data, data.folders, strict=True):
        if caution := tag_caution(origin.directions, folder.index.direction, place=place, text=text):
            yield f"warning: {caution}"


def rate_cautions(config: TrainConfig, origin: CheckpointReader) -> Iterator[str]:
    """Yield a warning if the next update has another learning rate than it had by the settings of the checkpoint."""
    described = origin.settings()
    if described is None:
        return
    update = origin.state["updates"] + 1
    with suppress(UserError):
        # A schedule of the user's own may be gone.
        old, new = (learning_rate(update, each) for each in (settings_of(described, origin.path), config))
        if abs(new - old) > _LARGEST_JUMP * old:
            yield (
                f"warning: the changed settings continue at a learning rate of {new:.3g}, the old ones at {old:.3g}; "
                "if that is not meant, restore the settings, or pass --optimizer.schedule constant and the rate as "
                "--optimizer.peak-lr"
            )


def planned_epochs(config: TrainConfig, data: TrainingData) -> float:
    """Compute how many epochs of all corpora together `max_steps` takes, assuming full packs.

    It needs only the totals of the corpora, so it is fast for any size.
    """
    budgets, packs = data.budgets, 0
    for folder in data.folders:
        split = folder.index.train
        shares = (
            split.source_tokens / budgets.max_source_tokens,
            split.target_tokens / budgets.max_target_tokens,
            split.pairs / budgets.max_sentences,
        )
        packs += math.ceil(max(shares))
    steps = packs / config.batch.packs_per_step
    # The last step of an epoch is filled from the next epoch in a mixture only.
    return config.max_steps / (math.ceil(steps) if len(data.folders) == 1 else steps)


def cautions(config: TrainConfig, *, epochs: float | None, target_tokens: int | None) -> Iterator[str]:
    """Yield a warning with its remedy for each setting that makes no sense.

    Args:
        epochs: epochs that the run plans; None if there is no data to count them.
        target_tokens: target tokens of an epoch.
    """
    steps, warmup = config.max_steps, config.optimizer.warmup_steps
    # With patience, `max_steps` is only an upper limit: the run ends when validation stops improving.
    if epochs is not None and epochs > ABSURD_EPOCHS and config.validation.patience == 0:
        fewer = max(1, round(steps * _LONG_EPOCHS / epochs))
        yield (
            f"--max-steps {steps} means about {epochs:,.0f} epochs of {target_tokens:,} target tokens, which the "
            f"model would memorize: lower --max-steps ({fewer} is about {_LONG_EPOCHS} epochs), or use a "
            "smaller preset"
        )
    if warmup >= steps:
        yield (
            f"--optimizer.warmup-steps {warmup} is not below --max-steps {steps}, so the learning rate would rise "
            "until the end: lower --optimizer.warmup-steps, or raise --max-steps"
        )
