"""Predict what a training run needs: memory by ZeRO stage, time, jobs, disk and epochs, before anything is queued.

dist-transformer plan --preset big --nodes 2 --gpus 8 --gpu h100
dist-transformer plan --against runs/mine

Takes the flags of training. Memory follows from what DeepSpeed allocates. Speed comes from a model, not a measurement:
a given share of the GPU's peak (--mfu), and the launches of kernels. For a CPU no speed is predicted; --measure trains
for about ten seconds on those of this machine. --against compares the measurements of a run folder with the predictions
for its settings and machine. The exit status is 1 if the run would not fit.
"""

import dataclasses
import json
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from dist_transformer.base.errors import UserError, say
from dist_transformer.base.files import write_file
from dist_transformer.config.command_line import Page
from dist_transformer.config.flags import Start, default_of, read_training
from dist_transformer.config.schema import FLAT, settings_of
from dist_transformer.config.settings import EMBEDDED_CORPUS, TrainConfig
from dist_transformer.config.stated import refuse_without_effect
from dist_transformer.cost.hardware import ENOUGH, LINK_LATENCY, NETWORK_LATENCY, Cluster, GpuKind
from dist_transformer.data.vocabulary.tokenizer import show_sizes
from dist_transformer.run.outputs import claim_file

if TYPE_CHECKING:
    from dist_transformer.preflight.measured import Comparison
    from dist_transformer.preflight.plan import RunPlan

_GIB = 2**30


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanSettings:
    """Comparisons, and the file for the plan."""

    start: Annotated[Start, FLAT] = field(default_factory=Start)
    cluster: Annotated[Cluster, FLAT] = field(default_factory=Cluster)
    measure: bool = False
    """Train for about ten seconds on this machine's CPU cores, to report its speed beside the prediction."""
    against: Path | None = None
    """Run folder: plan its settings on its machine, and compare with what it measured."""
    json: Path | None = None
    """File for the plan as JSON."""
    train: Annotated[TrainConfig, FLAT]


def main() -> None:
    settings = parse_arguments()

    from dist_transformer.preflight.measured import compare, measure_step, read_run
    from dist_transformer.preflight.plan import plan_run
    from dist_transformer.training.assembly import cautions
    from dist_transformer.training.engine.ds_config import load_ds_config

    config, cluster = settings.train, settings.cluster
    inputs = (*config.corpora.data, config.deepspeed_config, config.checkpoints.init_from, settings.against)
    claim_file(settings.json, "--json", inputs)
    comparisons: list[Comparison] = []
    here, seconds = list[str](), None
    if settings.against is None:
        plan = plan_run(config, cluster, load_ds_config(config.deepspeed_config))
        seconds = measure_step(plan) if settings.measure else None
        here = speed_here(plan, seconds)
    else:
        run = read_run(settings.against)
        plan = plan_run(run.config, run.cluster(cluster), run.ds_config, run.workload())
        comparisons = list(compare(plan, run))
    say("\n".join((*describe(plan), *memory_table(plan), *speed_and_run(plan, here), *comparison_table(comparisons))))
    for caution in cautions(plan.config, epochs=plan.epochs, target_tokens=plan.work.corpus_target_tokens):
        say(f"warning: {caution}", file=sys.stderr)
    if settings.json is not None:
        write_json(settings.json, plan, comparisons, seconds)
    refuse_what_does_not_fit(plan)


def parse_arguments(words: Sequence[str] | None = None) -> PlanSettings:
    own = [each.name for each in settings_of(Cluster)] + ["measure", "against", "json"]
    page = Page(text=__doc__, common=["preset", *own, "data", "max_steps", "batch.target_tokens_per_step"])
    stated = read_training(settings_of(PlanSettings), sys.argv[1:] if words is None else words, page)
    if stated.values.get("against") is not None and stated.values.keys() - {"against", "json"}:
        raise UserError("--against takes settings and machine from the run: pass no flag with it except --json")
    default = PlanSettings(train=default_of(stated).changed(data=EMBEDDED_CORPUS))
    settings = stated.build(PlanSettings, default)
    refuse_without_effect(stated.written, settings.train)
    return settings


def describe(plan: "RunPlan") -> Iterator[str]:
    config, cluster, work = plan.config, plan.cluster, plan.work
    batch = config.batch
    known = "assumed: pass --data" if work.assumed else "of the data"
    device = "CPU process" if plan.gpu is None else cluster.gpu
    yield f"model     {plan.parameters:,} parameters with {show_sizes(work.vocab_sizes)} words, {config.arithmetic}"
    yield f"machine   {cluster.nodes} node(s) with {cluster.gpus} x {device}, {plan.chosen.zero.name}"
    yield (
        f"a step    {batch.packs_per_step} packs of {work.source_budget:,} source and {batch.max_target_tokens:,} "
        f"target tokens, {work.fill:.1%} full"
    )
    yield (
        f"          {plan.target_tokens_per_step:,.0f} target tokens; each rank computes {plan.accumulation} x "
        f"{batch.packs_at_once} pack(s)"
    )
    yield f"text      vocabulary, source budget and fill {known}"


def memory_table(plan: "RunPlan") -> Iterator[str]:
    unit, name = (_GIB, "GiB") if plan.chosen.memory.peak > 2 * _GIB else (2**20, "MiB")
    of = f" of {plan.gpu.memory_gib * _GIB / unit:,.0f}" if plan.gpu else ""
    columns = ("weights", "optimizer", "gradients", "activations", "loss", "buffers", f"needed{of}", "host")
    widths = [max(len(column), 7) + 2 for column in columns]
    yield ""
    yield f"memory of one rank, {name}"
    yield " " * 16 + "".join(f"{column:>{width}}" for column, width in zip(columns, widths, strict=True))
    for stage in plan.stages:
        of_rank = stage.memory
        values = (
            *(of_rank.weights, of_rank.masters + of_rank.moments, of_rank.gradients, of_rank.activations),
            *(of_rank.loss, of_rank.buffers, of_rank.needed, of_rank.host),
        )
        digits = 2 if unit == _GIB else 0
        cells = "".join(f"{value / unit:>{width},.{digits}f}" for value, width in zip(values, widths, strict=True))
        verdict = {None: "", True: "  fits", False: "  too large"}[stage.fits]
        yield f"{'>' if stage is plan.chosen else ' '} {stage.zero.name:14}{cells}{verdict}"
    yield "needed: the peak, 5% for gaps and 1.5 GiB for CUDA and libraries; >: the run's own setting"


def speed_here(plan: "RunPlan", seconds: float | None) -> list[str]:
    """Describe the speed of this machine: nothing if it has a GPU and its CPU cores were not measured.

    Args:
        seconds: measured time of a step; None if it was not measured.
    """

    import torch

    cores = len(os.sched_getaffinity(0))
    where = f"here      this machine, {cores} CPU core(s): "
    if seconds is not None:
        rate, hours = plan.target_tokens_per_step / seconds, plan.config.max_steps * seconds / 3600
        return [f"{where}{rate:,.0f} target tokens/s, MEASURED in one process; all steps {hours:,.1f} h"]
    return [] if torch.cuda.is_available() else [f"{where}not measured: add --measure"]


def speed_and_run(plan: "RunPlan", here: list[str]) -> Iterator[str]:
    """Describe speed, duration and disk, after the lines on the speed of this machine."""
    yield ""
    yield from here
    cluster, time = plan.cluster, plan.step_time
    if plan.gpu is None:
        yield "speed     no prediction for a CPU: train some steps, then measure with --against"
    elif time is None:
        yield "speed     no prediction with offload, because hosts differ"
    else:
        peak = plan.gpu.bf16_tflops if plan.config.arithmetic == "bf16" else plan.gpu.fp32_tflops
        yield (
            f"speed     {cluster.gpu}: {plan.target_tokens_per_second:,.0f} target tokens/s: a MODEL, not a "
            f"measurement (--mfu {cluster.mfu:g} of {peak:g} TFLOP/s)"
        )
        yield (
            f"          a step {1000 * time.total:,.1f} ms: operations {1000 * time.compute:,.1f}, update "
            f"{1000 * time.update:,.1f}, communication {1000 * time.communication:,.1f}"
        )
        if time.launches > time.compute + time.update:
            yield (
                f"          limited by the launches of its kernels, {1000 * time.launches:,.1f} ms on the host: larger "
                "steps are faster"
            )
        if cluster.world_size > 1:
            yield from basis_of_communication(plan, plan.gpu)
            yield from best_nodes(plan)
    yield f"run       {plan.config.max_steps:,} steps, {plan.training_flops:.2e} FLOPs"
    if plan.hours is not None and plan.jobs is not None and cluster.is_one_gpu:
        yield f"          {plan.hours:,.1f} h on one {cluster.gpu}, without validation and saving"
    elif plan.hours is not None and plan.jobs is not None:
        jobs = f"{plan.jobs} job{'s' * (plan.jobs > 1)} of {cluster.job_hours:g} h, {plan.jobs - 1} requeue(s)"
        yield f"          {plan.hours:,.1f} h, without validation and saving: {jobs}"
    if plan.epochs is not None:
        yield f"          {plan.epochs:,.1f} epochs of {plan.work.corpus_target_tokens:,} target tokens"
    checkpoint, weights = plan.checkpoint_bytes / _GIB, plan.weights_bytes / _GIB
    yield (
        f"disk      {plan.disk_bytes / _GIB:,.2f} GiB at most: a checkpoint {checkpoint:,.2f}, a weight file "
        f"{weights:,.2f}"
    )


def basis_of_communication(plan: "RunPlan", gpu: GpuKind) -> Iterator[str]:
    """Describe the assumptions behind the communication time."""
    network = plan.cluster.network_gbit or gpu.node_gbit
    between = f"{network:g} Gbit/s and {1e6 * NETWORK_LATENCY:g} µs between nodes, " if plan.cluster.nodes > 1 else ""
    within = f"{gpu.link_gb_per_second:g} GB/s and {1e6 * LINK_LATENCY:g} µs in a node"
    yield f"          rings over {between}{within}; no overlap"
    yield "          checked on slow links of known rates with gloo, not with NCCL on GPUs: docs/planning.md"


def best_nodes(plan: "RunPlan") -> Iterator[str]:
    """Name the best number of nodes, and the stage that suits it if it fits."""
    assert plan.best is not None
    rate = plan.target_tokens_per_step / plan.best.seconds[plan.best.nodes]
    faster = f"no other number is more than {1 / ENOUGH - 1:.0%} faster"
    yield f"best      {plan.best.nodes} node(s): {rate:,.0f} target tokens/s; {faster}"
    stage = next(stage for stage in plan.stages if stage.zero.stage == plan.best.stage)
    if stage.fits:
        why = (
            "each rank has one micro-batch per step and sends gradients meanwhile (not counted here)"
            if plan.best.stage == 2
            else "each rank has several micro-batches per step and sends gradients once"
        )
        yield f"          {stage.zero.name}: {why}"


def comparison_table(comparisons: "list[Comparison]") -> Iterator[str]:
    if not comparisons:
        return
    yield ""
    yield f"{'':40}{'predicted':>14}{'measured':>14}{'predicted ÷ measured':>23}"
    for row in comparisons:
        name = f"{row.what}{f', {row.unit}' if row.unit else ''}"
        ratio = f"{row.predicted / row.measured:.2f}" if row.predicted and row.measured else "—"
        yield f"{name:40}{shown(row.predicted):>14}{shown(row.measured):>14}{ratio:>23}"


def shown(value: float | None) -> str:
    if value is None:
        return "—"
    return f"{value:,.0f}" if value >= 100 else f"{value:,.2f}"


def write_json(path: Path, plan: "RunPlan", comparisons: "list[Comparison]", here_seconds: float | None) -> None:
    figures = ("parameters", "target_tokens_per_step", "target_tokens_per_second", "hours", "jobs", "epochs")
    values: dict[str, Any] = {
        "cluster": dataclasses.asdict(plan.cluster),
        "workload": dataclasses.asdict(plan.work),
        "zero_stage": plan.chosen.zero.stage,
        "stages": [
            {"name": stage.zero.name, "fits": stage.fits, "needed": stage.memory.needed, "peak": stage.memory.peak}
            | dataclasses.asdict(stage.memory)
            for stage in plan.stages
        ],
        "speed_is": "a model, not a measurement",
        "step_seconds": plan.step_time and dataclasses.asdict(plan.step_time) | {"total": plan.step_time.total},
        "measured_here_step_seconds": here_seconds,
        "best": plan.best and dataclasses.asdict(plan.best),
        **{name: getattr(plan, name) for name in (*figures, "training_flops", "disk_bytes")},
        "comparison": [dataclasses.asdict(row) for row in comparisons],
    }
    try:
        write_file(path, json.dumps(values, indent=1) + "\n")
    except OSError as error:
        raise UserError(f"{path} cannot be written ({error.strerror}): choose another --json") from None


def refuse_what_does_not_fit(plan: "RunPlan") -> None:
    from dist_transformer.preflight.plan import what_would_fit

    if plan.chosen.fits is not False:
        return
    remedy, stage = what_would_fit(plan), plan.chosen
    train = (
        f"train with {remedy}" if remedy else "no setting makes it fit: use a GPU with more memory, or a smaller model"
    )
    needed = f"{stage.zero.name} needs {stage.memory.needed / _GIB:.1f} GiB per GPU"
    raise UserError(f"the run does not fit: {needed}; {train}")
