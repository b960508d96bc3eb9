"""Run the benchmarks that this machine supports, and write results/bench-DEVICE.json and a picture of the rates.

A part that has peers measures them in the same run. The text comes from a folder of corpora, which --data or the
environment variable DIST_TRANSFORMER_DATA names:

    mix_en_de/train.{en,de}                          to measure training
    multi30k/{train,val,test_2016_flickr}.{en,de}    to train the models that decode, and to decode

DEVICE is `cpu-` and the processor, or the GPU's short name. A part that is measured again replaces its figures in the
file. Without a GPU, rates are per second of CPU time, because other work on the machine changes that only a little.
tools/results_table.py updates the tables of README.md and docs/.
"""

import argparse
import sys
from pathlib import Path

from benchmarks.suite import (
    CORPORA,
    Suite,
    device_name,
    find_corpora,
    machine_load,
    merge,
)

PARTS = ("start", "data", "train-tiny", "train-base", "decode-tiny", "decode-base", "cost")
# The models that decode, trained on Multi30k: a vocabulary, and flags of training. They end their sentences.
_TRANSLATORS: dict[str, tuple[int, list[object]]] = {
    "tiny": (6000, ["--max-steps", 1600]),
    # Small steps without dropout, because a core of a CPU computes 480 tokens per second.
    "base": (
        8000,
        [
            *("--max-steps", 7500, "--save-every", 100, "--validate-every", 750, "--validate-sentences", 100),
            *("--batch.max-target-tokens", 512, "--batch.packs-per-step", 1, "--model.dropout", 0),
            *("--optimizer.schedule", "cosine", "--optimizer.peak-lr", 2e-4, "--optimizer.min-lr", 1e-5),
            *("--optimizer.warmup-steps", 100),
        ],
    ),
}
# One pack per step, because a step of the preset's 25,088 tokens takes a core of a CPU most of a minute.
_CPU_STEP: list[object] = ["--batch.packs-per-step", 1, "--batch.max-target-tokens", 2048]
# All peers except DeepSpeed's own defaults, which the part for `tiny` measures.
_CPU_PEERS = ("plain", "torch", "trainer", "compiled")


def main() -> None:
    arguments = parse_arguments()
    corpora = find_corpora(arguments.data)
    if corpora is None:
        remedy = f"name the folder of corpora with --data or {CORPORA}"
        print(f"nothing is measured, because there is no corpus: {remedy}", file=sys.stderr)
        return
    device, load = device_name(), machine_load()
    on_cpu = device.startswith("cpu-")
    suite = Suite(corpora=corpora, work=arguments.work, vocab_size=8000 if on_cpu else 37000)
    suite.prepare()
    arguments.out.mkdir(parents=True, exist_ok=True)
    for part in arguments.parts:
        result = suite.measure(part, *command_of(part, suite, on_cpu=on_cpu))
        merge(
            arguments.out / f"bench-{device}.json",
            {part: result},
            what="`make bench`: compared with peers, in turns, in the same run",
            load=load,
        )


def command_of(part: str, suite: Suite, *, on_cpu: bool) -> list[object]:
    """Give the flags of tools/benchmark.py. A CPU measures few steps of base."""
    name, _, preset = part.partition("-")
    if name in ("cost", "start"):
        return [name]
    if name == "decode":
        vocab_size, flags = _TRANSLATORS[preset]
        model = suite.translator(preset, vocab_size=vocab_size, flags=flags)
        sentences = 200 if on_cpu and preset == "base" else 1000
        return ["decode", "--model", model, *suite.test_set("test_2016_flickr"), "--sentences", sentences]
    command: list[object] = [name, "--data", suite.data]
    if name == "data":
        return [*command, "--seconds", 1]
    if on_cpu and preset == "base":
        return [*command, "--preset", preset, "--steps", 4, "--rounds", 4, "--peers", *_CPU_PEERS, "--", *_CPU_STEP]
    # Compute a whole step at once, as the peers do.
    at_once = ["--", "--batch.packs-per-micro-batch", 2] if preset == "tiny" else []
    return [*command, "--preset", preset, *at_once]


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--data", type=Path, help=f"folder of corpora (default: {CORPORA})")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, help="what to measure (default: all)")
    parser.add_argument(
        "--work", type=Path, default=Path("runs/bench"), help="for data folder and models (default: %(default)s)"
    )
    parser.add_argument("--out", type=Path, default=Path("results"), help="folder of the result (default: %(default)s)")
    return parser.parse_args()
