"""Run the benchmarks that this machine can, beside peers, into results/bench-DEVICE.json and a picture of the rates.

The text is that of a folder of corpora (--data, or the environment's DIST_TRANSFORMER_DATA):

    mix_en_de/train.{en,de}               to train on
    newstest/newstest2014.{en,de}         to decode
    multi30k/test_2016_flickr.{en,de}

DEVICE is cpu, or the GPU's short name. Parts that are measured again replace their figures in the file. Rates are for a
second of CPU time where there is no GPU, which other work on the machine changes little. tools/results_table.py brings
the README's table up to date.
"""

import argparse
import sys
from pathlib import Path

from dist_transformer.benchmarks.suite import CORPORA, Suite, device_name, find_corpora, machine_load, merge
from dist_transformer.errors import exit_on_user_error

PARTS = ("data", "train", "decode", "cost")


def main() -> None:
    arguments = parse_arguments()
    corpora = find_corpora(arguments.data)
    if corpora is None:
        print(f"no corpus: name the folder of corpora by --data or {CORPORA}; nothing is measured", file=sys.stderr)
        return
    device, load = device_name(), machine_load()
    preset, vocab_size, minutes = ("tiny", 8000, 5) if device == "cpu" else ("base", 37000, 2)
    suite = Suite(corpora=corpora, work=arguments.work, vocab_size=vocab_size)
    suite.prepare()
    commands: dict[str, list[object]] = {
        "data": ["data", "--data", suite.data, "--seconds", 1],
        "train": ["train", "--data", suite.data, "--preset", preset],
        "cost": ["cost"],
    }
    for part in arguments.parts:
        if part == "decode":
            model = arguments.model or suite.model(preset, minutes=minutes)
            test_set = suite.test_set("test_2016_flickr")
            commands["decode"] = ["decode", "--model", model, *test_set, "--sentences", 200]
        result = suite.measure(part, *commands[part])
        merge(
            arguments.out / f"bench-{device}.json", {part: result},
            what="`make bench`: beside peers, in turns, in the same run", load=load,
        )  # fmt: skip


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--data", type=Path, help=f"folder of corpora (default: {CORPORA})")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, help="what to measure (default: all)")
    parser.add_argument("--model", type=Path, help="model folder to decode with (default: trained for some minutes)")
    parser.add_argument(
        "--work", type=Path, default=Path("runs/bench"), help="for data folder and model (default: %(default)s)"
    )
    parser.add_argument("--out", type=Path, default=Path("results"), help="folder of the result (default: %(default)s)")
    return parser.parse_args()


if __name__ == "__main__":
    exit_on_user_error(main)
