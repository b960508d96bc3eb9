"""Measurements of this machine and of a run folder, and the comparison of a run with its plan."""

import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import median_high

import numpy as np
import torch

from dist_transformer.base.errors import UserError
from dist_transformer.config.plain import read_json
from dist_transformer.cost.hardware import CPU, Cluster, kind_of_device
from dist_transformer.cost.memory import SENTENCE_TOKENS
from dist_transformer.data.vocabulary.tokenizer import BOS_ID, EOS_ID
from dist_transformer.model.packed import PackedBatch, PackedTokens, pack_side
from dist_transformer.model.transformer import Transformer
from dist_transformer.preflight.run_plan import RunPlan, assume_work, look_at_work, plan_run
from dist_transformer.run.environment import read_environments
from dist_transformer.run.folder import settings_of
from dist_transformer.run.layout import SETTINGS_FILE, Record, checkpoints_of, read_records
from dist_transformer.runtime.device import cores_of_rank, threads_are_given, threads_for

_MEASURED_SECONDS = 10.0


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
    starts, records = read_environments(run_dir), list[Record]()
    with suppress(FileNotFoundError):
        records = read_records(run_dir, "train")
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
    drawn, sizes = np.random.default_rng(1), (config.model.vocab_size, config.model.output_size)
    batch = pack_pairs(*(drawn.integers(EOS_ID + 1, size, (tokens // length, length - 1)).tolist() for size in sizes))
    spent, done, started = [0.0, 0.0], 0, time.monotonic()
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


def pack_pairs(sources: Sequence[Sequence[int]], targets: Sequence[Sequence[int]]) -> PackedBatch:
    """Pack pairs of ids without special tokens end to end, without dummy sentences."""

    def side(rows: list[list[int]]) -> PackedTokens:
        tokens, lengths = np.concatenate(rows), np.array([len(row) for row in rows])
        return pack_side(tokens, lengths, size=len(tokens), offset_count=len(rows) + 1, max_length=int(lengths.max()))

    return PackedBatch(
        source=side([[*source, EOS_ID] for source in sources]),
        target=side([[BOS_ID, *target] for target in targets]),
        labels_T=torch.tensor([i for target in targets for i in (*target, EOS_ID)]),
    )
