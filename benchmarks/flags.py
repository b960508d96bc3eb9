"""Flags of the benchmark command, a subcommand per part."""

import argparse
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from benchmarks.data import DataBenchmark
from benchmarks.decoding import LABELS as DECODE_LABELS
from benchmarks.reading import ReadingBenchmark
from benchmarks.training.field import LABELS
from dist_transformer.inference.options import PRECISIONS

Measure = Callable[[argparse.Namespace], Any]


def parse_arguments(description: str | None, measures: Mapping[str, Measure]) -> argparse.Namespace:
    """Parse the command line.

    Args:
        measures: what each part runs, by its name; the parsed arguments hold it as `measure`.
    """
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    # DeepSpeed's launcher adds this one; the environment says the same.
    parser.add_argument("--local_rank", type=int, help=argparse.SUPPRESS)
    parts = parser.add_subparsers(title="what to measure", required=True, dest="part", metavar="PART")
    data = add_part(
        parts,
        "data",
        measures["data"],
        trains=False,
        help="planning, reading, building and preparing, beside `datasets` and `tokenizers`",
        description="Planning, reading, building and preparing, beside `datasets` and `tokenizers`: one process, one "
        "thread. Rates are target tokens a CPU second.",
    )
    defaults = {name: field.default for name, field in DataBenchmark.__dataclass_fields__.items()}
    data.add_argument("--data", type=Path, required=True, help="data folder")
    for name, kind, meaning in (
        ("seconds", float, "seconds of each measure in each round"),
        ("repeats", int, "rounds; the median of them is reported"),
        ("pairs", int, "pairs of the simulated index; each takes 4 bytes in the folder for temporary files"),
        ("text_pairs", int, "sentence pairs that are prepared anew"),
        ("memory_pairs", int, "sentence pairs, and ten times as many, whose preparation's memory is measured"),
        ("seed", int, "of plan, simulated lengths and chosen text"),
    ):
        flag = "--" + name.replace("_", "-")
        data.add_argument(flag, type=kind, default=defaults[name], metavar="N", help=f"{meaning} (default %(default)s)")
    add_reading_parser(parts, measures)
    add_size_parser(parts, measures)
    add_train_parser(parts, measures)
    add_ranks_parser(parts, measures)
    add_stages_parser(parts, measures)
    add_links_parser(parts, measures)
    add_stall_parser(parts, measures)
    add_decode_parser(parts, measures)
    add_learn_parser(parts, measures)
    add_cost_parser(parts, measures)
    add_step_parser(parts, measures)
    add_kernels_parser(parts, measures)
    add_attention_parser(parts, measures)
    return parser.parse_args()


def add_part(
    parts: Any, name: str, measure: Measure, *, trains: bool, data: Callable[[str], object] = Path, **texts: str
) -> Any:
    """A parser with what all parts, and all that train, take.

    Args:
        data: what `--data` becomes; a URL stays text.
    """
    part = parts.add_parser(name, allow_abbrev=False, **texts)
    part.set_defaults(measure=measure, flags=[])
    if trains:
        part.add_argument("--data", type=data, required=True, help="data folder")
        part.add_argument("--preset", default="tiny", help="model and batch (default: %(default)s)")
        part.add_argument("flags", nargs="*", metavar="-- FLAGS", help="of dist_transformer.train")
    part.add_argument("--json", type=Path, metavar="OUT", help="also write a result file (default: do not)")
    return part


def add_reading_parser(parts: Any, measures: Mapping[str, Measure]) -> None:
    reading = add_part(
        parts,
        "reading",
        measures["reading"],
        trains=False,
        help="planning and reading once per node: CPU, bytes and memory of its processes",
        description="An epoch of planning, reading and building on the processes of one node of a simulated cluster, "
        "and on one process: CPU per process, bytes read and memory of the node.",
    )
    defaults = {name: field.default for name, field in ReadingBenchmark.__dataclass_fields__.items()}
    reading.add_argument("--data", type=Path, required=True, help="data folder")
    for name, meaning in (
        ("ranks", "processes of the node"),
        ("world", "processes of the simulated cluster"),
        ("times", "copies of the corpus in the corpus that is read"),
        ("packs_per_step", "packs of 392 target tokens in a step"),
        ("seed", "of the plan"),
    ):
        flag = "--" + name.replace("_", "-")
        reading.add_argument(
            flag, type=int, default=defaults[name], metavar="N", help=f"{meaning} (default %(default)s)"
        )


def add_size_parser(parts: Any, measures: Mapping[str, Measure]) -> None:
    size = add_part(
        parts,
        "size",
        measures["size"],
        trains=False,
        help="an epoch of a corpus of any size, planned from simulated lengths",
        description="The real plan over simulated lengths: start, first step, CPU and memory; whether each pair comes "
        "once, and whether worlds of several sizes train on the same sentences.",
    )
    size.add_argument("--data", type=Path, required=True, help="data folder whose lengths are drawn from")
    size.add_argument("--pairs", type=int, default=100_000_000, metavar="N", help="default: %(default)s")
    size.add_argument(
        "--worlds", type=int, nargs="+", default=[128, 1024], metavar="N", help="ranks (default: %(default)s)"
    )
    size.add_argument("--pairs-per-shard", type=int, default=100_000, metavar="N", help="default: %(default)s")


def add_train_parser(parts: Any, measures: Mapping[str, Measure]) -> None:
    training = add_part(
        parts,
        "train",
        measures["train"],
        trains=True,
        help="training steps, beside torch.nn.Transformer, MarianMTModel and plain torch",
        description="Training steps on real text, in turns. The unit is real target tokens, padding not counted, a "
        "second: of CPU time without a GPU, of wall time with one. Exits 1 when the losses of the contenders part.",
    )
    training.add_argument(
        "--peers",
        nargs="*",
        default=[name for name in LABELS if name != "ours"],
        metavar="P",
        help="; ".join(f"{name}: {label}" for name, label in LABELS.items() if name != "ours") + " (default: all)",
    )
    training.add_argument("--steps", type=int, default=10, metavar="N", help="optimizer steps of each in each round")
    training.add_argument("--rounds", type=int, default=6, metavar="N", help="rounds; medians are reported")


def add_ranks_parser(parts: Any, measures: Mapping[str, Measure]) -> None:
    several = add_part(
        parts,
        "ranks",
        measures["ranks"],
        trains=True,
        help="training steps on several ranks, beside the same steps on one",
        description="The same training steps on one rank, on several of this machine, and shared out to processes that "
        "do not communicate, one thread each, in turns: seconds of a step by the wall's clock, the share of it that is "
        "not work, and the share that is communication and waiting.",
    )
    several.add_argument("--ranks", type=int, default=2, metavar="N", help="ranks (default: %(default)s)")
    several.add_argument("--steps", type=int, default=20, metavar="N", help="optimizer steps of each in each round")
    several.add_argument("--rounds", type=int, default=4, metavar="N", help="rounds; medians are reported")


def add_stages_parser(parts: Any, measures: Mapping[str, Measure]) -> None:
    stages = add_part(
        parts,
        "stages",
        measures["stages"],
        trains=True,
        help="training steps under each ZeRO stage: CPU time, bytes sent, memory",
        description="The same training steps under ZeRO 0 to 3 on several ranks of this machine, one thread each: CPU "
        "seconds of a step, bytes that its collectives send around a ring, and bytes of the states, of one rank.",
    )
    stages.add_argument("--ranks", type=int, default=2, metavar="N", help="ranks (default: %(default)s)")
    stages.add_argument(
        "--micro-batches",
        type=int,
        nargs="+",
        default=[1, 4, 16],
        metavar="N",
        help="micro-batches of each rank per step (default: 1 4 16)",
    )
    stages.add_argument("--steps", type=int, default=2, metavar="N", help="optimizer steps of each (default: 2)")
    stages.add_argument("--rounds", type=int, default=3, metavar="N", help="rounds; medians are reported")


def add_links_parser(parts: Any, measures: Mapping[str, Measure]) -> None:
    links = add_part(
        parts,
        "links",
        measures["links"],
        trains=True,
        help="communication of each ZeRO stage on links of known rates, beside what the planner predicts",
        description="Training steps under ZeRO 0 to 3 on nodes that are network namespaces of this machine, one rank "
        "each, under gloo: seconds of a step that nothing overlapped, and bytes sent, beside what `plan` predicts. "
        "Needs root and iproute2.",
    )
    links.add_argument("--nodes", type=int, nargs="+", default=[2, 4], metavar="N", help="nodes (default: 2 4)")
    links.add_argument(
        "--mbits",
        type=float,
        nargs="+",
        default=[10, 100, 1000],
        metavar="R",
        help="what a node may send, in Mbit/s (default: 10 100 1000)",
    )
    links.add_argument("--steps", type=int, default=3, metavar="N", help="optimizer steps of each (default: 3)")


def add_stall_parser(parts: Any, measures: Mapping[str, Measure]) -> None:
    stall = add_part(
        parts,
        "stall",
        measures["stall"],
        trains=True,
        data=str,
        help="how long training at a given speed waits for its data, such as from an object store",
        description="The real loader under a training that only takes its time: each step sleeps as long as its target "
        "tokens take at the given rate. Waits for data are counted, as data_stall of a run counts them.",
    )
    stall.add_argument(
        "--rate", type=float, default=600_000, metavar="N", help="target tokens per second (default: %(default)s)"
    )
    stall.add_argument("--seconds", type=float, default=60.0, metavar="S", help="of training (default: %(default)s)")


def add_learn_parser(parts: Any, measures: Mapping[str, Measure]) -> None:
    learning = add_part(
        parts,
        "learn",
        measures["learn"],
        trains=True,
        help="a model that was trained for some minutes, to measure with",
        description="Train in one process for some minutes, without checkpoints, and write a model folder.",
    )
    learning.add_argument("--minutes", type=float, default=5.0, metavar="M", help="of training (default: %(default)s)")
    learning.add_argument("--out", type=Path, required=True, metavar="MODEL", help="model folder")


def add_cost_parser(parts: Any, measures: Mapping[str, Measure]) -> None:
    cost = add_part(
        parts,
        "cost",
        measures["cost"],
        trains=False,
        help="time and memory of a step against model size, sentence length and tokens at once",
        description="Steps of models of several sizes on random sentences, under plain torch, each point in a process "
        "of its own; and what 16 nodes of 8 GPUs would reach, which is a model and no measurement.",
    )
    cost.add_argument("--device", metavar="GPU", help="h100, h200, …: model steps on it instead, by counted launches")
    cost.add_argument("--repeats", type=int, default=5, metavar="N", help="measures of each point (default: 5)")


def add_step_parser(parts: Any, measures: Mapping[str, Measure]) -> None:
    step = add_part(
        parts,
        "step",
        measures["step"],
        trains=True,
        help="a training step on a GPU taken apart: kernels, launches, waits, memory",
        description="Training steps under DeepSpeed on a GPU, and the same under the "
        "profiler: time by kinds of kernels, launches, waits for the device, memory beside the planner's.",
    )
    step.add_argument("--steps", type=int, default=5, metavar="N", help="optimizer steps in each round")
    step.add_argument("--rounds", type=int, default=3, metavar="N", help="rounds; medians are reported")


def add_kernels_parser(parts: Any, measures: Mapping[str, Measure]) -> None:
    kernels = add_part(
        parts,
        "kernels",
        measures["kernels"],
        trains=False,
        help="the kernels of a training step on a GPU, each alone",
        description="Products, attention at 13 and 29 tokens a sentence, residual connections and the loss, forwards "
        "and backwards: milliseconds, operations and bytes a second.",
    )
    kernels.add_argument("--preset", default="big", help="model (default: %(default)s)")
    kernels.add_argument("--vocab-size", type=int, default=37_000, metavar="V", help="words (default: %(default)s)")
    kernels.add_argument("--tokens", type=int, default=25_088, metavar="N", help="at a time (default: %(default)s)")


def add_attention_parser(parts: Any, measures: Mapping[str, Measure]) -> None:
    attention = add_part(
        parts,
        "attention",
        measures["attention"],
        trains=False,
        help="training steps on a CPU with our kernel of attention and without it",
        description="Forward and backward of the model on random tokens, by the compiled kernel and by padded groups "
        "of sentences, in turns. The unit is CPU seconds.",
    )
    attention.add_argument("--preset", default="tiny", help="model (default: %(default)s)")
    attention.add_argument("--vocab-size", type=int, default=8_000, metavar="V", help="words (default: %(default)s)")
    attention.add_argument("--tokens", type=int, default=4_096, metavar="N", help="per side (default: %(default)s)")
    attention.add_argument("--mean-length", type=int, default=13, metavar="N", help="tokens (default: %(default)s)")
    attention.add_argument("--rounds", type=int, default=10, metavar="N", help="rounds; medians are reported")
    attention.add_argument("--precision", choices=("fp32", "bf16"), default="fp32", help="default: %(default)s")


def add_decode_parser(parts: Any, measures: Mapping[str, Measure]) -> None:
    decoding = add_part(
        parts,
        "decode",
        measures["decode"],
        trains=False,
        help="beam search, beside Hugging Face's generate and CTranslate2",
        description="Beam search with the same weights, in turns. The unit is sentences a second: of CPU time without "
        "a GPU, of wall time with one. Exits 1 when the BLEU scores part.",
    )
    decoding.add_argument("--model", type=Path, required=True, help="model folder")
    for name, what in (("src", "source"), ("ref", "reference")):
        decoding.add_argument(f"--{name}", type=Path, required=True, metavar="F", help=f"{what}, one sentence a line")
    decoding.add_argument("--sentences", type=int, metavar="N", help="only the first N (default: all)")
    decoding.add_argument(
        "--peers",
        nargs="*",
        default=[name for name in DECODE_LABELS if name != "ours"],
        metavar="P",
        help="; ".join(f"{name}: {label}" for name, label in DECODE_LABELS.items() if name != "ours")
        + " (default: all)",
    )
    decoding.add_argument("--beam", type=int, default=4, metavar="K", help="hypotheses (default: %(default)s)")
    precisions, meaning = tuple(PRECISIONS), "of all (default: fp32 on a CPU, bf16 on a GPU)"
    decoding.add_argument("--precision", choices=precisions, help=meaning)
    decoding.add_argument("--rounds", type=int, default=4, metavar="N", help="rounds; medians are reported")
