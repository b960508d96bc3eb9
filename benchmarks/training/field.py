"""Benchmark of training: our engine, its controls and peers, in one process, on the same text, in turns.

Unit: real target tokens (without padding) per second. On a CPU these are seconds of the process' CPU time, which other
work on the machine changes only a little. On a GPU they are seconds of wall time.
"""

import dataclasses
import itertools
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch

from benchmarks.measure import (
    Measure,
    answer,
    check_counts,
    measure_apart,
    now,
    resident_mib,
    who_can_run,
)
from benchmarks.training.contenders import Contender, Timing, own_contenders
from benchmarks.training.peers import peer_contenders
from benchmarks.training.text import TextSample
from dist_transformer.base.errors import UserError
from dist_transformer.config.plain import from_plain, to_plain
from dist_transformer.config.settings import TrainConfig
from dist_transformer.data.loading.loader import TrainingData, open_training_data
from dist_transformer.model.transformer import Transformer, training_flops
from dist_transformer.runtime.process_group import process_group
from dist_transformer.runtime.world import World
from dist_transformer.training.engine.ds_config import load_ds_config

LABELS = {
    "ours": "ours: packs, DeepSpeed ZeRO-1",
    "stock": "ours, DeepSpeed's own defaults",
    "plain": "ours, plain torch (native DDP)",
    "torch": "P1 torch.nn.Transformer, buckets",
    "trainer": "P2 HF MarianMTModel, Trainer, by length",
    "compiled": "P3 HF MarianMTModel, compiled, buckets",
}
"""Contenders, in the order of the table."""
SHARED = ("ours", "stock", "plain")
"""Contenders that can train on several ranks."""
NEEDS = {
    "ours": ("deepspeed",),
    "stock": ("deepspeed",),
    "plain": (),
    "torch": (),
    "trainer": ("transformers", "accelerate", "datasets"),
    "compiled": ("transformers",),
}
"""Packages that a contender needs, besides those that all need."""
_SAMPLE_PAIRS = 20_000
_VALID_PAIRS = 100
# Largest relative differences between the losses of the same model on the same text, from the same weights.
START_TOLERANCE, END_TOLERANCE = 0.01, 0.05

# Steps of ours whose mean number of target tokens is that of a peer's step.
_COUNTED_STEPS = 200
_TRIED_STEPS = 6

Report = Callable[[str], None]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class TrainBenchmark:
    config: TrainConfig
    """Model, batch, optimizer and precision; `data` names the data folder."""
    peers: tuple[str, ...]
    """Names in `LABELS`. Ours is always measured; without DeepSpeed, plain torch trains our model instead."""
    steps: int
    """Optimizer steps per contender and round."""
    rounds: int
    warm_up: int = 4
    """Steps that are not counted. Peers' batches come in fours, after each of which the mean is that of all."""

    def __post_init__(self) -> None:
        check_counts(self, steps=1, rounds=1, warm_up=1)
        for peer in self.peers:
            if peer not in LABELS:
                raise UserError(f"--peers {peer} is unknown: choose among {', '.join(LABELS)}")


@dataclasses.dataclass(frozen=True, slots=True)
class Field:
    """Factories of the contenders, and the settings and text that all of them use."""

    factories: dict[str, dict[str, Callable[[], Contender]]]
    """Variants of each contender."""
    config: TrainConfig
    sample: TextSample
    valid: TextSample
    device: torch.device

    def pick(self, names: Sequence[str], variants: Mapping[str, str] = MappingProxyType({})) -> dict[str, Contender]:
        """Make contenders, in the given variants or their first ones."""
        return {name: self.make(name, variants.get(name)) for name in LABELS if name in names}

    def make(self, name: str, variant: str | None = None) -> Contender:
        factories = self.factories[name]
        return factories[next(iter(factories)) if variant is None else variant]()


def open_field(config: TrainConfig, world: World, device: torch.device) -> Field:
    """Read the text and draw the initial weights of all contenders."""
    data: TrainingData = open_training_data(config.corpora, config.batch, seed=config.seed)
    index, split = data.first.index, data.first.train
    config = dataclasses.replace(config, model=config.model.for_vocabularies(*index.vocab_sizes))
    torch.manual_seed(config.seed)
    model = Transformer(config.model).to(device)
    longest = min(config.model.max_positions, *data.budgets.tokens.tolist())
    sample = TextSample(split, pairs=_SAMPLE_PAIRS, longest=longest, seed=config.seed)
    valid = TextSample(data.first.valid, pairs=_VALID_PAIRS, longest=longest, seed=config.seed)
    ds_configs = {"ours": load_ds_config(config.deepspeed_config), "stock": {"zero_optimization": {"stage": 1}}}
    own = {name: {"": make} for name, make in own_contenders(model, data, config, ds_configs, world).items()}
    steps = itertools.islice(data.plan.steps(data.plan.start(), config.batch.packs_per_step), _COUNTED_STEPS)
    step_tokens = statistics.mean(step.target_tokens for step in steps)
    factories = own | peer_contenders(model, sample, config, step_tokens=step_tokens)
    return Field(factories, config, sample, valid, device)


def run_training_benchmark(
    settings: TrainBenchmark, world: World, device: torch.device, report: Report
) -> dict[str, Any]:
    """Measure everything and return the figures.

    Collective: every rank must call it.
    """
    field = open_field(settings.config, world, device)
    names = choose(settings.peers, report)
    first = names[0]
    if world.size > 1 and (alone := [name for name in names if name not in SHARED]):
        raise UserError(f"--peers {' '.join(alone)} train on one process: start it without a launcher")
    trials = {name: try_variants(field, name, settings.warm_up, report) for name in names if name not in SHARED}
    variants = {name: max(rates, key=rates.__getitem__) for name, rates in trials.items()}
    # First measure the memory of each contender alone, so that one that does not fit stops the benchmark early.
    memory = peak_memories(settings.config, names, variants, report) if world.size == 1 else {}
    started = time.monotonic()
    contenders = field.pick(names, variants)
    curves = {name: [contender.nll(field.valid)] for name, contender in contenders.items()}
    for name, contender in contenders.items():
        contender.train(settings.warm_up)
        report(f"{LABELS[name]}: warm after {time.monotonic() - started:.0f} s")
    compiled_before = graphs_compiled()
    timings: dict[str, list[Timing]] = {name: [] for name in names}
    products: list[float] = []
    for number in range(settings.rounds):
        # Every second round runs in reverse order, so that a machine that slows down or warms up favours no contender.
        for name in names if number % 2 == 0 else reversed(names):
            timings[name].append(contenders[name].train(settings.steps))
        products.append(product_rate(device))
        for name, contender in contenders.items():
            curves[name].append(contender.nll(field.valid))
        report(f"round {number + 1} of {settings.rounds}")
    figures = {name: summary(timings[name], field, products) for name in names}
    for name, found in figures.items():
        found["nll"] = curves[name]
        if name in trials:
            found["variant"], found["trials"] = variants[name], trials[name]
        if name in memory:
            found["peak_gib"] = memory[name]
        pairs = zip(figures[first]["rates"]["values"], found["rates"]["values"], strict=True)
        found["ours_to_this"] = Measure(tuple(ours / theirs for ours, theirs in pairs)).to_json()
    return {
        "unit": "real target tokens per CPU second" if device.type == "cpu" else "real target tokens per second",
        "parameters": sum(p.numel() for p in Transformer(field.config.model).parameters()),
        "precision": settings.config.arithmetic,
        "world_size": world.size,
        "steps_per_round": settings.steps,
        "rounds": settings.rounds,
        "tokens_per_step": settings.config.batch.max_target_tokens * settings.config.batch.packs_per_step,
        "product_flops_per_second": Measure(tuple(products)).to_json(),
        "graphs_compiled_in_rounds": graphs_compiled() - compiled_before,
        "loss_curves_agree": curves_agree(curves),
        **({"fastest_marian": fastest} if (fastest := fastest_marian(figures)) else {}),
        "contenders": figures,
    }


def fastest_marian(figures: dict[str, Any]) -> dict[str, Any] | None:
    """Find the faster one of Hugging Face's two contenders, and our rate relative to it; None if neither ran."""
    rates = {name: figures[name]["rates"]["median"] for name in ("trainer", "compiled") if name in figures}
    if not rates:
        return None
    name = max(rates, key=rates.__getitem__)
    return {"name": name, "ours_to_this": figures[name]["ours_to_this"]["median"]}


def choose(peers: Sequence[str], report: Report) -> list[str]:
    """List the contenders that this machine can measure. The first one is compared with the others."""
    wanted = {LABELS[name]: NEEDS[name] for name in LABELS if name in ("ours", *peers)}
    able = who_can_run(wanted, report)
    names = [name for name in LABELS if LABELS[name] in able]
    return names if "ours" in names else ["plain", *(name for name in names if name != "plain")]


def summary(timings: Sequence[Timing], field: Field, products: Sequence[float]) -> dict[str, Any]:
    """Compute rates and shares of one contender."""
    total = {name: sum(timing.seconds[name] for timing in timings) for name in timings[0].seconds}
    source, target = (sum(getattr(s, f"{side}_tokens") for s in timings) for side in ("source", "target"))
    flops = training_flops(field.config.model, source_tokens=source, target_tokens=target)
    return {
        "rates": Measure(tuple(s.target_tokens / s.seconds["clock"] for s in timings)).to_json(),
        "wall_rates": Measure(tuple(s.target_tokens / s.seconds["wall"] for s in timings)).to_json(),
        "tokens_per_step": target / sum(s.steps for s in timings),
        "fill": (source + target) / sum(s.computed_tokens for s in timings),
        "mfu": flops / total["clock"] / statistics.median(products),
        "data_share": total["data"] / total["wall"],
        "optimizer_share": total["optimizer"] / total["wall"],
    }


def train_table(figures: dict[str, Any]) -> str:
    """Format the figures in lines of at most 80 characters."""
    contenders = figures["contenders"]
    lines = [
        f"{figures['unit']}, medians of {figures['rounds']} rounds (lowest to highest)",
        f"{'':32} {'rate':>8} {'':>15} {'ours is':>8} {'MFU':>5} {'fill':>5}",
    ]
    for name, found in contenders.items():
        rate, times = found["rates"], found["ours_to_this"]["median"]
        spread = f"{rate['lowest']:,.0f}–{rate['highest']:,.0f}"
        lines.append(
            f"{LABELS[name]:32} {rate['median']:8,.0f} {spread:>15} {times:7.2f}× {found['mfu']:5.1%} "
            f"{found['fill']:5.1%}"
        )
    lines += ["", f"{'':32} {'memory':>9} {'data':>6} {'update':>7} {'loss, first and last':>20}"]
    for name, found in contenders.items():
        memory = f"{found['peak_gib']:5.2f} GiB" if "peak_gib" in found else ""
        lines.append(
            f"{LABELS[name]:32} {memory:>9} {found['data_share']:6.1%} {found['optimizer_share']:7.1%} "
            f"{found['nll'][0]:12.3f} {found['nll'][-1]:7.3f}"
        )
    product = figures["product_flops_per_second"]["median"]
    return "\n".join(
        [
            *lines,
            "",
            f"MFU against a bf16 matrix product in the same run: {product / 1e12:.2f} TFLOP/s",
            f"{figures['graphs_compiled_in_rounds']} graphs compiled in the rounds",
            *(
                f"{LABELS[name]}: {found['variant'] or 'as it is'}, the fastest of {len(found['trials'])} variants"
                for name, found in contenders.items()
                if "variant" in found
            ),
        ]
    )


def curves_agree(curves: dict[str, list[float]]) -> bool:
    """Check that all contenders start with the loss of the first one, and end near its last loss."""
    ours = next(iter(curves.values()))
    return all(
        abs(curve[0] / ours[0] - 1) <= START_TOLERANCE and abs(curve[-1] / ours[-1] - 1) <= END_TOLERANCE
        for curve in curves.values()
    )


def product_rate(device: torch.device, *, seconds: float = 0.5) -> float:
    """Measure the FLOP/s of a bf16 matrix product of a feed-forward layer's size, by the benchmarks' clock."""
    rows, width, inner = (8192, 4096, 4096) if device.type == "cuda" else (4096, 512, 2048)
    a = torch.randn(rows, width, device=device, dtype=torch.bfloat16)
    b = torch.randn(inner, width, device=device, dtype=torch.bfloat16)

    a @ b.t()
    started, done = now(device), 0
    while now(device) - started < seconds:
        for _ in range(5):
            a @ b.t()
        done += 5
    return done * 2 * rows * width * inner / (now(device) - started)


def graphs_compiled() -> int:
    """Count the graphs that torch.compile has compiled in this process so far."""
    from torch._dynamo.utils import counters

    return int(counters["stats"]["unique_graphs"])


def try_variants(field: Field, name: str, warm_up: int, report: Report) -> dict[str, float]:
    """Measure each variant of a peer for a few steps: only the fastest one takes part."""
    rates = {}
    for variant in field.factories[name]:
        contender = field.make(name, variant)
        contender.train(warm_up)
        timing = contender.train(_TRIED_STEPS)
        rates[variant] = timing.target_tokens / timing.seconds["clock"]
        report(f"{LABELS[name]}, {variant}: {rates[variant]:,.0f} target tokens per second")
    return rates


def peak_memories(
    config: TrainConfig, names: Sequence[str], variants: Mapping[str, str], report: Report
) -> dict[str, float]:
    """Measure the peak GiB of each contender in a separate process, beyond its memory before the model was made.

    The figure is resident memory on a CPU and allocated memory on a GPU.
    """
    memory = {}
    for name in names:
        report(f"memory of {LABELS[name]}")
        request = {"config": to_plain(config), "name": name, "variant": variants.get(name), "steps": 2}
        failure = f"{LABELS[name]} could not be measured alone"
        memory[name] = measure_apart(__name__, request, failure=failure, remedy="leave it out of --peers")["peak_gib"]
    return memory


def _train_alone(request: dict[str, Any]) -> dict[str, float]:
    with process_group(World(), single=True) as device:
        field = open_field(from_plain(TrainConfig, request["config"], "request"), World(), device)
        before = resident_mib("VmRSS")
        contender = field.make(request["name"], request["variant"])
        contender.train(request["steps"])
        if device.type == "cuda":
            return {"peak_gib": torch.cuda.max_memory_allocated() / 2**30}
        return {"peak_gib": (resident_mib("VmHWM") - before) / 1024}


if __name__ == "__main__":
    answer(_train_alone)
