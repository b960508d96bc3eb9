"""Everything that needs a GPU, in parts of at most 8 minutes, into results/gpu-check-DEVICE.json.

    tests    the tests that are marked gpu
    train    training of big and base beside peers, in bf16
    decode   beam search beside peers
    bleu     base, trained for 5 minutes, and its BLEU on newstest2014 and on Multi30k's test_2016_flickr

Parts that are measured again replace their figures in the file. It downloads and installs nothing: packages that are
missing are named, and what needs them is left out. The text is that of the folder of corpora that DIST_TRANSFORMER_DATA
or --data names, as in tools/bench.py. Without a GPU it says so and exits 0. tools/results_table.py brings the
tables of README.md and docs/ up to date.
"""

import argparse
import importlib.util
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dist_transformer.errors import UserError

# The library is imported late: a machine that lacks a package is told so in a sentence.
PARTS = ("tests", "train", "decode", "bleu")
Results = Iterator[tuple[str, dict[str, Any]]]
_NEEDED = ("torch", "numpy", "pyarrow", "tokenizers", "safetensors", "sacrebleu", "tqdm", "matplotlib")
_USEFUL = ("deepspeed", "transformers", "accelerate", "datasets", "ctranslate2", "pytest", "hypothesis", "tyro")
_PART_SECONDS = 8 * 60
_VOCAB_SIZE = 37_000


def main() -> None:
    arguments = parse_arguments()
    missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise UserError(f"{sys.executable} lacks {', '.join(missing)}: install them, or name another by PYTHON=")
    import torch

    if not torch.cuda.is_available():
        say("there is no GPU here: nothing is checked")
        return
    if absent := [name for name in _USEFUL if importlib.util.find_spec(name) is None]:
        say(f"not installed, so what needs them is left out: {', '.join(absent)}")
    from benchmarks.suite import CORPORA, Suite, device_name, find_corpora, merge

    file = arguments.out / f"gpu-check-{device_name()}.json"
    for part in arguments.part or PARTS:
        deadline = time.monotonic() + _PART_SECONDS
        if part == "tests":
            results = run_tests(_PART_SECONDS)
        else:
            corpora = find_corpora(arguments.data)
            if corpora is None:
                raise UserError(f"part {part} needs text: name the folder of corpora by {CORPORA} or --data")
            suite = Suite(corpora=corpora, work=arguments.work, vocab_size=_VOCAB_SIZE, deadline=deadline)
            suite.prepare()
            results = {"train": measure_training, "decode": measure_decoding, "bleu": measure_bleu}[part](suite)
        # Each at once: what was measured stays when time runs out.
        for name, result in results:
            merge(file, {name: result}, what="`make gpu-check`: what needs a GPU, beside peers in the same run")
            say(f"{name}: done, in {file}")


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def run_tests(seconds: float) -> Results:
    """The outcome of the tests marked gpu.

    Raises:
        UserError: one fails.
    """
    from benchmarks.measure import result_of

    places = ["tests/model", "tests/inference"]
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", *places]
    started = time.monotonic()
    if importlib.util.find_spec("pytest") is None or importlib.util.find_spec("hypothesis") is None:
        raise UserError("the tests need pytest and hypothesis: install them, or leave out PART=tests")
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=seconds)
    print(done.stdout[-4000:], file=sys.stderr)
    outcome = done.stdout.strip().splitlines()[-1] if done.stdout.strip() else done.stderr[-500:]
    if done.returncode != 0:
        raise UserError(f"a test fails on this GPU ({outcome}): the output above says which")
    result = result_of(
        None,
        what="tests marked gpu",
        command=f"python -m pytest -q -m gpu {' '.join(places)}",
        seeds=[],
        wall_seconds=round(time.monotonic() - started, 1),
        figures={"outcome": outcome},
        rows=[],
    )
    yield "tests", result


def measure_training(suite: Any) -> Results:
    flags = ["--data", suite.data, "--steps", 10, "--rounds", 4]
    for preset in ("big", "base"):
        yield f"train-{preset}", suite.measure(f"train-{preset}", "train", "--preset", preset, *flags)
        name = f"train-{preset}-compiled"
        yield name, suite.measure(name, "train", "--preset", preset, "--peers", "plain", *flags, "--", "--compile")


def measure_decoding(suite: Any) -> Results:
    from benchmarks.suite import brief_schedule

    model = suite.model("base", minutes=2, flags=brief_schedule())
    # Many, for a few leave slots idle; `generate` may take a minute for them.
    flags = ["--model", model, *suite.test_set("newstest2014"), "--sentences", 2000, "--rounds", 2]
    yield "decode", suite.measure("decode", "decode", *flags)


def measure_bleu(suite: Any) -> Results:
    """A score of so short a training on so little text shows that all parts learn, and no more."""
    from benchmarks.suite import brief_schedule
    from dist_transformer.config.plain import read_json

    minutes = 5
    model = suite.model("base", minutes=minutes, flags=brief_schedule())
    yield "learning", read_json(suite.work / f"learn-base-{minutes}.json")
    for name in ("newstest2014", "test_2016_flickr"):
        command = ["decode", "--model", model, *suite.test_set(name), "--peers", "--rounds", 1]
        result = suite.measure(f"bleu-{name}", *command)
        score = "{figures[contenders][ours][bleu]:.1f} BLEU"
        row = {"what": f"briefly trained `base` on {name}", "steps": "—", "result": score}
        yield f"bleu-{name}", {**result, "rows": [row]}


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--part", nargs="*", choices=PARTS, help="what to check (default: all)")
    parser.add_argument("--data", type=Path, help="folder of corpora (default: DIST_TRANSFORMER_DATA)")
    parser.add_argument(
        "--work", type=Path, default=Path("runs/gpu-check"), help="for data folder and models (default: %(default)s)"
    )
    parser.add_argument("--out", type=Path, default=Path("results"), help="folder of the result (default: %(default)s)")
    return parser.parse_args()
