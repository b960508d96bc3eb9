"""Build the parts of a run, in the order of their dependencies. The loop is in `trainer`."""

import dataclasses
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch

from dist_transformer.base.errors import UserError
from dist_transformer.config.settings import TrainConfig
from dist_transformer.cost.memory import ZeroSettings, packs_that_fit
from dist_transformer.data.loading.loader import TrainingData
from dist_transformer.data.loading.sharing import Sharing
from dist_transformer.model.freezing import frozen_names
from dist_transformer.model.transformer import Transformer, parameter_shapes
from dist_transformer.reporting.reporter import Reporter
from dist_transformer.run.checkpoint.reader import CheckpointReader
from dist_transformer.run.checkpoint.writer import CheckpointWriter
from dist_transformer.run.environment import describe_environment, record_environment
from dist_transformer.run.folder import describe_run, open_run, run_identity, shareable_settings
from dist_transformer.run.layout import LEDGER_FILE, METRICS_FILE
from dist_transformer.run.ledger import Ledger
from dist_transformer.run.progress import Progress
from dist_transformer.run.warm_start import InitialWeights
from dist_transformer.runtime import distributed
from dist_transformer.runtime.agreement import require_agreement
from dist_transformer.runtime.device import (
    cores_of_rank,
    threads_are_given,
    threads_for,
)
from dist_transformer.runtime.world import World
from dist_transformer.training.engine.deepspeed_engine import Engine
from dist_transformer.training.engine.ds_config import load_ds_config, require_fitting
from dist_transformer.training.engine.measured_memory import state_bytes
from dist_transformer.training.fault_tolerance.preemption import Preemption
from dist_transformer.training.fault_tolerance.watchdog import Watchdog
from dist_transformer.training.introduction import introduce, note_on_nodes, rate_cautions, tag_cautions
from dist_transformer.training.logbook import Logbook, peak_flops_of
from dist_transformer.training.step_profile import StepProfile
from dist_transformer.training.trainer import Saver, Trainer
from dist_transformer.training.validation import Validator
from dist_transformer.training.validation_command import ValidationCommand


@dataclass(frozen=True, kw_only=True, slots=True)
class _Inputs:
    """Settings and data of a run. To read them writes nothing."""

    config: TrainConfig
    """The settings, with the sizes of the vocabularies and the packs per micro-batch."""
    described: dict[str, Any]
    """Content of config.json. Packs that each start chooses again are left open in it."""
    ds_config: dict[str, Any]
    data: TrainingData
    sharing: Sharing
    validators: tuple[Validator, ...]
    """One per direction; empty if the run is not validated."""
    cores: int | None
    """Fewest cores of a rank; None on GPUs."""
    notes: list[str]
    """Lines for the user."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Run:
    """The open run folder, and the state of the run up to its checkpoint or its beginning."""

    engine: Engine
    progress: Progress
    ledger: Ledger
    writer: CheckpointWriter
    reporter: Reporter
    notes: list[str]
    """Lines for the user."""


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
    watchdog, held = watchdog or Watchdog(world, {}), ExitStack()
    inputs = _read_inputs(config, world, device)
    run = _open_run(inputs, world, device, watchdog, held, quiet=quiet)
    introduce(inputs.config, world, inputs.data, run.engine, run.reporter, run.notes)
    if world.is_main:
        _record_setting(inputs.config, inputs.described, world, run.engine, run.reporter)
    return _build_loop(inputs, run, world, watchdog, held)


def _read_inputs(config: TrainConfig, world: World, device: torch.device) -> _Inputs:
    """Open the data, and complete the settings. Collective: every rank must call it."""
    sharing = Sharing(
        skip=config.corpora.on_bad_shard == "skip", timeout_minutes=config.timeouts.collective_timeout_minutes
    )
    data = sharing.load(config.corpora, config.batch, seed=config.seed)
    config = dataclasses.replace(config, model=config.model.for_vocabularies(*data.first.index.vocab_sizes))
    frozen_names(parameter_shapes(config.model), config.freeze)
    ds_config = load_ds_config(config.deepspeed_config)
    described = describe_run(config, [folder.path for folder in data.folders], ds_config)
    # The settings are equal, but each node may have its own disk.
    require_agreement({"data_sha256": described["data_sha256"]})
    # What it refuses is refused before anything is written.
    require_fitting(ds_config, config)
    # For other numbers of nodes, the packs are open.
    note = note_on_nodes(config, ds_config, data.budgets.max_source_tokens, world, device)
    if config.batch.packs_per_micro_batch is None:
        # The ranks agree on the smallest choice.
        packs = _choose_packs(config, ds_config, data.budgets.max_source_tokens, world, device)
        batch = dataclasses.replace(config.batch, packs_per_micro_batch=min(distributed.gather_objects(packs)))
        config, data = dataclasses.replace(config, batch=batch), data.at_once(batch.packs_at_once)
    if config.guided_attention > 0:
        data = data.with_links()
    validators = _make_validators(config, data)
    _check_lengths(config, data)
    cores = None
    if device.type == "cpu":
        cores, described["threads"] = choose_threads(config, world)
    return _Inputs(
        config=config,
        described=described,
        ds_config=ds_config,
        data=data,
        sharing=sharing,
        validators=validators,
        cores=cores,
        notes=[note for note in (note, *(validator.note for validator in validators)) if note],
    )


def _open_run(
    inputs: _Inputs, world: World, device: torch.device, watchdog: Watchdog, held: ExitStack, *, quiet: bool
) -> _Run:
    """Open the run folder, build the engine, and restore both. Collective: every rank must call it.

    Args:
        held: holds the lock of the folder until it is closed.
    """
    config, described, data = inputs.config, inputs.described, inputs.data
    origin, notes, fence = open_run(config, described, data.first, held, cores=inputs.cores)
    if described["threads"] is not None and not threads_are_given():
        torch.set_num_threads(described["threads"])
    # From here on, the other ranks and the user see which rank fails or hangs.
    watchdog.publish_in(config.run_dir)
    engine = Engine(_make_model(config, origin).to(device), config, inputs.ds_config, world_size=world.size)
    progress = _restore(engine, data, origin)
    ledger = Ledger(config.run_dir / LEDGER_FILE, chain=progress.ledger_chain, fence=fence)
    writer = CheckpointWriter(
        config.run_dir,
        config=described,
        flushed=(ledger.path, config.run_dir / METRICS_FILE),
        fence=fence,
        writers=[rank for rank, local in enumerate(distributed.gather_objects(world.local_rank)) if local == 0],
        timeout_minutes=config.timeouts.collective_timeout_minutes,
    )
    held.callback(writer.close)
    reporter = Reporter(
        config.run_dir,
        is_main=world.is_main,
        max_steps=config.max_steps,
        first_step=progress.step,
        corpora=[folder.index.corpus for folder in data.folders],
        quiet=quiet,
        sinks=config.sinks,
        fence=fence,
    )
    notes += inputs.notes
    if isinstance(origin, CheckpointReader):
        notes += rate_cautions(config, origin)
    elif origin is not None:
        notes += tag_cautions(config, data, origin)
    return _Run(engine=engine, progress=progress, ledger=ledger, writer=writer, reporter=reporter, notes=notes)


def _build_loop(inputs: _Inputs, run: _Run, world: World, watchdog: Watchdog, held: ExitStack) -> Trainer:
    """Build what the loop needs besides data and run. Collective: every rank must call it."""
    config, data = inputs.config, inputs.data
    preemption = Preemption(world, watchdog, timeout_minutes=config.timeouts.collective_timeout_minutes)
    logbook = Logbook(
        config=config,
        data=data,
        sharing=inputs.sharing,
        engine=run.engine,
        progress=run.progress,
        ledger=run.ledger,
        reporter=run.reporter,
        peak_flops=peak_flops_of(config, world, run.engine.device),
    )
    saver = Saver(
        settings=config.checkpoints,
        model=config.model,
        index=data.first.index,
        directions=data.directions,
        marks=tuple(folder.index.marks for folder in data.of_directions),
        # Without the special token.
        longest_source=data.collator.sizes.max_lengths[0] - 1,
        several_sentences=data.several_sentences(),
        guided=config.guided_attention > 0,
        run=run_identity(inputs.described),
        engine=run.engine,
        progress=run.progress,
        writer=run.writer,
        reporter=run.reporter,
        watchdog=watchdog,
    )
    return Trainer(
        config=config,
        world=world,
        data=data,
        sharing=inputs.sharing,
        engine=run.engine,
        progress=run.progress,
        validators=inputs.validators,
        command=_make_command(config, preemption),
        logbook=logbook,
        saver=saver,
        reporter=run.reporter,
        preemption=preemption,
        watchdog=watchdog,
        profile=StepProfile(config.profiled_steps if world.is_main else None, config.run_dir, say=run.reporter.say),
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


def choose_threads(config: TrainConfig, world: World) -> tuple[int, int]:
    """Choose the threads of a rank on CPUs. Collective: every rank must call it.

    Returns:
        the fewest cores of a rank, and the threads that were given, or those by the rule for this shape.
    """
    cores = min(distributed.gather_objects(cores_of_rank(world.local_size)))
    tokens = config.optimizer.passes * config.batch.packs_at_once * config.batch.max_target_tokens
    chosen = threads_for(width=config.model.width, tokens=tokens, cores=cores)
    return cores, torch.get_num_threads() if threads_are_given() else chosen


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
