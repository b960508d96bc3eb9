"""Measures how long a user waits before a command says something.

python -m benchmarks.start --json results/start.json [--demo]

Each command is a process of its own, and they run in turns. The first step of `tiny` is timed from the start of the
process to the line of its step; with `--demo`, the whole of `dist-transformer demo` is timed, too.
"""

import argparse
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.measure import result_of, write_result
from dist_transformer.base.errors import UserError, exit_on_user_error

_PROGRAM = ("-m", "dist_transformer")
_TRAIN = ("train", "--preset", "tiny", "--data", "data", "--max-steps", "1", "--log-every", "1", "--run-dir")
WAITS = {
    "import tyro": ("-c", "import tyro"),
    "import torch": ("-c", "import torch"),
    "--help": (*_PROGRAM, "--help"),
    "train --help": (*_PROGRAM, "train", "--help"),
    "a wrong flag of train": (*_PROGRAM, "train", "--wrong"),
    "a wrong flag of translate": (*_PROGRAM, "translate", "--wrong"),
}
FIRST_STEP, DEMO = "the first step of tiny", "demo"


def seconds_of(words: tuple[str, ...], folder: str, *, until: str | None = None) -> float:
    """Time a process to its end, or until it prints a text."""
    began, seen = time.monotonic(), None
    with subprocess.Popen(
        [sys.executable, *words], cwd=folder, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if until is not None and seen is None and until in line:
                seen = time.monotonic() - began
    if until is None:
        return time.monotonic() - began
    if seen is None:
        raise UserError(f"{shlex.join(words)} did not print {until!r}: run it by hand")
    return seen


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, required=True, metavar="FILE", help="file of the result")
    parser.add_argument("--rounds", type=int, default=5, metavar="N")
    parser.add_argument("--demo", action="store_true", help="also time the demo, once")
    arguments = parser.parse_args()
    began = time.monotonic()
    found: dict[str, list[float]] = {name: [] for name in (*WAITS, FIRST_STEP)}
    with tempfile.TemporaryDirectory(prefix="dist_transformer-benchmark-") as folder:
        seconds_of((*_PROGRAM, "prepare", "--toy", "2000", "--vocab-size", "400", "--out", "data"), folder)
        for number in range(arguments.rounds):
            for name, words in WAITS.items():
                found[name].append(seconds_of(words, folder))
            found[FIRST_STEP].append(seconds_of((*_PROGRAM, *_TRAIN, f"run{number}"), folder, until="step 1"))
        if arguments.demo:
            found[DEMO] = [seconds_of((*_PROGRAM, "demo"), folder)]
    result = result_of(
        None,
        what="seconds until a command answers",
        command=f"python -m benchmarks.start {shlex.join(sys.argv[1:])}",
        seeds=[],
        wall_seconds=round(time.monotonic() - began, 1),
        figures={
            "seconds": {name: [round(value, 2) for value in values] for name, values in found.items()},
            "median": {name: round(statistics.median(values), 2) for name, values in found.items()},
        },
        rows=[],
    )
    write_result(arguments.json, result)


if __name__ == "__main__":
    exit_on_user_error(main)
