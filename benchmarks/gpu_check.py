"""Check and measure all that needs a GPU, in parts of at most 8 minutes; write results/speed/gpu-check-DEVICE.json.

    data     the data folder that the other parts read
    tests    the tests that are marked gpu
    kernels  products, attention and the loss of big, each alone
    step     one step of big at 25k tokens taken apart: packs at a time, compiled or not
    train    training of big and base
    decode   beam search
    bleu     base, trained for 4 minutes, and its BLEU on newstest2014 and on Multi30k's test_2016_flickr
    peers    training and beam search again, compared with other toolkits

If a part fails, it is reported, the other parts still run, and the exit status is 1. Each figure is written as soon as
it is measured; a part that is measured again replaces its figures. Nothing is downloaded or installed: missing packages
are reported, and what needs them is left out. The text comes from the folder of corpora that DIST_TRANSFORMER_DATA or
--data names, as in tools/bench.py. The content of --work is reused, so a machine with little time can start from the
data folder that `--part data` made elsewhere. Without a GPU, only `--part data` runs, and the exit status is 0.
tools/results_table.py updates the tables of README.md and docs/.
"""

import argparse
import importlib.util
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from dist_transformer.base.errors import UserError

# The library is imported late, so that a missing package is reported in one sentence.
PARTS = ("data", "tests", "kernels", "step", "train", "decode", "bleu", "peers")
Results = Iterator[tuple[str, dict[str, Any]]]
_NEEDED = ("torch", "numpy", "pyarrow", "tokenizers", "safetensors", "sacrebleu", "tqdm", "matplotlib")
_USEFUL = ("deepspeed", "transformers", "accelerate", "datasets", "ctranslate2", "pytest", "hypothesis")
_PART_SECONDS = 8 * 60
_VOCAB_SIZE = 37_000
_MINUTES = 4
# Speed-up from which on compiling is worth its time at the start.
_PAYS = 1.05


def main() -> None:
    arguments = parse_arguments()
    missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise UserError(f"{sys.executable} lacks {', '.join(missing)}: install them, or name another with PYTHON=")
    import torch

    parts = arguments.part or PARTS
    if not torch.cuda.is_available():
        say("nothing is checked, because there is no GPU here")
        # The part `data` needs no GPU, but runs only if it was requested by name.
        parts = [part for part in arguments.part or () if part == "data"]
    if absent := [name for name in _USEFUL if importlib.util.find_spec(name) is None]:
        say(f"not installed, so what needs them is left out: {', '.join(absent)}")
    failed = [part for part in parts if not passes(part, arguments)]
    for line in advice(arguments.out):
        say(line)
    if failed:
        raise UserError(f"{', '.join(failed)} failed: the output above says why")


def passes(part: str, arguments: argparse.Namespace) -> bool:
    """Measure a part into the file, and return whether that succeeded."""
    from benchmarks.bench import CORPORA, Suite, device_name, find_corpora, merge

    file = arguments.out / f"gpu-check-{device_name()}.json"
    deadline = time.monotonic() + _PART_SECONDS
    measure = {
        "tests": lambda _: run_tests(_PART_SECONDS),
        "kernels": measure_kernels,
        "step": measure_step,
        "train": measure_training,
        "decode": measure_decoding,
        "bleu": measure_bleu,
        "peers": measure_peers,
    }
    try:
        corpora = find_corpora(arguments.data)
        if corpora is None and part not in ("tests", "kernels"):
            raise UserError(f"part {part} needs text: name the folder of corpora with {CORPORA} or --data")
        suite = Suite(corpora=corpora or Path(), work=arguments.work, vocab_size=_VOCAB_SIZE, deadline=deadline)
        if part not in ("tests", "kernels"):
            suite.prepare()
        if part == "data":
            return True
        # Each result is written at once, so that it is kept when time runs out.
        for name, result in measure[part](suite):
            merge(file, name, result, what="`make gpu-check`: what needs a GPU, compared with peers in the same run")
            say(f"{name}: done, in {file}")
    except (UserError, subprocess.SubprocessError) as error:
        say(f"{part}: {error}")
        return False
    return True


def advice(out: Path) -> Iterator[str]:
    """Derive two constants of the code from the figures: whether steps are compiled, and the planner's MFU."""
    from benchmarks.bench import device_name
    from dist_transformer.config.plain import read_json
    from dist_transformer.cost.hardware import GPUS

    file = out / f"gpu-check-{device_name()}.json"
    steps = read_json(file)["figures"] if file.exists() else {}
    for packs in (64, 8):
        names = (f"step-{packs}-compiled", f"step-{packs}")
        if steps.keys() >= set(names):
            compiled, plain = (steps[name]["rates"]["median"] for name in names)
            yield (
                f"{packs} pack(s) at a time: compiled {compiled:,.0f}, not compiled {plain:,.0f}: "
                f"--compile auto should be {'on' if compiled > _PAYS * plain else 'off'}"
            )
    best = max((step for name, step in steps.items() if name.startswith("step-")), key=_share, default=None)
    kind = GPUS.get(device_name())
    if best is not None and kind is not None and kind.bf16_tflops is not None:
        share = _share(best) * best["product_flops_per_second"] / (kind.bf16_tflops * 1e12)
        yield f"cost/hardware.py: MFU = {share:.2f}"


def _share(step: dict[str, Any]) -> float:
    return float(step["share_of_product_rate"])


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def run_tests(seconds: float) -> Results:
    """Run the tests marked gpu.

    Raises:
        UserError: a test fails.
    """
    from benchmarks.measure import ROOT, result_of

    places = ["tests/model", "tests/inference", "tests/training"]
    # Most of the tests' time is start-up on the host.
    at_once = ["-n", "4"] if importlib.util.find_spec("xdist") else []
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", *at_once, *places]
    started = time.monotonic()
    if importlib.util.find_spec("pytest") is None or importlib.util.find_spec("hypothesis") is None:
        raise UserError("the tests need pytest and hypothesis: install them, or leave out PART=tests")
    done = subprocess.run(command, cwd=ROOT, check=False, capture_output=True, text=True, timeout=seconds)
    print(done.stdout[-4000:], file=sys.stderr)
    outcome = done.stdout.strip().splitlines()[-1] if done.stdout.strip() else done.stderr[-500:]
    if done.returncode != 0:
        raise UserError(f"a test fails on this GPU ({outcome}): the output above says which")
    result = result_of(
        None,
        what="tests marked gpu",
        command=f"python -m pytest -q -m gpu {' '.join(places)}",
        wall_seconds=round(time.monotonic() - started, 1),
        figures={"outcome": outcome},
    )
    yield "tests", result


def measure_kernels(suite: Any) -> Results:
    yield "kernels", suite.measure("kernels", "kernels", "--preset", "big")


def measure_step(suite: Any) -> Results:
    """Measure steps with all packs at once and with an eighth of them, compiled and not."""
    for packs in (64, 8):
        for compiled in (True, False):
            name = f"step-{packs}{'-compiled' if compiled else ''}"
            flags = ["--batch.packs-per-micro-batch", packs, "--compile", "on" if compiled else "off"]
            yield name, suite.measure(name, "step", "--preset", "big", "--data", suite.data, "--", *flags)


def measure_training(suite: Any) -> Results:
    yield from _training(suite, peers=["plain"])


def _training(suite: Any, *, peers: Sequence[str]) -> Results:
    for preset in ("big", "base"):
        name = "-".join(["train", preset, *([] if "plain" in peers else ["peers"])])
        flags = ["--preset", preset, "--data", suite.data, "--steps", 10, "--rounds", 4]
        whole = ["--batch.packs-per-micro-batch", 64]
        yield name, suite.measure(name, "train", *flags, "--peers", *peers, "--", *whole, "--compile", "on")


def measure_decoding(suite: Any) -> Results:
    yield from _decoding(suite, "decode", peers=["ours"])


def _decoding(suite: Any, name: str, *, peers: Sequence[str]) -> Results:
    model = suite.model("base", minutes=_MINUTES, flags=_BRIEF)
    # Many sentences, because few leave slots idle; `generate` may take a minute for them.
    flags = ["--model", model, *suite.test_set("newstest2014"), "--sentences", 2000, "--rounds", 2]
    yield name, suite.measure(name, "decode", *flags, "--peers", *peers)


def measure_peers(suite: Any) -> Results:
    yield from _training(suite, peers=["torch", "trainer", "compiled"])
    yield from _decoding(suite, "decode-peers", peers=["generate", "ctranslate2"])


# The paper's warm-up takes longer than a training of minutes.
_BRIEF = [
    *("--optimizer.schedule", "inverse_sqrt", "--optimizer.peak-lr", 7e-4, "--optimizer.warmup-steps", 1000),
    *("--batch.packs-per-micro-batch", 64),
]


def measure_bleu(suite: Any) -> Results:
    """Score a model after a short training on little text: this shows that all parts learn, and no more."""
    from dist_transformer.config.plain import read_json

    model = suite.model("base", minutes=_MINUTES, flags=_BRIEF)
    yield "learning", read_json(suite.work / f"learn-base-{_MINUTES}.json")
    for name in ("newstest2014", "test_2016_flickr"):
        command = ["decode", "--model", model, *suite.test_set(name), "--peers", "ours", "--rounds", 1]
        result = suite.measure(f"bleu-{name}", *command)
        yield f"bleu-{name}", {**result, "rows": []}


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--part", nargs="*", choices=PARTS, help="what to check (default: all)")
    parser.add_argument("--data", type=Path, help="folder of corpora (default: DIST_TRANSFORMER_DATA)")
    parser.add_argument(
        "--work", type=Path, default=Path("runs/gpu-check"), help="for data folder and models (default: %(default)s)"
    )
    parser.add_argument(
        "--out", type=Path, default=Path("results/speed"), help="folder of the result (default: %(default)s)"
    )
    return parser.parse_args()
