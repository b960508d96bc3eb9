"""The plan of a run: memory by ZeRO stage, time, jobs, disk, epochs; and its comparison with a run."""

import dataclasses
import math
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from statistics import median_high
from typing import Any

from dist_transformer.base.errors import UserError
from dist_transformer.config.plain import read_json
from dist_transformer.config.settings import EMBEDDED_CORPUS, TrainConfig
from dist_transformer.cost.hardware import CPU, Cluster, GpuKind, gpu_kind, kind_of_device
from dist_transformer.cost.memory import SENTENCE_TOKENS, Memory, ZeroSettings, model_sizes, predict_memory
from dist_transformer.cost.speed import NodeChoice, StepTime, choose_nodes, fill_gpus, predict_step
from dist_transformer.data.loading.loader import open_training_data
from dist_transformer.model.transformer import training_flops
from dist_transformer.run.environment import read_environments
from dist_transformer.run.folder import settings_of
from dist_transformer.run.layout import METRICS_FILE, SETTINGS_FILE, checkpoints_of, read_records
from dist_transformer.training.engine.ds_config import DEFAULT_ZERO, require_fitting

PAPER_VOCABULARY = 37_000
"""Entries of the paper's vocabulary (section 5.1), for plans without data."""
# Fill without data: the share of the budgets that is text in packs of 1,024 tokens and more.
_FILL = 0.99
# Steps of the data's plan that are sampled.
_SAMPLED_STEPS = 20
_SMALLEST_PACK = 256
# Bytes per parameter: a checkpoint holds fp32 weights and both moments, a weight file the weights only.
_CHECKPOINT_BYTES, _WEIGHTS_BYTES = 12, 4


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """The data that a step trains on."""

    vocab_sizes: tuple[int, int]
    """Entries of the sources and of the targets; a second 0: both have the same vocabulary."""
    source_budget: int
    """Most source tokens per pack; the target budget is in the config."""
    fill: float
    """Share of the budgets that is text."""
    sentence_tokens: float
    assumed: bool = False
    """Whether the values are assumed, without data."""
    corpus_target_tokens: int | None = None
    """Target tokens of one epoch of all data."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StagePlan:
    """One row of the memory table."""

    zero: ZeroSettings
    memory: Memory
    fits: bool | None
    """Whether the memory suffices; None on a CPU."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunPlan:
    config: TrainConfig
    cluster: Cluster
    gpu: GpuKind | None
    work: Workload
    parameters: int
    stages: tuple[StagePlan, ...]
    chosen: StagePlan
    """Stage of the run's own settings."""
    step_time: StepTime | None
    """Predicted time of a step; None on a CPU, and with offload, which depends on the host."""
    best: NodeChoice | None
    """Best number of nodes with this many GPUs, among those that share a step; None like `step_time`."""

    @property
    def target_tokens_per_step(self) -> float:
        batch = self.config.batch
        return self.work.fill * batch.packs_per_step * batch.max_target_tokens

    @property
    def target_tokens_per_second(self) -> float | None:
        return self.target_tokens_per_step / self.step_time.total if self.step_time else None

    @property
    def hours(self) -> float | None:
        return self.config.max_steps * self.step_time.total / 3600 if self.step_time else None

    @property
    def jobs(self) -> int | None:
        return math.ceil(self.hours / self.cluster.job_hours) if self.hours is not None else None

    @property
    def training_flops(self) -> int:
        steps, batch = self.config.max_steps, self.config.batch
        source = self.work.fill * batch.packs_per_step * self.work.source_budget * steps
        target = self.target_tokens_per_step * steps
        return training_flops(
            self.config.model,
            source_tokens=round(source),
            target_tokens=round(target),
            passes=self.config.optimizer.passes,
        )

    @property
    def checkpoint_bytes(self) -> int:
        config, average = self.config, _WEIGHTS_BYTES if self.config.ema_decay else 0
        # Muon has one moment.
        matrices = model_sizes(config.model, ZeroSettings(stage=0), config.freeze).matrices
        fewer = _WEIGHTS_BYTES * matrices if config.optimizer.kind == "muon" else 0
        return (_CHECKPOINT_BYTES + average) * self.parameters - fewer

    @property
    def weights_bytes(self) -> int:
        return _WEIGHTS_BYTES * self.parameters

    @property
    def disk_bytes(self) -> int:
        """Most bytes of checkpoints and weights: those that are kept, and one more while it is written."""
        config = self.config
        saves = math.ceil(config.max_steps / config.checkpoints.save_every)
        checkpoints = min(saves, config.checkpoints.keep_checkpoints) + 1
        weights = min(saves, config.checkpoints.keep_weights + config.checkpoints.keep_best) + 1
        if config.ema_decay:
            # One file of averaged weights per checkpoint.
            weights += checkpoints
        return checkpoints * self.checkpoint_bytes + weights * self.weights_bytes

    @property
    def epochs(self) -> float | None:
        corpus = self.work.corpus_target_tokens
        return self.config.max_steps * self.target_tokens_per_step / corpus if corpus else None


def assume_work(config: TrainConfig, *, fill: float) -> Workload:
    """Assume equal budgets and sentences of usual length."""
    return Workload(
        vocab_sizes=config.model.vocab_sizes if config.model.vocab_size else (PAPER_VOCABULARY, 0),
        source_budget=config.batch.max_source_tokens or config.batch.max_target_tokens,
        fill=fill,
        sentence_tokens=SENTENCE_TOKENS,
        assumed=True,
    )


def look_at_work(config: TrainConfig) -> Workload:
    """Measure the workload of the data; without data, assume one."""
    if config.corpora.data == EMBEDDED_CORPUS:
        return assume_work(config, fill=_FILL)
    data = open_training_data(config.corpora, config.batch, seed=config.seed)
    budgets, packs = data.budgets, config.batch.packs_per_step
    steps = list(islice(data.plan.steps(data.plan.start(), packs), _SAMPLED_STEPS))
    target = sum(step.target_tokens for step in steps)
    totals = [folder.index.train for folder in data.folders]
    return Workload(
        vocab_sizes=data.first.index.vocab_sizes,
        source_budget=budgets.max_source_tokens,
        fill=target / (len(steps) * packs * budgets.max_target_tokens),
        sentence_tokens=sum(split.target_tokens for split in totals) / sum(split.pairs for split in totals),
        corpus_target_tokens=sum(split.target_tokens for split in totals),
    )


def plan_run(config: TrainConfig, cluster: Cluster, ds_config: dict[str, Any], work: Workload | None = None) -> RunPlan:
    """Plan a run.

    Args:
        work: workload of the data; measured if not given.

    Raises:
        UserError: the GPU is unknown, there are more processes than packs in a step, the data cannot be used, or the
            DeepSpeed config does not fit the settings.
    """
    gpu = gpu_kind(cluster.gpu, config.arithmetic)
    work = work or look_at_work(config)
    config = dataclasses.replace(config, model=config.model.for_vocabularies(*work.vocab_sizes))
    config.batch.accumulation_steps(cluster.world_size)
    require_fitting(ds_config, config)
    own, budget = ZeroSettings.from_ds_config(ds_config), work.source_budget
    step_time = best = None
    if gpu is not None:
        given, config = config, fill_gpus(config, own, cluster, source_budget=budget)
        if not own.offload_optimizer:
            most = dataclasses.replace(cluster, nodes=config.batch.packs_per_step // cluster.gpus)
            best = choose_nodes(given, own, most, source_budget=budget)
            step_time = predict_step(config, own, cluster, source_budget=budget)
    muon = config.optimizer.kind == "muon"
    fitting = [zero for zero in _stages(own, ds_config) if not (muon and zero.offload_optimizer)]
    stages = tuple(_plan_stage(config, cluster, gpu, zero, work) for zero in fitting)
    return RunPlan(
        config=config,
        cluster=cluster,
        gpu=gpu,
        work=work,
        parameters=model_sizes(config.model, own, config.freeze).parameters,
        stages=stages,
        chosen=next(stage for stage in stages if stage.zero == own),
        step_time=step_time,
        best=best,
    )


def _stages(own: ZeroSettings, ds_config: dict[str, Any]) -> Iterable[ZeroSettings]:
    """List the stages of ds_configs/ with the buckets of the run, and the run's own stage if it differs."""
    zero = {**DEFAULT_ZERO, **ds_config["zero_optimization"], "offload_optimizer": None, "offload_param": None}
    stages = [ZeroSettings.from_ds_config({"zero_optimization": {**zero, "stage": stage}}) for stage in range(4)]
    stages += [dataclasses.replace(stages[3], offload_optimizer=True, offload_param=True), own]
    return {stage.name: stage for stage in stages}.values()


def _plan_stage(
    config: TrainConfig, cluster: Cluster, gpu: GpuKind | None, zero: ZeroSettings, work: Workload
) -> StagePlan:
    memory = predict_memory(
        config,
        zero,
        world_size=cluster.world_size,
        source_budget=work.source_budget,
        sentence_tokens=work.sentence_tokens,
        on_cpu=gpu is None,
    )
    return StagePlan(zero=zero, memory=memory, fits=memory.needed <= gpu.memory_gib * 2**30 if gpu else None)


def what_would_fit(plan: RunPlan) -> str | None:
    """Find the smallest change that makes the run fit: another stage, fewer packs at once, smaller packs, or all three.

    Returns:
        flags, or None if nothing helps.
    """
    for config in _smaller_batches(plan.config):
        batch, before = config.batch, plan.config.batch
        budget = plan.work.source_budget * batch.max_target_tokens // before.max_target_tokens
        work = dataclasses.replace(plan.work, source_budget=budget)
        stages = [_plan_stage(config, plan.cluster, plan.gpu, stage.zero, work) for stage in plan.stages]
        if fitting := [stage.zero for stage in stages if stage.fits]:
            flags = (
                f"--batch.packs-per-micro-batch {batch.packs_at_once} --batch.max-target-tokens "
                f"{batch.max_target_tokens} --batch.packs-per-step {batch.packs_per_step} "
            )
            name = f"zero{fitting[0].stage}{'_offload' if fitting[0].offload_optimizer else ''}"
            other = "" if plan.chosen.zero in fitting else f"--deepspeed-config ds_configs/{name}.json"
            return f"{'' if batch == before else flags}{other}".rstrip()
    return None


def _smaller_batches(config: TrainConfig) -> Iterator[TrainConfig]:
    """Yield the config, and others with the same tokens per step in smaller pieces."""
    yield config
    batch = config.batch
    while batch.packs_at_once > 1:
        batch = dataclasses.replace(batch, packs_per_micro_batch=batch.packs_at_once // 2)
        yield dataclasses.replace(config, batch=batch)
    while batch.max_target_tokens >= 2 * _SMALLEST_PACK:
        source = batch.max_source_tokens
        batch = dataclasses.replace(
            batch,
            max_target_tokens=batch.max_target_tokens // 2,
            max_source_tokens=source and source // 2,
            packs_per_step=batch.packs_per_step * 2,
        )
        yield dataclasses.replace(config, batch=batch)


@dataclass(frozen=True, slots=True)
class Comparison:
    """A row of the table that compares a run with its plan."""

    what: str
    unit: str
    predicted: float | None
    measured: float | None


def compare_run(run_dir: Path) -> tuple[RunPlan, list[Comparison]]:
    """Plan the settings of a run on its machines, and compare the plan with what the run measured.

    Raises:
        UserError: it is not a run folder, or it has no records of training yet.
    """
    settings = read_json(run_dir / SETTINGS_FILE)
    config = settings_of(settings, run_dir / SETTINGS_FILE)
    try:
        starts, records = read_environments(run_dir), read_records(run_dir, "train")
    except (OSError, ValueError) as error:
        raise UserError(f"{run_dir / METRICS_FILE} cannot be read ({error}): use a run folder") from None
    if not starts or not records:
        raise UserError(f"{run_dir} has not trained yet: use a run folder with log lines and environment.json")
    start, last = starts[-1], records[-1]
    gpus = start.get("gpus") or []
    kind = kind_of_device(str(gpus[0])) if gpus else CPU
    if kind is None:
        raise UserError(
            f"{run_dir} was trained on {gpus[0]!r}, which is not in the GPU table: use a run on a GPU that --gpu knows"
        )
    world, nodes = int(start.get("world_size", 1)), int(start.get("hosts", 1))
    work = assume_work(config, fill=median_high(record["fill"] for record in records))
    with suppress(UserError):
        # The data may be gone.
        work = look_at_work(config)
    plan = plan_run(config, Cluster(nodes=nodes, gpus=-(-world // nodes), gpu=kind), settings["deepspeed"], work)
    memory, step_time, steps = plan.chosen.memory, plan.step_time, config.max_steps
    speed = median_high(record["target_tokens_per_second"] for record in records)
    seconds, flops = last["train_seconds"] / last["step"], last["training_flops"] / last["step"]
    checkpoint = sum(file.stat().st_size for folder in checkpoints_of(run_dir)[:1] for file in folder.iterdir())
    planned_peak, peak = _mib(memory.peak), "peak memory, per rank"
    if kind == CPU:
        planned_peak, peak = None, f"{peak} (with libraries)"
    return plan, [
        Comparison("states between steps, per rank", "MiB", _mib(memory.resident), _mib(start.get("state_bytes"))),
        Comparison(peak, "MiB", planned_peak, _mib(last.get("peak_memory_bytes"))),
        Comparison("checkpoint", "MiB", _mib(plan.checkpoint_bytes), _mib(checkpoint or None)),
        Comparison("target tokens per second", "", plan.target_tokens_per_second, speed),
        Comparison("step time", "ms", 1000 * step_time.total if step_time else None, 1000 * seconds),
        Comparison("training FLOPs per step", "G", plan.training_flops / steps / 1e9, flops / 1e9),
        Comparison(f"all {steps:,} steps", "h", plan.hours, seconds * steps / 3600),
    ]


def _mib(count: int | None) -> float | None:
    return count and count / 2**20
