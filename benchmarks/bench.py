"""Run the benchmarks that this machine can, beside peers, into results/bench-DEVICE.json and a picture of the rates.

The text is that of a folder of corpora (--data, or the environment's DIST_TRANSFORMER_DATA):

    mix_en_de/train.{en,de}               to train on
    newstest/newstest2014.{en,de}         to decode
    multi30k/test_2016_flickr.{en,de}

DEVICE is cpu, or the GPU's short name. Parts that are measured again replace their figures in the file. Rates are for a
second of CPU time where there is no GPU, which other work on the machine changes little. tools/results_table.py brings
the tables of README.md and docs/ up to date.
"""

import argparse
import sys
from pathlib import Path

from benchmarks.suite import (
    CORPORA,
    Suite,
    brief_schedule,
    device_name,
    find_corpora,
    machine_load,
    merge,
)

PARTS = ("data", "train-tiny", "train-base", "ranks", "decode-tiny", "decode-base", "cost")
# Of training before decoding is measured: enough to end its sentences, and to be given a score.
_MINUTES = {"tiny": 5, "base": 30}
# One pack a step. For the peer that pads most, to six times the tokens, twice as large a one does not fit 24 GiB.
_CPU_STEP: list[object] = ["--batch.packs-per-step", 1, "--batch.max-target-tokens", 2048]
_CPU_LEARNING: list[object] = ["--batch.packs-per-step", 1, "--batch.max-target-tokens", 4096]
# All but DeepSpeed's own defaults, which `tiny` shows.
_CPU_PEERS = ("plain", "torch", "trainer", "compiled")


def main() -> None:
    arguments = parse_arguments()
    corpora = find_corpora(arguments.data)
    if corpora is None:
        print(f"no corpus: name the folder of corpora by --data or {CORPORA}; nothing is measured", file=sys.stderr)
        return
    device, load = device_name(), machine_load()
    suite = Suite(corpora=corpora, work=arguments.work, vocab_size=8000 if device == "cpu" else 37000)
    suite.prepare()
    for part in arguments.parts:
        if part == "ranks" and device != "cpu":
            print("ranks: left out, it compares processes of one CPU thread each", file=sys.stderr)
            continue
        result = suite.measure(part, *command_of(part, suite, on_cpu=device == "cpu"))
        merge(
            arguments.out / f"bench-{device}.json",
            {part: result},
            what="`make bench`: beside peers, in turns, in the same run",
            load=load,
        )


def command_of(part: str, suite: Suite, *, on_cpu: bool) -> list[object]:
    """Flags of tools/benchmark.py. A CPU measures few steps of base: torch.nn.Transformer takes a minute each."""
    name, _, preset = part.partition("-")
    if name == "cost":
        return ["cost"]
    if name == "decode":
        # Small steps, of which its minutes hold hundreds.
        small = [*_CPU_LEARNING, *brief_schedule(peak_lr=5e-4, warmup_steps=400)]
        flags = small if on_cpu and preset == "base" else brief_schedule()
        model = suite.model(preset, minutes=_MINUTES[preset], flags=flags)
        return ["decode", "--model", model, *suite.test_set("test_2016_flickr"), "--sentences", 200]
    command: list[object] = [name, "--data", suite.data]
    if name == "data":
        return [*command, "--seconds", 1]
    if name == "ranks":
        return [*command, "--preset", "multi30k"]
    if on_cpu and preset == "base":
        return [*command, "--preset", preset, "--steps", 1, "--rounds", 4, "--peers", *_CPU_PEERS, "--", *_CPU_STEP]
    # All compute a step at once, as the peers do.
    at_once = ["--", "--batch.packs-per-micro-batch", 2] if preset == "tiny" else []
    return [*command, "--preset", preset, *at_once]


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--data", type=Path, help=f"folder of corpora (default: {CORPORA})")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, help="what to measure (default: all)")
    parser.add_argument(
        "--work", type=Path, default=Path("runs/bench"), help="for data folder and model (default: %(default)s)"
    )
    parser.add_argument("--out", type=Path, default=Path("results"), help="folder of the result (default: %(default)s)")
    return parser.parse_args()
