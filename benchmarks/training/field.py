"""Benchmark of training: our engine, its controls and peers, in one process, on the same text, in turns.

Unit: real target tokens (without padding) per second. On a CPU these are seconds of the process' CPU time, which other
work on the machine changes only a little. On a GPU they are seconds of wall time.
"""

import dataclasses
import itertools
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.measure import (
    Measured,
    TrainingPart,
    columns,
    measure_apart,
    missing_packages,
    now,
    require_known,
    resident_mib,
    say,
    spread,
)
from benchmarks.rows import train_row
from benchmarks.training.contenders import PackedContender, PlainDriver, Timing, copy_of
from benchmarks.training.peers import PaddedContender, TrainerContender, make_peer, peer_variants
from benchmarks.training.text import TextSample
from dist_transformer.base.errors import UserError
from dist_transformer.config.plain import from_plain, to_plain
from dist_transformer.config.settings import TrainConfig
from dist_transformer.data.folder.reader import DataFolder
from dist_transformer.data.loading.loader import TrainingData, open_training_data
from dist_transformer.model.transformer import Transformer, training_flops
from dist_transformer.runtime.process_group import process_group
from dist_transformer.runtime.world import World, read_world
from dist_transformer.training.engine.deepspeed_engine import Engine
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
# Steps that are not counted. Peers' batches come in fours, after each of which the mean is that of all.
_WARM_UP = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainBenchmark(TrainingPart):
    """Training steps, compared with torch.nn.Transformer, MarianMTModel and plain torch."""

    peers: tuple[str, ...] = tuple(LABELS)
    """Contenders: ours; stock, under DeepSpeed's own defaults; plain, under plain torch; torch, `torch.nn.Transformer`;
    trainer, MarianMTModel under the Trainer; compiled, MarianMTModel compiled. Ours always takes part, or without
    DeepSpeed our model under plain torch."""
    steps: int = 10
    """Optimizer steps of each contender per round."""
    rounds: int = 6
    """Rounds; medians are reported."""

    def measure(self) -> Measured | None:
        require_known("--peers", self.peers, LABELS)
        config, world = self.config(), read_world()
        with process_group(world, single=True) as device:
            figures = {"preset": self.preset, **run_training_benchmark(self, config, world, device)}
        if not world.is_main:
            return None
        flaw = "the losses of the contenders differ: they did not do the same work (see nll in --json)"
        return Measured(
            what=f"training compared with peers, in turns; {figures['unit']}; medians of rounds",
            figures=figures,
            table=train_table(figures),
            rows=[train_row([*figures["contenders"]], gpu=device.type == "cuda")],
            text=DataFolder.open(Path(self.data)).index,
            seeds=[config.seed],
            flaw=None if figures["loss_curves_agree"] else flaw,
        )


Contender = PackedContender | PaddedContender | TrainerContender


@dataclass(frozen=True, kw_only=True, slots=True)
class Field:
    """Weights, settings and text that all contenders start with."""

    config: TrainConfig
    model: Transformer
    """Initial weights of all contenders."""
    data: TrainingData
    sample: TextSample
    """Text of contenders that batch in their own way."""
    valid: TextSample
    world: World
    device: torch.device
    step_tokens: float
    """Mean number of target tokens of a step of ours, which a peer's step also has."""

    def variants(self, name: str) -> list[str]:
        """List the variants of a contender; its own model has one."""
        return [""] if name in SHARED else peer_variants(name, self.config)

    def make(self, name: str, variant: str | None = None) -> Contender:
        """Make a contender, in the given variant or its first one."""
        if name not in SHARED:
            variant = self.variants(name)[0] if variant is None else variant
            return make_peer(name, variant, self.model, self.sample, self.config, step_tokens=self.step_tokens)
        model, config = copy_of(self.model), self.config
        if name == "plain":
            return PackedContender(PlainDriver(model, config, self.world), self.data, config, self.world)
        stock = {"zero_optimization": {"stage": 1}}
        ds_config = stock if name == "stock" else load_ds_config(config.deepspeed_config)
        engine = Engine(model, config, ds_config, world_size=self.world.size)
        return PackedContender(engine, self.data, config, self.world)


def open_field(config: TrainConfig, world: World, device: torch.device) -> Field:
    """Read the text and draw the initial weights of all contenders."""
    data = open_training_data(config.corpora, config.batch, seed=config.seed)
    index, split = data.first.index, data.first.train
    config = dataclasses.replace(config, model=config.model.for_vocabularies(*index.vocab_sizes))
    torch.manual_seed(config.seed)
    model = Transformer(config.model).to(device)
    longest = min(config.model.max_positions, *data.budgets.tokens.tolist())
    steps = itertools.islice(data.plan.steps(data.plan.start(), config.batch.packs_per_step), _COUNTED_STEPS)
    return Field(
        config=config,
        model=model,
        data=data,
        sample=TextSample(split, pairs=_SAMPLE_PAIRS, longest=longest, seed=config.seed),
        valid=TextSample(data.first.valid, pairs=_VALID_PAIRS, longest=longest, seed=config.seed),
        world=world,
        device=device,
        step_tokens=statistics.mean(step.target_tokens for step in steps),
    )


def run_training_benchmark(
    settings: TrainBenchmark, config: TrainConfig, world: World, device: torch.device
) -> dict[str, Any]:
    """Measure everything and return the figures.

    Collective: every rank must call it.
    """

    def report(line: str) -> None:
        if world.is_main:
            say(line)

    field = open_field(config, world, device)
    names = choose(settings.peers, report)
    first = names[0]
    if world.size > 1 and (alone := [name for name in names if name not in SHARED]):
        raise UserError(f"--peers {' '.join(alone)} train on one process: start it without a launcher")
    trials = {name: try_variants(field, name) for name in names if name not in SHARED}
    variants = {name: max(rates, key=rates.__getitem__) for name, rates in trials.items()}
    # First measure the memory of each contender alone, so that one that does not fit stops the benchmark early.
    memory = peak_memories(config, names, variants) if world.size == 1 else {}
    started = time.monotonic()
    contenders = {name: field.make(name, variants.get(name)) for name in names}
    curves = {name: [contender.nll(field.valid)] for name, contender in contenders.items()}
    for name, contender in contenders.items():
        contender.train(_WARM_UP)
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
        found["ours_to_this"] = spread(ours / theirs for ours, theirs in pairs)
    return {
        "unit": "real target tokens per CPU second" if device.type == "cpu" else "real target tokens per second",
        "parameters": sum(p.numel() for p in Transformer(field.config.model).parameters()),
        "precision": config.arithmetic,
        "world_size": world.size,
        "steps_per_round": settings.steps,
        "rounds": settings.rounds,
        "tokens_per_step": config.batch.max_target_tokens * config.batch.packs_per_step,
        "product_flops_per_second": spread(products),
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


def choose(peers: Sequence[str], report: Callable[[str], None]) -> list[str]:
    """List the contenders that this machine can measure. The first one is compared with the others."""
    names = []
    for name, label in LABELS.items():
        if name not in ("ours", *peers):
            continue
        if missing := missing_packages(NEEDS[name]):
            report(f"left out, because {missing} is not installed: {label}")
        else:
            names.append(name)
    return names if "ours" in names else ["plain", *(name for name in names if name != "plain")]


def summary(timings: Sequence[Timing], field: Field, products: Sequence[float]) -> dict[str, Any]:
    """Compute rates and shares of one contender."""
    total = {name: sum(s.seconds[name] for s in timings) for name in ("clock", "wall", "data", "optimizer")}
    source, target = (sum(getattr(s, f"{side}_tokens") for s in timings) for side in ("source", "target"))
    flops = training_flops(field.config.model, source_tokens=source, target_tokens=target)
    return {
        "rates": spread(s.target_tokens / s.seconds["clock"] for s in timings),
        "wall_rates": spread(s.target_tokens / s.seconds["wall"] for s in timings),
        "tokens_per_step": target / sum(s.steps for s in timings),
        "fill": (source + target) / sum(s.computed_tokens for s in timings),
        "mfu": flops / total["clock"] / statistics.median(products),
        "data_share": total["data"] / total["wall"],
        "optimizer_share": total["optimizer"] / total["wall"],
    }


def train_table(figures: dict[str, Any]) -> str:
    """Format the figures in lines of at most 80 characters."""
    contenders = figures["contenders"]
    rates = [("", "rate", "", "ours is", "MFU", "fill")]
    shares: list[tuple[str, ...]] = [("", "memory", "data", "update", "first loss", "last")]
    for name, found in contenders.items():
        rate, times = found["rates"], f"{found['ours_to_this']['median']:.2f}×"
        ends, share = f"{rate['lowest']:,.0f}–{rate['highest']:,.0f}", f"{found['mfu']:.1%}"
        rates.append((LABELS[name], f"{rate['median']:,.0f}", ends, times, share, f"{found['fill']:.1%}"))
        memory = f"{found['peak_gib']:.2f} GiB" if "peak_gib" in found else ""
        parts = (f"{found[each]:.1%}" for each in ("data_share", "optimizer_share"))
        shares.append((LABELS[name], memory, *parts, f"{found['nll'][0]:.3f}", f"{found['nll'][-1]:.3f}"))
    product = figures["product_flops_per_second"]["median"]
    return "\n".join(
        [
            f"{figures['unit']}, medians of {figures['rounds']} rounds (lowest to highest)",
            *columns(rates),
            "",
            *columns(shares),
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


def try_variants(field: Field, name: str) -> dict[str, float]:
    """Measure each variant of a peer for a few steps: only the fastest one takes part."""
    rates = {}
    for variant in field.variants(name):
        contender = field.make(name, variant)
        contender.train(_WARM_UP)
        timing = contender.train(_TRIED_STEPS)
        rates[variant] = timing.target_tokens / timing.seconds["clock"]
        say(f"{LABELS[name]}, {variant}: {rates[variant]:,.0f} target tokens per second")
    return rates


def peak_memories(config: TrainConfig, names: Sequence[str], variants: Mapping[str, str]) -> dict[str, float]:
    """Measure the peak GiB of each contender in a separate process, beyond its memory before the model was made.

    The figure is resident memory on a CPU and allocated memory on a GPU.
    """
    memory = {}
    for name in names:
        say(f"memory of {LABELS[name]}")
        request = {"config": to_plain(config), "name": name, "variant": variants.get(name)}
        failure, remedy = f"{LABELS[name]} could not be measured alone", "leave it out of --peers"
        memory[name] = measure_apart(train_alone, request, failure=failure, remedy=remedy)["peak_gib"]
    return memory


def train_alone(request: dict[str, Any]) -> dict[str, float]:
    """Train a contender for two steps, and measure the memory of this process."""
    with process_group(World(), single=True) as device:
        field = open_field(from_plain(TrainConfig, request["config"], "request"), World(), device)
        before = resident_mib("VmRSS")
        contender = field.make(request["name"], request["variant"])
        contender.train(2)
        if device.type == "cuda":
            return {"peak_gib": torch.cuda.max_memory_allocated() / 2**30}
        return {"peak_gib": (resident_mib("VmHWM") - before) / 1024}
