"""Build the parts of a run, in the order of their dependencies. The loop is in `trainer`."""

import dataclasses
import math
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from typing import Any

import torch

from dist_transformer.base.errors import UserError
from dist_transformer.config.directions import tag_caution
from dist_transformer.config.settings import TrainConfig
from dist_transformer.cost.hardware import Cluster, kind_of_device, peak_flops
from dist_transformer.cost.memory import ZeroSettings, packs_that_fit
from dist_transformer.cost.speed import fewer_nodes
from dist_transformer.data.loading.loader import TrainingData
from dist_transformer.data.loading.sharing import Sharing
from dist_transformer.model.freezing import frozen_names
from dist_transformer.model.transformer import Transformer
from dist_transformer.reporting.reporter import Reporter
from dist_transformer.run.checkpoint.reader import CheckpointReader
from dist_transformer.run.checkpoint.tensors import parameter_shapes
from dist_transformer.run.checkpoint.writer import CheckpointWriter
from dist_transformer.run.environment import describe_environment, record_environment
from dist_transformer.run.folder import describe_run, open_run, run_identity, settings_of, shareable_settings
from dist_transformer.run.layout import LEDGER_FILE, METRICS_FILE
from dist_transformer.run.ledger import Ledger
from dist_transformer.run.progress import Progress
from dist_transformer.run.warm_start import InitialWeights
from dist_transformer.runtime import distributed
from dist_transformer.runtime.agreement import require_agreement
from dist_transformer.runtime.device import (
    cores_of_rank,
    load_caution,
    load_of_machine,
    threads_are_given,
    threads_for,
)
from dist_transformer.runtime.world import World
from dist_transformer.training.engine.ds_config import load_ds_config
from dist_transformer.training.engine.engine import Engine
from dist_transformer.training.engine.memory import state_bytes
from dist_transformer.training.engine.schedule import learning_rate
from dist_transformer.training.fault_tolerance.preemption import Preemption
from dist_transformer.training.fault_tolerance.watchdog import Watchdog
from dist_transformer.training.logbook import Logbook
from dist_transformer.training.step_profile import StepProfile
from dist_transformer.training.trainer import Saver, Trainer
from dist_transformer.training.validation import Validator
from dist_transformer.training.validation_command import ValidationCommand

# Presets on the corpora that they are made for stay far below: `multi30k` plans about 170 epochs at most, WMT's `big`
# 60, the demo 6. Even a few thousand sentences are memorized long before. A preset on the wrong corpus is far above:
# `big` on 5,000 sentences plans tens of thousands.
ABSURD_EPOCHS = 1000
# Epochs that the remedy suggests: many for a small corpus, but a length that is used in practice.
_LONG_EPOCHS = 100
# Share of a learning rate by which a schedule that continues may differ: a cosine with a few more steps.
_LARGEST_JUMP = 0.05


def assemble(
    config: TrainConfig,
    world: World,
    device: torch.device,
    watchdog: Watchdog | None = None,
    *,
    quiet: bool = False,
) -> Trainer:
    """Open data and run folder, build the engine, and restore the run.

    Collective: every rank must call it.

    Args:
        quiet: report only to the run folder.

    Raises:
        UserError: on all ranks, if settings, data or run folder cannot be used.
    """
    watchdog = watchdog or Watchdog(world, {})
    timeout, held = config.timeouts.collective_timeout_minutes, ExitStack()
    sharing = Sharing(skip=config.corpora.on_bad_shard == "skip", timeout_minutes=timeout)
    preemption = Preemption(world, watchdog, timeout_minutes=timeout)
    data = sharing.load(config.corpora, config.batch, seed=config.seed)
    index = data.first.index
    config = dataclasses.replace(config, model=config.model.for_vocabularies(*index.vocab_sizes))
    # Refused before anything is written.
    frozen_names(parameter_shapes(config.model), config.freeze)
    ds_config = load_ds_config(config.deepspeed_config)
    # Described before open settings are filled in: each start chooses those again.
    described = describe_run(config, [folder.path for folder in data.folders], ds_config)
    # The settings are equal, but each node may have its own disk.
    require_agreement({"data_sha256": described["data_sha256"]})
    identity = run_identity(described)
    note_on_nodes = _note_on_nodes(config, ds_config, data.budgets.max_source_tokens, world, device)
    if config.batch.packs_per_micro_batch is None:
        # The ranks agree on the smallest choice.
        packs = _choose_packs(config, ds_config, data.budgets.max_source_tokens, world, device)
        batch = dataclasses.replace(config.batch, packs_per_micro_batch=min(distributed.gather_objects(packs)))
        config, data = dataclasses.replace(config, batch=batch), data.at_once(batch.packs_at_once)
    validators = _make_validators(config, data)
    _check_lengths(config, data)
    cores = described["threads"] = None
    if device.type == "cpu":
        cores, described["threads"] = choose_threads(config, world)
    origin, notes, fence = open_run(config, described, data.first, held, cores=cores)
    if described["threads"] is not None and not threads_are_given():
        torch.set_num_threads(described["threads"])
    watchdog.publish_in(config.run_dir)
    model = _make_model(config, origin).to(device)
    engine = Engine(model, config, ds_config, world_size=world.size)
    progress = _restore(engine, data, origin)
    ledger = Ledger(config.run_dir / LEDGER_FILE, chain=progress.ledger_chain, fence=fence)
    writer = CheckpointWriter(
        config.run_dir,
        config=described,
        flushed=(ledger.path, config.run_dir / METRICS_FILE),
        fence=fence,
        timeout_minutes=timeout,
    )
    held.callback(writer.close)
    reporter = Reporter(
        config.run_dir,
        is_main=world.is_main,
        max_steps=config.max_steps,
        first_step=progress.step,
        corpora=[folder.index.corpus for folder in data.folders],
        quiet=quiet,
        fence=fence,
    )
    logbook = Logbook(
        config=config,
        data=data,
        sharing=sharing,
        engine=engine,
        progress=progress,
        ledger=ledger,
        reporter=reporter,
        peak_flops=_peak_flops(config, world, device),
    )
    saver = Saver(
        settings=config.checkpoints,
        model=config.model,
        index=index,
        directions=data.directions,
        marks=tuple(folder.index.marks for folder in data.of_directions),
        # Without the special token.
        longest_source=data.collator.sizes.max_lengths[0] - 1,
        several_sentences=data.several_sentences(),
        run=identity,
        engine=engine,
        progress=progress,
        writer=writer,
        reporter=reporter,
        watchdog=watchdog,
    )
    notes += [note for note in (note_on_nodes, *(validator.note for validator in validators)) if note]
    if isinstance(origin, CheckpointReader):
        notes += rate_cautions(config, origin)
    elif origin is not None:
        notes += tag_cautions(config, data, origin)
    _introduce(config, world, data, engine, reporter, notes)
    if world.is_main:
        _record_setting(config, described, world, engine, reporter)
    return Trainer(
        config=config,
        world=world,
        data=data,
        sharing=sharing,
        engine=engine,
        progress=progress,
        validators=validators,
        command=_make_command(config, preemption),
        logbook=logbook,
        saver=saver,
        reporter=reporter,
        preemption=preemption,
        watchdog=watchdog,
        profile=StepProfile(config.profiled_steps if world.is_main else None, config.run_dir, say=reporter.say),
        held=held,
    )


def _choose_packs(
    config: TrainConfig, ds_config: dict[str, Any], source_budget: int, world: World, device: torch.device
) -> int:
    """Choose the number of packs that fill a GPU, or that fit the caches of a CPU."""
    if device.type != "cuda":
        return config.batch.packs_on_a_cpu(world.size, passes=config.optimizer.passes)
    return packs_that_fit(
        config,
        ZeroSettings.from_ds_config(ds_config),
        world_size=world.size,
        source_budget=source_budget,
        memory_bytes=torch.cuda.get_device_properties(device).total_memory,
    )


def _note_on_nodes(
    config: TrainConfig, ds_config: dict[str, Any], source_budget: int, world: World, device: torch.device
) -> str | None:
    """Name the fewer nodes that would be as fast; None on one node, and where the planner predicts no speed."""
    zero, nodes = ZeroSettings.from_ds_config(ds_config), world.size // world.local_size
    if nodes == 1 or zero.offload_optimizer or _peak_flops(config, world, device) is None:
        return None
    name = kind_of_device(describe_environment()["gpus"][device.index])
    assert name is not None
    cluster = Cluster(gpu=name, gpus=world.local_size, nodes=nodes)
    return fewer_nodes(config, zero, cluster, source_budget=source_budget)


def choose_threads(config: TrainConfig, world: World) -> tuple[int, int]:
    """Choose the threads of a rank on CPUs. Collective: every rank must call it.

    Returns:
        the fewest cores of a rank, and the threads that were given, or those by the rule for this shape.
    """
    cores = min(distributed.gather_objects(cores_of_rank(world.local_size)))
    tokens = config.optimizer.passes * config.batch.packs_at_once * config.batch.max_target_tokens
    chosen = threads_for(width=config.model.width, tokens=tokens, cores=cores)
    return cores, torch.get_num_threads() if threads_are_given() else chosen


def _peak_flops(config: TrainConfig, world: World, device: torch.device) -> float | None:
    """Return the peak of all ranks, assuming equal GPUs; None for CPUs, whose peak is not known."""
    if device.type != "cuda":
        return None
    peak = peak_flops(describe_environment()["gpus"][device.index], config.arithmetic)
    return None if peak is None else peak * world.size


def _make_validators(config: TrainConfig, data: TrainingData) -> tuple[Validator, ...]:
    if config.validation.validate_every == 0:
        return ()
    folders, sentences = data.of_directions, config.validation.validate_sentences
    return tuple(
        Validator(
            folder,
            data.budgets,
            config.batch,
            positions=config.model.max_positions,
            sentences=sentences,
            named=len(folders) > 1,
        )
        for folder in folders
    )


def _make_command(config: TrainConfig, preemption: Preemption) -> ValidationCommand | None:
    command, minutes = config.validation.validation_command, config.validation.validation_command_minutes
    return None if command is None else ValidationCommand(command, minutes=minutes, preemption=preemption)


def _check_lengths(config: TrainConfig, data: TrainingData) -> None:
    longest = max(data.collator.sizes.max_lengths)
    if longest > config.model.max_positions:
        raise UserError(
            f"model.max_positions is {config.model.max_positions}, but a sentence has {longest} tokens: "
            "raise --model.max-positions, or prepare the data with a lower --max-tokens"
        )


def _make_model(config: TrainConfig, origin: CheckpointReader | InitialWeights | None) -> Transformer:
    """Make the same weights on every rank: from a checkpoint or model folder, or initialized from the seed."""
    torch.manual_seed(config.seed)
    model = Transformer(config.model)
    if isinstance(origin, InitialWeights):
        origin.put_into(model)
    elif origin is not None:
        model.load_state_dict({name: origin.weight(name) for name in origin.parameter_names()})
    return model


def _restore(engine: Engine, data: TrainingData, origin: CheckpointReader | InitialWeights | None) -> Progress:
    if isinstance(origin, CheckpointReader):
        engine.restore(origin.parameter, updates=origin.state["updates"])
        return Progress.from_json(origin.state)
    return Progress(position=data.plan.start())


def _introduce(
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
    for note in notes:
        reporter.say(note)
    for caution in cautions(config, epochs=epochs, target_tokens=target_tokens):
        reporter.say(f"warning: {caution}")
    slow = load_caution(load_of_machine(), torch.get_num_threads()) if threads else None
    if slow:
        reporter.say(f"warning: {slow}")


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


def _record_setting(
    config: TrainConfig,
    described: dict[str, Any],
    world: World,
    engine: Engine,
    reporter: Reporter,
) -> None:
    """Record settings and machine of this start, for later inspection of the run."""
    reporter.fence()
    entry = {
        **describe_environment(world_size=world.size, local_size=world.local_size),
        "threads": torch.get_num_threads(),
        "state_bytes": state_bytes(engine),
        "settings": shareable_settings(described),
    }
    record_environment(config.run_dir, entry, step=reporter.first_step)
    reporter.settings(config)


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
