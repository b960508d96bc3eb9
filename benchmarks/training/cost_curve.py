"""Time and memory of a step against model size, sentence length and tokens at once, and a model of many GPUs.

Each point is a separate process, which trains a model under plain torch on sentences of one length. The figures of many
GPUs come from a model, not a measurement: the measured step of one device, and the bytes that ZeRO-1 sends ÷ stated
link speeds (`cost.speed`).
"""

import dataclasses
import statistics
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.measure import Measure, answer, measure_apart, now, resident_mib
from benchmarks.training.contenders import PlainDriver
from dist_transformer.config.plain import from_plain, to_plain
from dist_transformer.config.settings import BatchConfig, ModelConfig, TrainConfig
from dist_transformer.cost.hardware import GPUS, kind_of_device
from dist_transformer.cost.memory import ModelSizes, ZeroSettings
from dist_transformer.cost.speed import communication_seconds
from dist_transformer.data.vocabulary.tokenizer import EOS_ID
from dist_transformer.model.packed import PackedBatch, pack_side
from dist_transformer.model.transformer import Transformer, training_flops
from dist_transformer.runtime.process_group import process_group
from dist_transformer.runtime.world import World

NODES, GPUS_PER_NODE = (1, 2, 4, 8, 16), 8
# Defaults for a device in no table: gigabytes per second in a node, gigabits per second between nodes.
_LINK, _NETWORK = 10.0, 25.0


@dataclass(frozen=True, kw_only=True, slots=True)
class CostPoint:
    model: ModelConfig
    tokens: int
    """Tokens of a micro-batch on each side."""
    sentence_tokens: int


@dataclass(frozen=True, kw_only=True, slots=True)
class CostCurve:
    """Points along three axes. One property varies along each axis; the other two are those of `base`."""

    base: CostPoint
    widths: tuple[int, ...]
    sentence_tokens: tuple[int, ...]
    tokens: tuple[int, ...]
    repeats: int

    def axes(self) -> dict[str, list[tuple[int, CostPoint]]]:
        base = self.base
        return {
            "width": [(width, dataclasses.replace(base, model=_of_width(base.model, width))) for width in self.widths],
            "sentence_tokens": [(n, dataclasses.replace(base, sentence_tokens=n)) for n in self.sentence_tokens],
            "tokens": [(n, dataclasses.replace(base, tokens=n)) for n in self.tokens],
        }


def curve_of(device: torch.device, *, repeats: int) -> CostCurve:
    """Choose points that take seconds each on this kind of device."""
    if device.type == "cuda":
        base = CostPoint(model=_of_width(ModelConfig(vocab_size=37_000), 1024), tokens=16_384, sentence_tokens=32)
        return CostCurve(
            base=base,
            widths=(256, 512, 1024, 1536),
            sentence_tokens=(8, 32, 128, 256),
            tokens=(2048, 8192, 16_384, 32_768),
            repeats=repeats,
        )
    small = ModelConfig(encoder_layers=2, decoder_layers=2, vocab_size=8000)
    return CostCurve(
        base=CostPoint(model=_of_width(small, 128), tokens=1024, sentence_tokens=32),
        widths=(64, 128, 256),
        sentence_tokens=(8, 32, 128),
        tokens=(256, 1024, 4096),
        repeats=repeats,
    )


def _of_width(model: ModelConfig, width: int) -> ModelConfig:
    return dataclasses.replace(model, width=width, heads=width // 64 or 1, ffn_width=4 * width)


def run_cost_curve(curve: CostCurve, device: torch.device, report: Callable[[str], None]) -> dict[str, Any]:
    """Measure all points, and return the figures. A point on several axes is measured once."""
    found: dict[CostPoint, dict[str, Any]] = {}
    axes: dict[str, list[dict[str, Any]]] = {}
    for axis, points in curve.axes().items():
        axes[axis] = []
        for value, point in points:
            if point not in found:
                found[point] = measure_point(point, repeats=curve.repeats)
                seconds = found[point]["step_seconds"]["median"]
                report(f"{axis} {value:,}: {seconds:.3f} s per step, {found[point]['peak_mib']:,.0f} MiB")
            axes[axis].append({axis: value, **found[point]})
    base = found.get(curve.base) or measure_point(curve.base, repeats=curve.repeats)
    return {
        "unit": "seconds" if device.type == "cuda" else "CPU seconds",
        "base": {
            "width": curve.base.model.width,
            "tokens": curve.base.tokens,
            "sentence_tokens": curve.base.sentence_tokens,
            **base,
        },
        "axes": axes,
        "modelled_scaling": model_scaling(base, device, target_tokens=curve.base.tokens),
    }


def measure_point(point: CostPoint, *, repeats: int) -> dict[str, Any]:
    """Measure `step_seconds`, `peak_mib`, `parameters`, `target_tokens_per_second` and `flops_per_second`."""
    request = {
        "model": to_plain(point.model),
        "tokens": point.tokens,
        "sentence_tokens": point.sentence_tokens,
        "repeats": repeats,
    }
    failure = f"a step of {point.tokens:,} tokens at width {point.model.width} cannot be measured"
    found = measure_apart(__name__, request, failure=failure, remedy="free memory on this machine")
    seconds = Measure(tuple(found.pop(f"seconds_{number}") for number in range(repeats)))
    flops = training_flops(point.model, source_tokens=point.tokens, target_tokens=point.tokens)
    return {
        "step_seconds": seconds.to_json(),
        "target_tokens_per_second": point.tokens / seconds.median,
        "flops_per_second": flops / seconds.median,
        **found,
    }


def model_scaling(base: dict[str, Any], device: torch.device, *, target_tokens: int) -> dict[str, Any]:
    """Model the scaling, without measuring it: `target_tokens` per rank and step, ZeRO-1, nothing overlapped."""
    kind = None
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        kind = kind_of_device(f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB")
    link, network = (GPUS[kind].link_gb_per_second, GPUS[kind].node_gbit) if kind else (_LINK, _NETWORK)
    rows, parameters = [], int(base["parameters"])
    for nodes in NODES:
        sent = communication_seconds(
            ZeroSettings(stage=1),
            sizes=ModelSizes(
                parameters=parameters, trained=parameters, persistent=0, persistent_tensors=0, constants=0
            ),
            gpus_per_node=GPUS_PER_NODE,
            nodes=nodes,
            link_gb_per_second=link,
            network_gbit=network,
            precision="bf16",
            accumulation=1,
        )
        step = base["step_seconds"]["median"] + sent
        gpus = nodes * GPUS_PER_NODE
        rows.append(
            {
                "nodes": nodes,
                "devices": gpus,
                "communication_seconds": sent,
                "target_tokens_per_second": gpus * target_tokens / step,
                "efficiency": base["step_seconds"]["median"] / step,
            }
        )
    return {
        "is": "a model, not a measurement: the measured step + bytes ÷ link + messages · latency, nothing overlapped",
        "link_gb_per_second": link,
        "network_gbit": network,
        "rows": rows,
    }


def _train_alone(request: dict[str, Any]) -> dict[str, float]:
    """Train at one point, and measure this process."""
    model_config = from_plain(ModelConfig, request["model"], "request")
    tokens, length = request["tokens"], request["sentence_tokens"]
    batch_config = BatchConfig(max_target_tokens=tokens, packs_per_step=1)
    config = TrainConfig.of(data=("none",), run_dir=Path("unused"), model=model_config, batch=batch_config)
    with process_group(World()) as device:
        before = resident_mib("VmRSS")
        torch.manual_seed(config.seed)
        driver = PlainDriver(Transformer(model_config).to(device), config, World())
        driver.module.train()
        batch = make_batch(tokens, length, vocabulary=model_config.vocab_size).to(device)

        def step() -> float:
            started = now(device)
            driver.forward_backward(batch, step_tokens=tokens)
            driver.end_micro_batch()
            return now(device) - started

        for _ in range(2):
            step()
        steps = max(1, round(0.5 / max(statistics.median(step() for _ in range(3)), 1e-4)))
        seconds = {
            f"seconds_{number}": sum(step() for _ in range(steps)) / steps for number in range(request["repeats"])
        }
        peak = torch.cuda.max_memory_allocated() / 2**20 if device.type == "cuda" else resident_mib("VmHWM") - before
        return {**seconds, "peak_mib": peak, "parameters": sum(p.numel() for p in driver.module.parameters())}


def make_batch(tokens: int, length: int, *, vocabulary: int) -> PackedBatch:
    """Make random sentences of one length that fill the buffers of both sides."""
    drawn = np.random.default_rng(1)
    lengths = np.full(tokens // length, length)
    sides = [
        pack_side(
            drawn.integers(EOS_ID + 1, vocabulary, lengths.sum()),
            lengths,
            size=int(lengths.sum()),
            offset_count=len(lengths) + 1,
            max_length=length,
        )
        for _ in range(2)
    ]
    labels = torch.from_numpy(drawn.integers(EOS_ID + 1, vocabulary, lengths.sum()))
    return PackedBatch(source=sides[0], target=sides[1], labels_T=labels)


def cost_table(figures: dict[str, Any]) -> str:
    """Format the measured and the modelled figures in lines of at most 80 characters."""
    lines = [f"one step, {figures['unit']} (lowest to highest), memory beyond the libraries'"]
    for axis, points in figures["axes"].items():
        for point in points:
            seconds = point["step_seconds"]
            spread = f"{seconds['lowest']:.4f}–{seconds['highest']:.4f}"
            label = f"{axis} {point[axis]:,}"
            lines.append(f"{label:24} {seconds['median']:8.4f} {spread:>17} {point['peak_mib']:8,.0f} MiB")
    scaling = figures["modelled_scaling"]
    lines += ["", *textwrap.wrap(f"scaling: {scaling['is']}", 80)]
    for row in scaling["rows"]:
        rate = f"{row['target_tokens_per_second']:,.0f} target tokens/s"
        lines.append(f"{row['nodes']:3} nodes x {GPUS_PER_NODE}: {rate:>32}, efficiency {row['efficiency']:.0%}")
    return "\n".join(lines)


if __name__ == "__main__":
    answer(_train_alone)
