"""Breakdown of a training step on a GPU: time by kinds of kernels, launches, waits for the device, memory.

Unit: real target tokens (without padding) per second of wall time.
"""

import collections
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.measure import Measured, TrainingPart, say
from benchmarks.rows import STEP_ROW
from benchmarks.training.field import Field, graphs_compiled, open_field, product_rate, summary
from dist_transformer.base.errors import UserError
from dist_transformer.config.settings import TrainConfig
from dist_transformer.cost.memory import ZeroSettings, choose_compilation, predict_memory
from dist_transformer.data.folder.reader import DataFolder
from dist_transformer.runtime.process_group import process_group
from dist_transformer.runtime.world import World
from dist_transformer.training.engine.ds_config import load_ds_config

KINDS = {
    "attention": r"flash|fmha|attention|varlen",
    "matrix products": r"gemm|nvjet|cutlass|cublas|splitK|wgmma",
    "optimizer": r"multi_tensor_apply|adam|foreach",
    "copies": r"memcpy|memset|copy_device_to_device|direct_copy",
    "compiled": r"^triton",
    "softmax": r"softmax|SoftMax|logsumexp",
    "normalisation": r"layer_norm|LayerNorm|GammaBeta",
    "dropout": r"dropout|bernoulli",
    "embedding": r"embedding|index|gather|scatter|radix|sort",
    "sums": r"reduce",
    "elementwise": r"elementwise|fill|vectorized|unrolled",
}
"""Kinds of kernels with patterns of their names; the first match counts."""
_WARM_UP, _PROFILED = 3, 2
_WAITS = ("cudaDeviceSynchronize", "cudaStreamSynchronize", "cudaEventSynchronize")


@dataclass(frozen=True, kw_only=True, slots=True)
class StepBenchmark(TrainingPart):
    """A training step on a GPU taken apart: kernels, launches, waits, memory."""

    steps: int = 5
    """Optimizer steps per round."""
    rounds: int = 3
    """Rounds; medians are reported."""

    def measure(self) -> Measured:
        config = self.config()
        with process_group(World(), single=True) as device:
            figures = {"preset": self.preset, **run_step_benchmark(self, config, device)}
        return Measured(
            what="a training step taken apart: kinds of kernels, launches, waits, memory",
            figures=figures,
            table=step_table(figures),
            rows=[STEP_ROW],
            text=DataFolder.open(Path(self.data)).index,
            seeds=[config.seed],
        )


def run_step_benchmark(settings: StepBenchmark, config: TrainConfig, device: torch.device) -> dict[str, Any]:
    if device.type != "cuda":
        raise UserError("a step cannot be profiled here, because there is no GPU: run it on a machine with one")
    rate = product_rate(device)
    field = open_field(config, device)
    # Memory of the field, which keeps the initial weights of all contenders.
    held = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    contender = field.make("ours", "")
    started = time.monotonic()
    contender.train(_WARM_UP)
    warm, graphs = time.monotonic() - started, graphs_compiled()
    say(f"warm after {warm:.0f} s")
    timings = [contender.train(settings.steps) for _ in range(settings.rounds)]
    peak = torch.cuda.max_memory_allocated() - held
    profile = profile_steps(contender.train, _PROFILED)
    found = summary(timings, field.config, [rate])
    steps, seconds = sum(t.steps for t in timings), sum(t.seconds["wall"] for t in timings)
    return {
        "unit": "real target tokens per second",
        "precision": config.arithmetic,
        "way": "compiled" if choose_compilation(config, stage=_zero(config).stage)[0] else "not compiled",
        "packs_per_micro_batch": config.batch.packs_at_once,
        "product_flops_per_second": rate,
        "rates": found["wall_rates"],
        "tokens_per_step": found["tokens_per_step"],
        "milliseconds": 1e3 * seconds / steps,
        "share_of_product_rate": found["mfu"],
        "data_share": found["data_share"],
        "warm_up_seconds": warm,
        "graphs": graphs,
        "graphs_afterwards": graphs_compiled() - graphs,
        "peak_gib": peak / 2**30,
        "planned_gib": _planned(field) / 2**30,
        **profile,
    }


def _planned(field: Field) -> int:
    config, batch = field.config, field.config.batch
    budget = batch.max_source_tokens or batch.max_target_tokens
    return predict_memory(config, _zero(config), world_size=1, source_budget=budget).peak


def _zero(config: TrainConfig) -> ZeroSettings:
    return ZeroSettings.from_ds_config(load_ds_config(config.deepspeed_config))


def profile_steps(train: Callable[[int], object], steps: int) -> dict[str, Any]:
    """Profile steps. Figures are per step: milliseconds by kind of kernels, slowest kernels, launches and waits.

    Args:
        train: trains so many steps.
    """
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as recorded:
        train(steps)
    on_device = [e for e in recorded.events() or () if e.device_type == torch.autograd.DeviceType.CUDA]
    calls = collections.Counter(e.name for e in recorded.events() or ())
    kernels: dict[str, list[float]] = collections.defaultdict(list)
    for event in on_device:
        if not event.is_user_annotation:
            kernels[event.name].append(event.time_range.elapsed_us())
    total = {name: sum(times) / 1e3 / steps for name, times in kernels.items()}
    kinds: dict[str, float] = collections.defaultdict(float)
    for name, milliseconds in total.items():
        kinds[kind_of(name)] += milliseconds
    slowest = sorted(total, key=total.__getitem__, reverse=True)[:25]
    return {
        "kernel_milliseconds": sum(total.values()),
        "kinds": dict(sorted(kinds.items(), key=lambda item: -item[1])),
        "slowest": [
            {"name": name[:120], "milliseconds": total[name], "times": len(kernels[name]) / steps} for name in slowest
        ],
        "launches": sum(map(len, kernels.values())) / steps,
        # With two profiled steps, two of the waits per step belong to the benchmark's clock.
        "waits": {name: calls[name] / steps for name in _WAITS if calls[name]},
    }


def kind_of(kernel: str) -> str:
    return next((kind for kind, pattern in KINDS.items() if re.search(pattern, kernel, re.IGNORECASE)), "other")


def step_table(figures: dict[str, Any]) -> str:
    """Format the figures in lines of at most 80 characters."""
    kinds = "".join(f"\n    {kind:18} {ms:7.1f}" for kind, ms in figures["kinds"].items() if ms >= 0.05)
    return (
        f"{figures['rates']['median']:,.0f} target tokens/s, {figures['milliseconds']:.1f} ms per step of "
        f"{figures['tokens_per_step']:,.0f}\n"
        f"{figures['share_of_product_rate']:.1%} of a product's {figures['product_flops_per_second'] / 1e12:.0f} "
        f"TFLOP/s; data {figures['data_share']:.1%}\n"
        f"peak {figures['peak_gib']:.1f} GiB (planned {figures['planned_gib']:.1f}); {figures['graphs']} graphs, "
        f"{figures['graphs_afterwards']} more after {figures['warm_up_seconds']:.0f} s of warm-up\n"
        f"per step: {figures['launches']:,.0f} launches; waits for the device: {figures['waits'] or 'none'}\n"
        f"kernels, ms: {figures['kernel_milliseconds']:.1f}{kinds}"
    )
