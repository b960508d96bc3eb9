"""Measurements of a run folder, compared with the plan of the run."""

import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dist_transformer.base.errors import UserError
from dist_transformer.config.plain import read_json
from dist_transformer.config.settings import ModelConfig, TrainConfig
from dist_transformer.cost.hardware import CPU, Cluster, kind_of_device
from dist_transformer.cost.memory import SENTENCE_TOKENS
from dist_transformer.data.vocabulary.tokenizer import EOS_ID
from dist_transformer.model.packed import PackedBatch, pack_side
from dist_transformer.model.transformer import Transformer
from dist_transformer.preflight.plan import RunPlan, Workload, look_at_work
from dist_transformer.run.environment import read_environments
from dist_transformer.run.folder import settings_of
from dist_transformer.run.layout import SETTINGS_FILE, checkpoints_of, read_records
from dist_transformer.runtime.device import cores_of_rank, threads_are_given, threads_for

_MEASURED_SECONDS = 10.0


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredRun:
    config: TrainConfig
    ds_config: dict[str, Any]
    nodes: int
    ranks_per_node: int
    gpu: str
    """Name in the table of GPUs, or `cpu`."""
    machine: str
    steps: int
    train_seconds: float
    target_tokens_per_second: float
    fill: float
    training_flops: int
    """Operations of the steps so far."""
    state_bytes: int | None
    peak_bytes: int | None
    checkpoint_bytes: int | None
    """Size of the newest checkpoint, tensors and state."""

    def cluster(self, given: Cluster) -> Cluster:
        """Return the cluster where it ran, with the assumptions of `given`."""
        return Cluster(
            nodes=self.nodes,
            gpus=self.ranks_per_node,
            gpu=self.gpu,
            network_gbit=given.network_gbit,
            job_hours=given.job_hours,
            mfu=given.mfu,
        )

    def workload(self) -> Workload:
        """Return the workload of its data, or of the run's records if the data is no longer there."""
        with suppress(UserError):
            return look_at_work(self.config)
        batch = self.config.batch
        return Workload(
            vocab_sizes=self.config.model.vocab_sizes,
            source_budget=batch.max_source_tokens or batch.max_target_tokens,
            fill=self.fill,
            sentence_tokens=SENTENCE_TOKENS,
            assumed=True,
        )


def read_run(run_dir: Path) -> MeasuredRun:
    """Read the measurements of a run folder.

    Raises:
        UserError: it is not a run folder, or it has no records of training yet.
    """
    settings = read_json(run_dir / SETTINGS_FILE)
    config = settings_of(settings, run_dir / SETTINGS_FILE)
    starts, records = read_environments(run_dir), _train_records(run_dir)
    if not starts or not records:
        raise UserError(f"{run_dir} has not trained yet: use a run folder with log lines and environment.json")
    start, last = starts[-1], records[-1]
    gpus = start.get("gpus") or []
    kind = kind_of_device(str(gpus[0])) if gpus else CPU
    if kind is None:
        raise UserError(
            f"{run_dir} was trained on {gpus[0]!r}, which is not in the GPU table: use a run on a GPU that --gpu knows"
        )
    world, hosts = int(start.get("world_size", 1)), int(start.get("hosts", 1))
    return MeasuredRun(
        config=config,
        ds_config=settings["deepspeed"],
        nodes=hosts,
        ranks_per_node=-(-world // hosts),
        gpu=kind,
        machine=str(gpus[0]) if gpus else str(start.get("processor", "CPU")),
        steps=last["step"],
        train_seconds=last["train_seconds"],
        target_tokens_per_second=_median([record["target_tokens_per_second"] for record in records]),
        fill=_median([record["fill"] for record in records]),
        training_flops=last["training_flops"],
        state_bytes=start.get("state_bytes"),
        peak_bytes=last.get("peak_memory_bytes"),
        checkpoint_bytes=_newest_checkpoint(run_dir),
    )


def _train_records(run_dir: Path) -> list[dict[str, Any]]:
    try:
        return read_records(run_dir, "train")
    except (OSError, ValueError) as error:
        raise UserError(f"{run_dir / 'metrics.jsonl'} cannot be read ({error}): use a run folder") from None


def _median(values: list[float]) -> float:
    return sorted(values)[len(values) // 2]


def _newest_checkpoint(run_dir: Path) -> int | None:
    folders = checkpoints_of(run_dir)
    return sum(file.stat().st_size for file in folders[0].iterdir()) if folders else None


def measure_step(plan: RunPlan) -> float:
    """Train on random sentences for about ten seconds on CPU cores, with plain torch in fp32 and one process.

    Returns:
        seconds of one step: its micro-batches and an update.
    """
    config, length = plan.config, round(SENTENCE_TOKENS)
    optimizing = config.optimizer
    at_once = config.batch.packs_on_a_cpu(1, passes=optimizing.passes)
    tokens = max(length, at_once * config.batch.max_target_tokens)
    cores = cores_of_rank(1)
    if not threads_are_given():
        torch.set_num_threads(threads_for(width=config.model.width, tokens=optimizing.passes * tokens, cores=cores))
    model = Transformer(config.model).train()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    batch, spent, done = _random_batch(tokens, length, config.model), [0.0, 0.0], 0
    started = time.monotonic()
    while done < 2 or time.monotonic() - started < _MEASURED_SECONDS:
        begun = time.monotonic()
        (model(batch, optimizing.label_smoothing, optimizing.rdrop_alpha).loss / tokens).backward()
        computed = time.monotonic()
        optimizer.step()
        optimizer.zero_grad()
        if done:
            # The first one fills caches.
            spent = [spent[0] + computed - begun, spent[1] + time.monotonic() - computed]
        done += 1
    micro_batches = -(-config.batch.packs_per_step // at_once)
    return (micro_batches * spent[0] + spent[1]) / (done - 1)


def _random_batch(tokens: int, length: int, model: ModelConfig) -> PackedBatch:
    drawn = np.random.default_rng(1)
    lengths = np.full(tokens // length, length)
    count = int(lengths.sum())
    source, target = (drawn.integers(EOS_ID + 1, size, count) for size in (model.vocab_size, model.output_size))
    packed = [
        pack_side(ids, lengths, size=count, offset_count=len(lengths) + 1, max_length=length)
        for ids in (source, target)
    ]
    return PackedBatch(source=packed[0], target=packed[1], labels_T=torch.from_numpy(target))


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    what: str
    unit: str
    predicted: float | None
    measured: float | None


def compare(plan: RunPlan, run: MeasuredRun) -> Iterator[Comparison]:
    mib = 2**20
    yield Comparison(
        what="states between steps, per rank",
        unit="MiB",
        predicted=plan.chosen.memory.resident / mib,
        measured=run.state_bytes and run.state_bytes / mib,
    )
    yield Comparison(
        what="peak memory, per rank" + (" (with libraries)" if run.gpu == CPU else ""),
        unit="MiB",
        predicted=None if run.gpu == CPU else plan.chosen.memory.peak / mib,
        measured=run.peak_bytes and run.peak_bytes / mib,
    )
    yield Comparison(
        what="checkpoint",
        unit="MiB",
        predicted=plan.checkpoint_bytes / mib,
        measured=run.checkpoint_bytes and run.checkpoint_bytes / mib,
    )
    yield Comparison(
        what="target tokens per second",
        unit="",
        predicted=plan.target_tokens_per_second,
        measured=run.target_tokens_per_second,
    )
    yield Comparison(
        what="step time",
        unit="ms",
        predicted=1000 * plan.step_time.total if plan.step_time else None,
        measured=1000 * run.train_seconds / run.steps,
    )
    yield Comparison(
        what="training FLOPs per step",
        unit="G",
        predicted=plan.training_flops / plan.config.max_steps / 1e9,
        measured=run.training_flops / run.steps / 1e9,
    )
    hours = run.train_seconds / run.steps * run.config.max_steps / 3600
    yield Comparison(what=f"all {run.config.max_steps:,} steps", unit="h", predicted=plan.hours, measured=hours)
