"""Measure a part of dist_transformer on this machine, side by side with its peers.

tools/benchmark.py data --data data/mine --json results/data.json
tools/benchmark.py train --data data/mine --preset tiny --json results/bench-cpu-tiny.json
tools/benchmark.py decode --model runs/mine/model --src test.en --ref test.de
tools/benchmark.py step --data data/mine --preset big -- --compile on
tools/benchmark.py kernels --preset big
tools/benchmark.py race --data data/mine --work runs/race --pymarian marian/bin/pymarian --eole eole/bin/eole
tools/benchmark.py stall --data data/mine --preset base --rate 600000
deepspeed --num_gpus 2 tools/benchmark.py train --data data/mine --peers stock plain

Prints a table; --json also writes a result file in the layout of tools/results_table.py.
"""

import argparse
import dataclasses
import shlex
import sys
import time
from collections.abc import Sequence
from typing import Any

from benchmarks.data import DataBenchmark, data_table, run_data_benchmark
from benchmarks.decoding import DecodeBenchmark, decode_table, run_decoding_benchmark
from benchmarks.flags import Measure, parse_arguments
from benchmarks.kernels import KernelBenchmark, kernel_table, run_kernel_benchmark
from benchmarks.measure import result_of, vector_units, write_result
from benchmarks.race.picture import race_picture
from benchmarks.race.race import SHOWN_GOALS, Race, race_table
from benchmarks.race.text import RaceText
from benchmarks.race.toolkits import TOOLKITS
from benchmarks.rows import DATA_ROW, STEP_ROW, Row, decode_row, race_rows, start_rows, train_row
from benchmarks.start import StartBenchmark, run_start_benchmark, start_table
from benchmarks.training.cost_curve import cost_table, curve_of, run_cost_curve
from benchmarks.training.field import (
    TrainBenchmark,
    run_training_benchmark,
    train_table,
)
from benchmarks.training.learning import learn
from benchmarks.training.stall import StallBenchmark, run_stall_benchmark, stall_table
from benchmarks.training.step import StepBenchmark, run_step_benchmark, step_table
from dist_transformer.base.errors import UserError
from dist_transformer.base.files import write_file
from dist_transformer.config.flags import parse_training
from dist_transformer.config.presets import PRESETS
from dist_transformer.config.settings import TrainConfig
from dist_transformer.data.folder.format import DataIndex
from dist_transformer.data.folder.reader import DataFolder
from dist_transformer.data.text.lines import read_lines
from dist_transformer.model_folder import ModelInfo, read_model_info
from dist_transformer.run.environment import describe_environment
from dist_transformer.runtime.process_group import process_group
from dist_transformer.runtime.world import World, read_world

DATA = ("--data", "DATA")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """Figures of a part, and what its result file needs besides them."""

    what: str
    figures: dict[str, Any]
    given: Sequence[object]
    """Flags of the part, without folders, because a result does not mention folders of this machine."""
    table: str | None = None
    rows: Sequence[Row] = ()
    text: DataIndex | ModelInfo | None = None
    """Index of the data folder or model that names the corpus."""
    seeds: Sequence[int] = ()
    wall_seconds: float | None = None
    """Time of a measurement in several calls, if it is not that of this one."""
    flaw: str | None = None
    """Reason why the figures are wrong, if they are."""


def main() -> None:
    arguments = parse_arguments(__doc__, MEASURES)
    if arguments.json is not None and not arguments.json.absolute().parent.is_dir():
        raise UserError(f"--json {arguments.json} is in no folder that exists: make the folder first")
    started = time.monotonic()
    measured: Measured | None = arguments.measure(arguments)
    if measured is None:
        return
    if measured.table is not None:
        print(measured.table)
    if arguments.json is not None:
        command = ["python", "tools/benchmark.py", arguments.part, *map(str, measured.given)]
        result = result_of(
            measured.text,
            what=measured.what,
            command=shlex.join([*command, *(["--", *arguments.flags] if arguments.flags else [])]),
            seeds=measured.seeds,
            wall_seconds=round(measured.wall_seconds or time.monotonic() - started, 1),
            figures=measured.figures,
            rows=measured.rows,
        )
        write_result(arguments.json, result)
    if measured.flaw is not None:
        raise UserError(measured.flaw)


def config_of(arguments: argparse.Namespace) -> TrainConfig:
    """Apply the training flags of the command line to the preset."""
    if not arguments.flags and arguments.preset in PRESETS:
        return PRESETS[arguments.preset].changed(data=(str(arguments.data),))
    flags = ["--preset", arguments.preset, "--data", str(arguments.data), "--run-dir", "unused", *arguments.flags]
    return parse_training(flags)[0]


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def measure_learning(arguments: argparse.Namespace) -> Measured:
    config = config_of(arguments)
    with process_group(World(), single=True) as device:
        figures = learn(config, minutes=arguments.minutes, out=arguments.out, device=device, report=say)
    return Measured(
        what="a model after some minutes of training",
        figures=figures,
        given=[*DATA, "--preset", arguments.preset, f"--minutes={arguments.minutes:g}", "--out", "MODEL"],
        text=DataFolder.open(arguments.data).index,
        seeds=[config.seed],
    )


def measure_training(arguments: argparse.Namespace) -> Measured | None:
    """Measure training. The result is on rank 0; other ranks return None."""
    config = config_of(arguments)
    settings = TrainBenchmark(
        config=config, peers=tuple(arguments.peers), steps=arguments.steps, rounds=arguments.rounds
    )
    world = read_world()

    def report(line: str) -> None:
        if world.is_main:
            say(line)

    with process_group(world, single=True) as device:
        figures = {"preset": arguments.preset, **run_training_benchmark(settings, world, device, report)}
    if not world.is_main:
        return None
    _, *peers = figures["contenders"]
    counts = [f"--{name}={getattr(settings, name)}" for name in ("steps", "rounds")]
    flaw = "the losses of the contenders differ: they did not do the same work (see nll in --json)"
    return Measured(
        what=f"training compared with peers, in turns; {figures['unit']}; medians of rounds",
        figures=figures,
        given=[*DATA, "--preset", arguments.preset, "--peers", *peers, *counts],
        table=train_table(figures),
        rows=[train_row([*figures["contenders"]], gpu=device.type == "cuda")],
        text=DataFolder.open(arguments.data).index,
        seeds=[config.seed],
        flaw=None if figures["loss_curves_agree"] else flaw,
    )


def measure_stall(arguments: argparse.Namespace) -> Measured:
    config = config_of(arguments)
    settings = StallBenchmark(config=config, rate=arguments.rate, seconds=arguments.seconds)
    figures = {"preset": arguments.preset, **run_stall_benchmark(settings, say)}
    return Measured(
        what="waits for data in a training at a given speed, whose steps only sleep",
        figures=figures,
        given=[*DATA, "--preset", arguments.preset, f"--rate={settings.rate:g}", f"--seconds={settings.seconds:g}"],
        table=stall_table(figures),
        seeds=[config.seed],
    )


def measure_step(arguments: argparse.Namespace) -> Measured:
    config = config_of(arguments)
    settings = StepBenchmark(config=config, steps=arguments.steps, rounds=arguments.rounds)
    with process_group(World(), single=True) as device:
        figures = {"preset": arguments.preset, **run_step_benchmark(settings, device, say)}
    return Measured(
        what="a training step taken apart: kinds of kernels, launches, waits, memory",
        figures=figures,
        given=[
            *DATA,
            *("--preset", arguments.preset),
            *(f"--{name}={getattr(settings, name)}" for name in ("steps", "rounds")),
        ],
        table=step_table(figures),
        rows=[STEP_ROW],
        text=DataFolder.open(arguments.data).index,
        seeds=[config.seed],
    )


def measure_kernels(arguments: argparse.Namespace) -> Measured:
    settings = KernelBenchmark(preset=arguments.preset, vocab_size=arguments.vocab_size, tokens=arguments.tokens)
    with process_group(World(), single=True) as device:
        figures = {"preset": arguments.preset, **run_kernel_benchmark(settings, device, say)}
    return Measured(
        what="the kernels of a training step, each alone, forward and backward; medians",
        figures=figures,
        given=["--preset", arguments.preset, "--vocab-size", settings.vocab_size, "--tokens", settings.tokens],
        table=kernel_table(figures),
        seeds=[1],
    )


def measure_decoding(arguments: argparse.Namespace) -> Measured:
    sources, references = (list(read_lines(file)) for file in (arguments.src, arguments.ref))
    settings = DecodeBenchmark(
        model=arguments.model,
        sources=sources[: arguments.sentences],
        references=references[: arguments.sentences],
        peers=tuple(arguments.peers),
        rounds=arguments.rounds,
        beam_size=arguments.beam,
        precision=arguments.precision,
    )
    with process_group(read_world()) as device:
        figures = run_decoding_benchmark(settings, device, say)
    peers = [name for name in figures["contenders"] if name != "ours"]
    flaw = "the BLEU scores differ: the contenders did not do the same work"
    return Measured(
        what=f"decoding compared with peers, in turns, on the same weights; {figures['unit']}; medians of rounds",
        figures=figures,
        given=[
            *("--model", "MODEL", "--src", "SRC", "--ref", "REF", "--peers", *peers),
            *(f"--rounds={settings.rounds}", f"--beam={settings.beam_size}"),
            *([f"--precision={settings.precision}"] if settings.precision else []),
            f"--sentences={len(settings.sources)}",
        ],
        table=decode_table(figures),
        rows=[decode_row([*figures["contenders"]], gpu=device.type == "cuda")],
        text=read_model_info(arguments.model),
        flaw=None if figures["scores_agree"] else flaw,
    )


def measure_costs(arguments: argparse.Namespace) -> Measured:
    with process_group(World()) as device:
        figures = run_cost_curve(curve_of(device, repeats=arguments.repeats), device, say)
    return Measured(
        what="time and memory of a step against model size, sentence length and tokens at once; modelled scaling",
        figures=figures,
        given=[f"--repeats={arguments.repeats}"],
        table=cost_table(figures),
    )


def measure_data(arguments: argparse.Namespace) -> Measured:
    settings = DataBenchmark(
        data=arguments.data,
        seconds=arguments.seconds,
        repeats=arguments.repeats,
        pairs=arguments.pairs,
        text_pairs=arguments.text_pairs,
        memory_pairs=arguments.memory_pairs,
        seed=arguments.seed,
    )
    figures = run_data_benchmark(settings, say)
    names = ("seconds", "repeats", "pairs", "text_pairs", "memory_pairs", "seed")
    return Measured(
        what="the data pipeline compared with peers, one process and one thread, target tokens per CPU second; medians",
        figures=figures,
        given=[*DATA, *(f"--{name.replace('_', '-')}={getattr(settings, name)}" for name in names)],
        table=data_table(figures),
        rows=[DATA_ROW],
        text=DataFolder.open(arguments.data).index,
        seeds=[settings.seed],
    )


def measure_race(arguments: argparse.Namespace) -> Measured:
    text = RaceText(DataFolder.open(arguments.data), arguments.work / "text")
    if not text.valid.exists():
        text.write()
    programs = {"marian": arguments.pymarian, "eole": arguments.eole}
    toolkits = {name: TOOLKITS[name](text=text, program=programs.get(name)) for name in arguments.toolkits}
    race = Race(
        toolkits=toolkits,
        work=arguments.work,
        size=arguments.size,
        rates=tuple((float(peak), int(warm_up)) for peak, warm_up in (text.split("/") for text in arguments.rates)),
        grid_steps=arguments.grid_steps,
        seeds=tuple(arguments.seeds),
        steps=arguments.steps,
        every=arguments.every,
        report=say,
    )
    race.run()
    figures = race.figures()
    if arguments.json is not None:
        machine = f"{describe_environment()['processor']} with {vector_units()}; one thread; {text.data.index.corpus}"
        write_file(arguments.json.with_suffix(".png"), race_picture(figures, note=machine))
    return Measured(
        what="how long toolkits train until greedy translations of the validation text reach a BLEU score",
        figures=figures,
        given=[
            *(*DATA, "--work", "RACE", "--size", arguments.size, "--toolkits", *toolkits),
            *("--rates", *arguments.rates, "--grid-steps", race.grid_steps),
            *("--seeds", *race.seeds, "--steps", race.steps, "--every", race.every),
        ],
        table=race_table(figures),
        rows=race_rows(figures, SHOWN_GOALS),
        wall_seconds=sum(found.get("wall_seconds", 0) for found in figures["toolkits"].values()),
        text=text.data.index,
        seeds=race.seeds,
    )


def measure_start(arguments: argparse.Namespace) -> Measured:
    settings = StartBenchmark(rounds=arguments.rounds, demo=arguments.demo)
    figures = run_start_benchmark(settings, say)
    return Measured(
        what="seconds until a command answers, CPU seconds and peak memory of one process; medians of rounds",
        figures=figures,
        given=[f"--rounds={settings.rounds}", *(["--demo"] if settings.demo else [])],
        table=start_table(figures),
        rows=start_rows([*figures["waits"]]),
    )


MEASURES: dict[str, Measure] = {
    "cost": measure_costs,
    "data": measure_data,
    "decode": measure_decoding,
    "kernels": measure_kernels,
    "learn": measure_learning,
    "race": measure_race,
    "stall": measure_stall,
    "start": measure_start,
    "step": measure_step,
    "train": measure_training,
}
