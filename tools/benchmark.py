"""Measure a part of dist_transformer on this machine, side by side with its peers.

tools/benchmark.py data --data data/mine --json results/data.json
tools/benchmark.py train --data data/mine --preset tiny --json results/bench-cpu-tiny.json
tools/benchmark.py decode --model runs/mine/model --src test.en --ref test.de
tools/benchmark.py ranks --data data/mine --preset multi30k --ranks 2
deepspeed --num_gpus 2 tools/benchmark.py train --data data/mine --peers stock plain

Prints a table; --json also writes a result file in the layout of tools/results_table.py.
"""

import argparse
import dataclasses
import shlex
import sys
import time
from pathlib import Path
from typing import Any

from dist_transformer.benchmarks.cost_curve import cost_table, curve_of, run_cost_curve
from dist_transformer.benchmarks.data import DataBenchmark, data_table, run_data_benchmark
from dist_transformer.benchmarks.decoding import LABELS as DECODE_LABELS
from dist_transformer.benchmarks.decoding import DecodeBenchmark, decode_table, run_decoding_benchmark
from dist_transformer.benchmarks.learning import learn
from dist_transformer.benchmarks.measure import result_of, write_result
from dist_transformer.benchmarks.ranks import RanksBenchmark, ranks_table, run_ranks_benchmark
from dist_transformer.benchmarks.training import (
    LABELS,
    TrainBenchmark,
    peak_memory,
    run_training_benchmark,
    train_table,
)
from dist_transformer.config import PRESETS, TrainConfig
from dist_transformer.data.folder import DataFolder
from dist_transformer.data.sources import read_lines
from dist_transformer.distributed import World, process_group, read_world
from dist_transformer.errors import UserError, exit_on_user_error
from dist_transformer.inference.options import PRECISIONS
from dist_transformer.model_folder import read_model_info

DATA_ROW = {
    "what": "data pipeline, one process and one thread, tokens a CPU second",
    "steps": "—",
    "result": "micro-batches at {figures[target_tokens_per_second][build_micro_batch][median]:,.0f} target tokens "
    "(`datasets` at random, ids only: {figures[target_tokens_per_second][datasets_random_arrow][median]:,.0f}); "
    "planning takes {figures[percent_of_training][plan]:.1f}% of training at {figures[training_speed]:,} tokens/s; "
    "budgets {figures[fill_percent][both]:.1f}% full; first step of {figures[simulated_index][pairs]:,} pairs after "
    "{figures[simulated_index][seconds][median]:.1f} s; preparation at "
    "{figures[target_tokens_per_second][prepare][median]:,.0f} (`tokenizers` alone: "
    "{figures[target_tokens_per_second][tokenizers_encode_batch_fast][median]:,.0f}), in "
    "{figures[preparation_memory][1x][peak_mib]:,.0f} MiB for {figures[preparation_memory][1x][pairs]:,} pairs and "
    "{figures[preparation_memory][10x][peak_mib]:,.0f} MiB for {figures[preparation_memory][10x][pairs]:,}",
}


TRAIN_ROW = {
    "what": "training, preset `{figures[preset]}`, {figures[precision]}, {figures[world_size]} process(es); "
    "{figures[unit]}, beside peers in the same run",
    "steps": "—",
    "result": "{figures[contenders][FIRST][rates][median]:,.0f}, which is",
}


def main() -> None:
    arguments = parse_arguments()
    if arguments.json is not None and not arguments.json.absolute().parent.is_dir():
        raise UserError(f"--json {arguments.json} is in no folder that exists: make the folder first")
    arguments.run(arguments)


def config_of(arguments: argparse.Namespace) -> TrainConfig:
    """The preset with the flags of training that were given."""
    if not arguments.flags and arguments.preset in PRESETS:
        return dataclasses.replace(PRESETS[arguments.preset], data=(str(arguments.data),))
    from dist_transformer.train import parse_arguments as parse_training

    flags = ["--preset", arguments.preset, "--data", str(arguments.data), "--run-dir", "unused", *arguments.flags]
    return parse_training(flags)[0]


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def run_learn(arguments: argparse.Namespace) -> None:
    config, started = config_of(arguments), time.monotonic()
    with process_group(World(), single=True) as device:
        figures = learn(config, minutes=arguments.minutes, out=arguments.out, device=device, report=say)
    if arguments.json is not None:
        given = ["--preset", arguments.preset, f"--minutes={arguments.minutes:g}", "--out", "MODEL"]
        command = ["python", "tools/benchmark.py", "learn", "--data", "DATA", *given]
        result = result_of(
            DataFolder.open(arguments.data).index,
            what="a model trained for some minutes",
            command=shlex.join([*command, *(["--", *arguments.flags] if arguments.flags else [])]),
            seeds=[config.seed],
            wall_seconds=round(time.monotonic() - started, 1),
            figures=figures,
            row=None,
        )
        write_result(arguments.json, result)


def run_train(arguments: argparse.Namespace) -> None:
    config = config_of(arguments)
    settings = TrainBenchmark(
        config=config, peers=tuple(arguments.peers), steps=arguments.steps, rounds=arguments.rounds
    )  # fmt: skip
    world, started = read_world(), time.monotonic()

    def report(line: str) -> None:
        if world.is_main:
            say(line)

    with process_group(world, single=True) as device:
        figures = {"preset": arguments.preset, **run_training_benchmark(settings, world, device, report)}
    if not world.is_main:
        return
    if world.size == 1:
        for name, found in figures["contenders"].items():
            report(f"memory of {name}")
            found["peak_gib"] = peak_memory(config, name)
    print(train_table(figures))
    if arguments.json is not None:
        first, *peers = figures["contenders"]
        given = ["--preset", arguments.preset, "--peers", *peers, f"--steps={settings.steps}"]
        command = ["python", "tools/benchmark.py", "train", "--data", "DATA", *given, f"--rounds={settings.rounds}"]
        beside = ", ".join(
            f"{{figures[contenders][{name}][ours_to_this][median]:.2f}}× {LABELS[name]}" for name in peers
        )
        result = result_of(
            DataFolder.open(arguments.data).index,
            what=f"training beside peers, in turns; {figures['unit']}; medians of rounds",
            command=shlex.join([*command, *(["--", *arguments.flags] if arguments.flags else [])]),
            seeds=[config.seed],
            wall_seconds=round(time.monotonic() - started, 1),
            figures=figures,
            row={**TRAIN_ROW, "result": f"{TRAIN_ROW['result']} {beside}".replace("FIRST", first)},
        )
        write_result(arguments.json, result)
    if not figures["loss_curves_agree"]:
        raise UserError("the losses of the contenders part: what was measured is not the same work (see nll in --json)")


RANKS_ROW = {
    "what": "a training step, preset `{figures[preset]}`, {figures[precision]}, on {figures[ranks]} ranks of one "
    "thread beside the same step on one",
    "steps": "—",
    "result": "{figures[several_ranks][median]:.3f} s against {figures[one_rank][median]:.3f} s: "
    "{figures[overhead_percent][median]:.1f}% of it beyond its share of the work",
}


def run_ranks(arguments: argparse.Namespace) -> None:
    config, started = config_of(arguments), time.monotonic()
    settings = RanksBenchmark(
        config=config, ranks=arguments.ranks, steps=arguments.steps, rounds=arguments.rounds
    )  # fmt: skip
    figures = {"preset": arguments.preset, **run_ranks_benchmark(settings, say)}
    print(ranks_table(figures))
    if arguments.json is not None:
        given = [f"--{name}={getattr(settings, name)}" for name in ("ranks", "steps", "rounds")]
        command = ["python", "tools/benchmark.py", "ranks", "--data", "DATA", "--preset", arguments.preset, *given]
        result = result_of(
            DataFolder.open(arguments.data).index,
            what="a training step on several ranks of one machine beside the same step on one; medians of rounds",
            command=shlex.join([*command, *(["--", *arguments.flags] if arguments.flags else [])]),
            seeds=[config.seed],
            wall_seconds=round(time.monotonic() - started, 1),
            figures=figures,
            row=RANKS_ROW,
        )
        write_result(arguments.json, result)


DECODE_ROW = {
    "what": "decoding, beam {figures[beam_size]}, `{figures[precision]}`; {figures[unit]}, beside peers in the same "
    "run",
    "steps": "—",
    "result": "{figures[contenders][ours][sentences_per_second][median]:,.1f}, which is",
}


def run_decode(arguments: argparse.Namespace) -> None:
    sources, references = (list(read_lines(file)) for file in (arguments.src, arguments.ref))
    settings = DecodeBenchmark(
        model=arguments.model, sources=sources[: arguments.sentences], references=references[: arguments.sentences],
        peers=tuple(arguments.peers), rounds=arguments.rounds, beam_size=arguments.beam,
        precision=arguments.precision,
    )  # fmt: skip
    started = time.monotonic()
    with process_group(read_world()) as device:
        figures = run_decoding_benchmark(settings, device, say)
    print(decode_table(figures))
    if arguments.json is not None:
        peers = [name for name in figures["contenders"] if name != "ours"]
        beside = ", ".join(
            f"{{figures[contenders][{name}][ours_to_this][median]:.2f}}× {DECODE_LABELS[name]}" for name in peers
        )
        info = read_model_info(arguments.model)
        flags = ["--peers", *peers, f"--rounds={settings.rounds}", f"--beam={settings.beam_size}"]
        flags += [f"--precision={settings.precision}"] if settings.precision else []
        command = ["python", "tools/benchmark.py", "decode", "--model", "MODEL", "--src", "SRC", "--ref", "REF", *flags]
        result = result_of(
            info,
            what=f"decoding beside peers, in turns, on the same weights; {figures['unit']}; medians of rounds",
            command=shlex.join([*command, f"--sentences={len(settings.sources)}"]),
            seeds=[],
            wall_seconds=round(time.monotonic() - started, 1),
            figures=figures,
            row={**DECODE_ROW, "result": f"{DECODE_ROW['result']} {beside}"},
        )
        write_result(arguments.json, result)
    if not figures["scores_agree"]:
        raise UserError("the BLEU scores part: what was measured is not the same work")


COST_ROW = {
    "what": "one training step of width {figures[base][width]} on {figures[base][tokens]:,} tokens, under plain torch",
    "steps": "—",
    "result": "{figures[base][step_seconds][median]:.4f} {figures[unit]}, {figures[base][peak_mib]:,.0f} MiB",
}


def run_cost(arguments: argparse.Namespace) -> None:
    started = time.monotonic()
    with process_group(World()) as device:
        figures = run_cost_curve(curve_of(device, repeats=arguments.repeats), device, say)
    print(cost_table(figures))
    if arguments.json is not None:
        result = result_of(
            None,
            what="time and memory of a step against model size, sentence length and tokens at once; modelled scaling",
            command=f"python tools/benchmark.py cost --repeats={arguments.repeats}",
            seeds=[],
            wall_seconds=round(time.monotonic() - started, 1),
            figures=figures,
            row=COST_ROW,
        )
        write_result(arguments.json, result)


def run_data(arguments: argparse.Namespace) -> None:
    settings = DataBenchmark(
        data=arguments.data, seconds=arguments.seconds, repeats=arguments.repeats,
        pairs=arguments.pairs, text_pairs=arguments.text_pairs, memory_pairs=arguments.memory_pairs,
        seed=arguments.seed,
    )  # fmt: skip
    started = time.monotonic()
    figures = run_data_benchmark(settings, say)
    if arguments.json is not None:
        flags = [f"--{name.replace('_', '-')}={getattr(settings, name):g}" for name in ("seconds", "repeats")]
        counts = ("pairs", "text_pairs", "memory_pairs", "seed")
        flags += [f"--{name.replace('_', '-')}={getattr(settings, name)}" for name in counts]
        result = result_of(
            DataFolder.open(arguments.data).index,
            what="the data pipeline beside its peers, one process and one thread, target tokens a CPU second; medians",
            # Without folders: a result says nothing of where it was made.
            command=shlex.join(["python", "tools/benchmark.py", "data", "--data", "DATA", *flags]),
            seeds=[settings.seed],
            wall_seconds=round(time.monotonic() - started, 1),
            figures=figures,
            row=DATA_ROW,
        )
        write_result(arguments.json, result)
    print(data_table(figures))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    # DeepSpeed's launcher adds this one; the environment says the same.
    parser.add_argument("--local_rank", type=int, help=argparse.SUPPRESS)
    parts = parser.add_subparsers(title="what to measure", required=True, metavar="PART")
    data = parts.add_parser(
        "data",
        help="planning, reading, building and preparing, beside `datasets` and `tokenizers`",
        description="Planning, reading, building and preparing, beside `datasets` and `tokenizers`: one process, one "
        "thread. Rates are target tokens a CPU second.",
        allow_abbrev=False,
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
    data.add_argument("--json", type=Path, metavar="OUT", help="also write a result file (default: do not)")
    data.set_defaults(run=run_data)
    add_train_parser(parts)
    add_ranks_parser(parts)
    add_decode_parser(parts)
    add_learn_parser(parts)
    add_cost_parser(parts)
    return parser.parse_args()


def add_train_parser(parts: Any) -> None:
    training = parts.add_parser(
        "train",
        help="training steps, beside torch.nn.Transformer, MarianMTModel and plain torch",
        description="Training steps on real text, in turns. The unit is real target tokens, padding not counted, a "
        "second: of CPU time without a GPU, of wall time with one. Exits 1 when the losses of the contenders part.",
        allow_abbrev=False,
    )
    training.add_argument("--data", type=Path, required=True, help="data folder")
    training.add_argument("--preset", default="tiny", help="model and batch (default: %(default)s)")
    training.add_argument(
        "--peers", nargs="*", default=[name for name in LABELS if name != "ours"], metavar="P",
        help="; ".join(f"{name}: {label}" for name, label in LABELS.items() if name != "ours") + " (default: all)",
    )  # fmt: skip
    training.add_argument("--steps", type=int, default=10, metavar="N", help="optimizer steps of each in each round")
    training.add_argument("--rounds", type=int, default=6, metavar="N", help="rounds; medians are reported")
    training.add_argument("--json", type=Path, metavar="OUT", help="also write a result file (default: do not)")
    training.add_argument("flags", nargs="*", metavar="-- FLAGS", help="of dist_transformer.train, for all")
    training.set_defaults(run=run_train)


def add_ranks_parser(parts: Any) -> None:
    several = parts.add_parser(
        "ranks",
        help="training steps on several ranks, beside the same steps on one",
        description="The same training steps on one rank and on several of this machine, one thread each, in turns: "
        "seconds of a step by the wall's clock, and the share of it that is not work but communication and waiting.",
        allow_abbrev=False,
    )
    several.add_argument("--data", type=Path, required=True, help="data folder")
    several.add_argument("--preset", default="tiny", help="model and batch (default: %(default)s)")
    several.add_argument("--ranks", type=int, default=2, metavar="N", help="ranks (default: %(default)s)")
    several.add_argument("--steps", type=int, default=20, metavar="N", help="optimizer steps of each in each round")
    several.add_argument("--rounds", type=int, default=4, metavar="N", help="rounds; medians are reported")
    several.add_argument("--json", type=Path, metavar="OUT", help="also write a result file (default: do not)")
    several.add_argument("flags", nargs="*", metavar="-- FLAGS", help="of dist_transformer.train")
    several.set_defaults(run=run_ranks)


def add_learn_parser(parts: Any) -> None:
    learning = parts.add_parser(
        "learn",
        help="a model that was trained for some minutes, to measure with",
        description="Train in one process for some minutes, without checkpoints, and write a model folder.",
        allow_abbrev=False,
    )
    learning.add_argument("--data", type=Path, required=True, help="data folder")
    learning.add_argument("--preset", default="tiny", help="model and batch (default: %(default)s)")
    learning.add_argument("--minutes", type=float, default=5.0, metavar="M", help="of training (default: %(default)s)")
    learning.add_argument("--out", type=Path, required=True, metavar="MODEL", help="model folder")
    learning.add_argument("--json", type=Path, metavar="OUT", help="also write a result file (default: do not)")
    learning.add_argument("flags", nargs="*", metavar="-- FLAGS", help="of dist_transformer.train")
    learning.set_defaults(run=run_learn)


def add_cost_parser(parts: Any) -> None:
    cost = parts.add_parser(
        "cost",
        help="time and memory of a step against model size, sentence length and tokens at once",
        description="Steps of models of several sizes on random sentences, under plain torch, each point in a process "
        "of its own; and what 16 nodes of 8 GPUs would reach, which is a model and no measurement.",
        allow_abbrev=False,
    )
    cost.add_argument("--repeats", type=int, default=5, metavar="N", help="measures of each point (default: 5)")
    cost.add_argument("--json", type=Path, metavar="OUT", help="also write a result file (default: do not)")
    cost.set_defaults(run=run_cost)


def add_decode_parser(parts: Any) -> None:
    decoding = parts.add_parser(
        "decode",
        help="beam search, beside Hugging Face's generate and CTranslate2",
        description="Beam search with the same weights, in turns. The unit is sentences a second: of CPU time without "
        "a GPU, of wall time with one. Exits 1 when the BLEU scores part.",
        allow_abbrev=False,
    )
    decoding.add_argument("--model", type=Path, required=True, help="model folder")
    for name, what in (("src", "source"), ("ref", "reference")):
        decoding.add_argument(f"--{name}", type=Path, required=True, metavar="F", help=f"{what}, one sentence a line")
    decoding.add_argument("--sentences", type=int, metavar="N", help="only the first N (default: all)")
    decoding.add_argument(
        "--peers", nargs="*", default=[name for name in DECODE_LABELS if name != "ours"], metavar="P",
        help="; ".join(f"{name}: {label}" for name, label in DECODE_LABELS.items() if name != "ours")
        + " (default: all)",
    )  # fmt: skip
    decoding.add_argument(
        "--beam", type=int, default=4, metavar="K", help="hypotheses in search (default: %(default)s)"
    )
    decoding.add_argument(
        "--precision", choices=tuple(PRECISIONS), help="of all (default: fp32 on a CPU, bf16 on a GPU)"
    )  # fmt: skip
    decoding.add_argument("--rounds", type=int, default=4, metavar="N", help="rounds; medians are reported")
    decoding.add_argument("--json", type=Path, metavar="OUT", help="also write a result file (default: do not)")
    decoding.set_defaults(run=run_decode)


if __name__ == "__main__":
    exit_on_user_error(main)
