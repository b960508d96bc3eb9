"""Benchmark of training: our engine, its controls and peers, on the same text, in turns.

Each contender has a process of its own, so that neither the memory nor the threads of one slow another down.

Unit: real target tokens (without padding) per second. On a CPU these are seconds of the process' CPU time, which other
work on the machine changes only a little. On a GPU they are seconds of wall time.
"""

import copy
import ctypes
import dataclasses
import itertools
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.measure import (
    Measured,
    TrainingPart,
    apart,
    columns,
    missing_packages,
    now,
    require_known,
    resident_mib,
    say,
    spread,
)
from benchmarks.rows import train_row
from benchmarks.training.contenders import PackedContender, PlainDriver, Timing
from benchmarks.training.peers import PEERS, PaddedContender, TrainerContender, make_peer, peer_variants
from benchmarks.training.text import TextSample
from dist_transformer.config.plain import from_plain, to_plain
from dist_transformer.config.settings import TrainConfig
from dist_transformer.data.folder.reader import DataFolder
from dist_transformer.data.loading.loader import TrainingData, open_training_data
from dist_transformer.model.transformer import Transformer, training_flops
from dist_transformer.runtime.process_group import process_group
from dist_transformer.runtime.world import World
from dist_transformer.training.engine.deepspeed_engine import Engine
from dist_transformer.training.engine.ds_config import load_ds_config

LABELS = {
    "ours": "ours: packs, DeepSpeed ZeRO-1",
    "stock": "ours, DeepSpeed's own defaults",
    "plain": "ours, plain torch",
    "torch": "P1 torch.nn.Transformer, buckets",
    "trainer": "P2 HF MarianMTModel, Trainer, by length",
    "compiled": "P3 HF MarianMTModel, compiled, buckets",
    "loop": "P4 HF MarianMTModel, loop, buckets",
}
"""Contenders, in the order of the table."""
NEEDS = {
    **dict.fromkeys(("ours", "stock"), ("deepspeed",)),
    "trainer": ("transformers", "accelerate", "datasets"),
    **dict.fromkeys(("compiled", "loop"), ("transformers",)),
}
"""Packages that some contenders need."""
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
    trainer, MarianMTModel under the Trainer; compiled and loop, MarianMTModel compiled and not. Ours always takes part,
    or without DeepSpeed our model under plain torch."""
    steps: int = 10
    """Optimizer steps of each contender per round."""
    rounds: int = 6
    """Rounds; medians are reported."""

    def measure(self) -> Measured:
        require_known("--peers", self.peers, LABELS)
        config, index = self.config(), DataFolder.open(Path(self.data)).index
        config = dataclasses.replace(config, model=config.model.for_vocabularies(*index.vocab_sizes))
        with process_group(World(), single=True) as device:
            figures = {"preset": self.preset, **run_training_benchmark(self, config, device)}
        flaw = "the losses of the contenders differ: they did not do the same work (see nll in --json)"
        return Measured(
            what=f"training compared with peers, in turns; {figures['unit']}; medians of rounds",
            figures=figures,
            table=train_table(figures),
            rows=[train_row([*figures["contenders"]], gpu=device.type == "cuda")],
            text=index,
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
    step_tokens: float
    """Mean number of target tokens of a step of ours, which a peer's step also has."""

    def make(self, name: str, variant: str) -> Contender:
        """Make a contender; a peer in the given variant."""
        if name in PEERS:
            return make_peer(name, variant, self.model, self.sample, self.config, step_tokens=self.step_tokens)
        model, config = copy.deepcopy(self.model), self.config
        if name == "plain":
            return PackedContender(PlainDriver(model, config), self.data, config)
        stock = {"zero_optimization": {"stage": 1}}
        ds_config = stock if name == "stock" else load_ds_config(config.deepspeed_config)
        return PackedContender(Engine(model, config, ds_config, world_size=1), self.data, config)


def open_field(config: TrainConfig, device: torch.device) -> Field:
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
        step_tokens=statistics.mean(step.target_tokens for step in steps),
    )


def run_training_benchmark(settings: TrainBenchmark, config: TrainConfig, device: torch.device) -> dict[str, Any]:
    """Measure everything and return the figures.

    Args:
        config: its model has the vocabulary of the data.
    """
    names = choose(settings.peers)
    trials = {name: try_variants(config, name) for name in names if name in PEERS}
    variants = {name: max(rates, key=rates.__getitem__) for name, rates in trials.items()}
    with ExitStack() as stack:
        asked = {name: stack.enter_context(contender_apart(config, name, variants.get(name, ""))) for name in names}
        warm = {name: ask(_WARM_UP) for name, ask in asked.items()}
        say("all are warm")
        answers: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
        products: list[float] = []
        for number in range(settings.rounds):
            # Every second round runs in reverse order, so that a machine that slows down or warms up favours none.
            for name in names if number % 2 == 0 else reversed(names):
                answers[name].append(asked[name](settings.steps))
            products.append(product_rate(device))
            say(f"round {number + 1} of {settings.rounds}")
    figures = {name: summary([Timing(**a["timing"]) for a in answers[name]], config, products) for name in names}
    for name, found in figures.items():
        found["nll"] = [warm[name]["first_nll"], *(answer["nll"] for answer in answers[name])]
        found["peak_gib"] = answers[name][-1]["peak_gib"]
        if name in trials:
            found["variant"], found["trials"] = variants[name], trials[name]
        pairs = zip(figures[names[0]]["rates"]["values"], found["rates"]["values"], strict=True)
        found["ours_to_this"] = spread(ours / theirs for ours, theirs in pairs)
    return {
        "unit": "real target tokens per CPU second" if device.type == "cpu" else "real target tokens per second",
        "parameters": sum(p.numel() for p in Transformer(config.model).parameters()),
        "precision": config.arithmetic,
        "steps_per_round": settings.steps,
        "rounds": settings.rounds,
        "tokens_per_step": config.batch.max_target_tokens * config.batch.packs_per_step,
        "product_flops_per_second": spread(products),
        "graphs_compiled_in_rounds": sum(answers[name][-1]["graphs"] - warm[name]["graphs"] for name in names),
        "loss_curves_agree": curves_agree([found["nll"] for found in figures.values()]),
        **({"fastest_marian": fastest} if (fastest := fastest_marian(figures)) else {}),
        "contenders": figures,
    }


@contextmanager
def contender_apart(config: TrainConfig, name: str, variant: str) -> Iterator[Callable[[Any], Any]]:
    """Start a contender in a process of its own, and yield a function that asks `contend` there for steps."""
    label = ", ".join(filter(None, (LABELS[name], variant)))
    say(label)
    with apart(contend, failure=f"{label} cannot be measured", remedy="leave it out of --peers") as ask:
        ask([to_plain(config), name, variant])
        yield ask


def contend(requests: Iterator[Any]) -> Iterator[Any]:
    """Make the contender of the first request, then train as many steps as each later one says.

    Its peak memory is beyond that before it was made: resident on a CPU, allocated on a GPU.
    """
    config, name, variant = next(requests)
    with process_group(World(), single=True) as device:
        field = open_field(from_plain(TrainConfig, config, "request"), device)
        # Reading the text has freed memory, which would otherwise hide some of the contender's.
        ctypes.CDLL(None).malloc_trim(0)
        before, on_gpu = resident_mib("VmRSS"), device.type == "cuda"
        contender = field.make(name, variant)
        first_nll = contender.nll(field.valid)
        yield None
        for steps in requests:
            if on_gpu:
                # Take the memory that others had meanwhile.
                contender.train(1)
            timing = dataclasses.asdict(contender.train(steps))
            peak = torch.cuda.max_memory_allocated() / 2**20 if on_gpu else resident_mib("VmHWM") - before
            found = {"timing": timing, "first_nll": first_nll, "nll": contender.nll(field.valid)}
            torch.cuda.empty_cache()
            yield {**found, "peak_gib": peak / 1024, "graphs": graphs_compiled()}


def try_variants(config: TrainConfig, name: str) -> dict[str, float]:
    """Measure each variant of a peer for a few steps: only the fastest one takes part."""
    rates = {}
    for variant in peer_variants(name, config):
        with contender_apart(config, name, variant) as ask:
            ask(_WARM_UP)
            timing = Timing(**ask(_TRIED_STEPS)["timing"])
        rates[variant] = timing.target_tokens / timing.seconds["clock"]
        say(f"{rates[variant]:,.0f} target tokens per second")
    return rates


def fastest_marian(figures: dict[str, Any]) -> dict[str, Any] | None:
    """Find the fastest of Hugging Face's contenders, and our rate relative to it; None if neither ran."""
    rates = {name: figures[name]["rates"]["median"] for name in ("trainer", "compiled", "loop") if name in figures}
    if not rates:
        return None
    name = max(rates, key=rates.__getitem__)
    return {"name": name, "ours_to_this": figures[name]["ours_to_this"]["median"]}


def choose(peers: Sequence[str]) -> list[str]:
    """List the contenders that this machine can measure. The first one is compared with the others."""
    names = []
    for name, label in LABELS.items():
        if name not in ("ours", *peers):
            continue
        if missing := missing_packages(NEEDS.get(name, ())):
            say(f"left out, because {missing} is not installed: {label}")
        else:
            names.append(name)
    return names if "ours" in names else ["plain", *(name for name in names if name != "plain")]


def summary(timings: Sequence[Timing], config: TrainConfig, products: Sequence[float]) -> dict[str, Any]:
    """Compute rates and shares of one contender."""
    total = {name: sum(each.seconds[name] for each in timings) for name in Timing().seconds}
    source, target = (sum(getattr(each, f"{side}_tokens") for each in timings) for side in ("source", "target"))
    flops = training_flops(config.model, source_tokens=source, target_tokens=target)
    return {
        "rates": spread(each.target_tokens / each.seconds["clock"] for each in timings),
        "wall_rates": spread(each.target_tokens / each.seconds["wall"] for each in timings),
        "tokens_per_step": target / sum(each.steps for each in timings),
        "fill": (source + target) / sum(each.computed_tokens for each in timings),
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


def curves_agree(curves: Sequence[Sequence[float]]) -> bool:
    """Check that all contenders start with the loss of the first one, and end near its last loss."""
    ours = curves[0]
    return all(
        abs(curve[0] / ours[0] - 1) <= START_TOLERANCE and abs(curve[-1] / ours[-1] - 1) <= END_TOLERANCE
        for curve in curves
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
