"""Flags of the benchmark command, with a subcommand per part."""

import argparse
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from benchmarks.data import DataBenchmark
from benchmarks.decoding import LABELS as DECODE_LABELS
from benchmarks.race.toolkits import TOOLKITS
from benchmarks.training.field import LABELS
from dist_transformer.runtime.device import PRECISIONS

Measure = Callable[[argparse.Namespace], Any]


def parse_arguments(description: str | None, measures: Mapping[str, Measure]) -> argparse.Namespace:
    """Parse the command line.

    Args:
        measures: function of each part, by its name; the parsed arguments hold it as `measure`.
    """
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    # DeepSpeed's launcher adds this flag; the environment holds the same value.
    parser.add_argument("--local_rank", type=int, help=argparse.SUPPRESS)
    parts = parser.add_subparsers(title="what to measure", required=True, dest="part", metavar="PART")
    data = add_part(
        parts,
        "data",
        measures["data"],
        trains=False,
        help="planning, reading, building and preparing, compared with `datasets` and `tokenizers`",
        description="Measure planning, reading, building and preparing with one process and one thread, and compare "
        "with `datasets` and `tokenizers`. Rates are target tokens per CPU second.",
    )
    defaults = {name: field.default for name, field in DataBenchmark.__dataclass_fields__.items()}
    data.add_argument("--data", type=Path, required=True, help="data folder")
    for name, kind, meaning in (
        ("seconds", float, "seconds of each measure in each round"),
        ("repeats", int, "rounds; medians are reported"),
        ("pairs", int, "pairs of the simulated index; each takes 4 bytes in the folder of temporary files"),
        ("text_pairs", int, "sentence pairs to prepare"),
        (
            "memory_pairs",
            int,
            "sentence pairs for the memory of a preparation, measured with these and with ten times as many",
        ),
        ("seed", int, "seed of plan, simulated lengths and chosen text"),
    ):
        flag = "--" + name.replace("_", "-")
        data.add_argument(flag, type=kind, default=defaults[name], metavar="N", help=f"{meaning} (default %(default)s)")
    add_train_parser(parts, measures)
    add_stall_parser(parts, measures)
    add_decode_parser(parts, measures)
    add_learn_parser(parts, measures)
    add_cost_parser(parts, measures)
    add_step_parser(parts, measures)
    add_kernels_parser(parts, measures)
    add_race_parser(parts, measures)
    add_start_parser(parts, measures)
    return parser.parse_args()


def add_part(
    parts: Any, name: str, measure: Measure, *, trains: bool, data: Callable[[str], object] = Path, **texts: str
) -> Any:
    """Add the parser of a part, with the flags of all parts or of all parts that train.

    Args:
        data: type of `--data`; use `str` for a part that accepts URLs.
    """
    part = parts.add_parser(name, allow_abbrev=False, **texts)
    part.set_defaults(measure=measure, flags=[])
    if trains:
        part.add_argument("--data", type=data, required=True, help="data folder")
        part.add_argument("--preset", default="tiny", help="model and batch (default: %(default)s)")
        part.add_argument("flags", nargs="*", metavar="-- FLAGS", help="flags of dist-transformer train")
    part.add_argument("--json", type=Path, metavar="OUT", help="also write a result file (default: no file)")
    return part


def add_race_parser(parts: Any, measures: Mapping[str, Measure]) -> None:
    race = add_part(
        parts,
        "race",
        measures["race"],
        trains=False,
        help="CPU seconds until translations reach a BLEU score, compared with other toolkits",
        description="Train the same network on the same segments with each toolkit, and score its weights on the "
        "validation text. Learning rates are chosen for each on that text. What is in --work is not done again.",
    )
    race.add_argument("--data", type=Path, required=True, help="data folder")
    race.add_argument("--work", type=Path, required=True, help="folder of the trainings")
    race.add_argument("--size", choices=("tiny", "base_width"), default="tiny", help="network (default: %(default)s)")
    race.add_argument(
        "--toolkits", nargs="+", choices=TOOLKITS, default=[*TOOLKITS], metavar="T", help=" ".join(TOOLKITS)
    )
    race.add_argument("--pymarian", type=Path, metavar="FILE", help="Marian's program, of the package pymarian")
    race.add_argument("--eole", type=Path, metavar="FILE", help="Eole's program")
    race.add_argument(
        "--rates",
        nargs="+",
        default=["2e-3/100", "2e-3/300", "4e-3/100", "4e-3/300", "8e-3/100"],
        metavar="PEAK/WARM-UP",
        help="learning rates to choose from (default %(default)s)",
    )
    race.add_argument(
        "--seeds",
        nargs="+",
        type=int,
        default=[1, 2, 3],
        metavar="N",
        help="seeds; the first chooses the rates (default %(default)s)",
    )
    for name, number, meaning in (
        ("grid-steps", 300, "steps of a training that chooses rates"),
        ("steps", 800, "steps of each training of the race"),
        ("every", 50, "steps between weights that are scored"),
    ):
        race.add_argument(f"--{name}", type=int, default=number, metavar="N", help=f"{meaning} (default %(default)s)")


def add_start_parser(parts: Any, measures: Mapping[str, Measure]) -> None:
    start = add_part(
        parts,
        "start",
        measures["start"],
        trains=False,
        help="how long a user waits before a command answers",
        description="Time the help of every command, a translated line and the first step, each in a new process.",
    )
    start.add_argument("--rounds", type=int, default=5, metavar="N", help="rounds; medians are reported")
    start.add_argument("--demo", action="store_true", help="also time the demo, once")


def add_train_parser(parts: Any, measures: Mapping[str, Measure]) -> None:
    training = add_part(
        parts,
        "train",
        measures["train"],
        trains=True,
        help="training steps, compared with torch.nn.Transformer, MarianMTModel and plain torch",
        description="Train on real text, in turns. The unit is real target tokens (without padding) per second of CPU "
        "time without a GPU, and of wall time with one. Exits with 1 if the losses of the contenders differ.",
    )
    training.add_argument(
        "--peers",
        nargs="*",
        default=[name for name in LABELS if name != "ours"],
        metavar="P",
        help="; ".join(f"{name}: {label}" for name, label in LABELS.items() if name != "ours") + " (default: all)",
    )
    training.add_argument(
        "--steps", type=int, default=10, metavar="N", help="optimizer steps of each contender per round"
    )
    training.add_argument("--rounds", type=int, default=6, metavar="N", help="rounds; medians are reported")


def add_stall_parser(parts: Any, measures: Mapping[str, Measure]) -> None:
    stall = add_part(
        parts,
        "stall",
        measures["stall"],
        trains=True,
        data=str,
        help="waits for data of training at a given speed, for example from an object store",
        description="Run the real loader with steps that only sleep, as long as their target tokens take at the given "
        "rate. Waits for data are counted like data_stall of a run.",
    )
    stall.add_argument(
        "--rate", type=float, default=600_000, metavar="N", help="target tokens per second (default: %(default)s)"
    )
    stall.add_argument(
        "--seconds", type=float, default=60.0, metavar="S", help="seconds of training (default: %(default)s)"
    )


def add_learn_parser(parts: Any, measures: Mapping[str, Measure]) -> None:
    learning = add_part(
        parts,
        "learn",
        measures["learn"],
        trains=True,
        help="a model trained for some minutes, for the benchmark of decoding",
        description="Train in one process for some minutes, without checkpoints, and write a model folder.",
    )
    learning.add_argument(
        "--minutes", type=float, default=5.0, metavar="M", help="minutes of training (default: %(default)s)"
    )
    learning.add_argument("--out", type=Path, required=True, metavar="MODEL", help="model folder")


def add_cost_parser(parts: Any, measures: Mapping[str, Measure]) -> None:
    cost = add_part(
        parts,
        "cost",
        measures["cost"],
        trains=False,
        help="time and memory of a step against model size, sentence length and tokens at once",
        description="Measure steps of models of several sizes on random sentences under plain torch, each point in a "
        "separate process. The figures of up to 16 nodes of 8 GPUs come from a model, not a measurement.",
    )
    cost.add_argument("--repeats", type=int, default=5, metavar="N", help="measures per point (default: 5)")


def add_step_parser(parts: Any, measures: Mapping[str, Measure]) -> None:
    step = add_part(
        parts,
        "step",
        measures["step"],
        trains=True,
        help="a training step on a GPU taken apart: kernels, launches, waits, memory",
        description="Train under DeepSpeed on a GPU, then again under the profiler. Reports time by kinds of kernels, "
        "launches, waits for the device, and memory compared with the planner's prediction.",
    )
    step.add_argument("--steps", type=int, default=5, metavar="N", help="optimizer steps per round")
    step.add_argument("--rounds", type=int, default=3, metavar="N", help="rounds; medians are reported")


def add_kernels_parser(parts: Any, measures: Mapping[str, Measure]) -> None:
    kernels = add_part(
        parts,
        "kernels",
        measures["kernels"],
        trains=False,
        help="the kernels of a training step on a GPU, each alone",
        description="Measure products, attention at 13 and 29 tokens per sentence, and the loss, forward and backward: "
        "milliseconds, operations and bytes per second.",
    )
    kernels.add_argument("--preset", default="big", help="model (default: %(default)s)")
    kernels.add_argument(
        "--vocab-size", type=int, default=37_000, metavar="V", help="size of the vocabulary (default: %(default)s)"
    )
    kernels.add_argument(
        "--tokens", type=int, default=25_088, metavar="N", help="tokens at once (default: %(default)s)"
    )


def add_decode_parser(parts: Any, measures: Mapping[str, Measure]) -> None:
    decoding = add_part(
        parts,
        "decode",
        measures["decode"],
        trains=False,
        help="beam search, compared with Hugging Face's generate and CTranslate2",
        description="Run beam search with the same weights, in turns. The unit is sentences per second of CPU time "
        "without a GPU, and of wall time with one. Exits with 1 if the BLEU scores differ.",
    )
    decoding.add_argument("--model", type=Path, required=True, help="model folder")
    for name, what in (("src", "source"), ("ref", "reference")):
        decoding.add_argument(f"--{name}", type=Path, required=True, metavar="F", help=f"{what}, one sentence per line")
    decoding.add_argument("--sentences", type=int, metavar="N", help="only the first N (default: all)")
    decoding.add_argument(
        "--peers",
        nargs="*",
        default=[name for name in DECODE_LABELS if name != "ours"],
        metavar="P",
        help="; ".join(f"{name}: {label}" for name, label in DECODE_LABELS.items() if name != "ours")
        + " (default: all)",
    )
    decoding.add_argument("--beam", type=int, default=4, metavar="K", help="beam size (default: %(default)s)")
    precisions, meaning = tuple(PRECISIONS), "precision of all contenders (default: fp32 on a CPU, bf16 on a GPU)"
    decoding.add_argument("--precision", choices=precisions, help=meaning)
    decoding.add_argument("--rounds", type=int, default=4, metavar="N", help="rounds; medians are reported")
