"""Check and measure all that needs a GPU, in parts of at most 8 minutes; write results/speed/gpu-check-DEVICE.json.

    data     the data folder that the other parts read
    tests    the tests that are marked gpu
    kernels  products, attention and the loss of big, each alone
    step     one step of big at 25k tokens taken apart: packs at a time, compiled or not
    train    training of big and base
    decode   beam search
    bleu     base, trained for 2,000 steps, and its BLEU on newstest2014 and on Multi30k's test_2016_flickr
    peers    training and beam search again, compared with other toolkits

If a part fails, it is reported, the other parts still run, and the exit status is 1. Each figure is written as soon as
it is measured; a part that is measured again replaces its figures. Nothing is downloaded or installed: missing packages
are reported, and what needs them is left out. The text comes from the folder of corpora that DIST_TRANSFORMER_DATA or
--data names, as in tools/bench.py. The content of --work is reused, so a machine with little time can start from the
data folder that `--part data` made elsewhere. Without a GPU, only `--part data` runs, and the exit status is 0.
tools/results_table.py updates the tables of README.md and docs/.
"""

import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.bench import CORPORA, Suite, find_corpora, merge
from benchmarks.measure import ROOT, device_name, missing_packages, read_flags, require_known, result_of, say
from dist_transformer.base.errors import UserError
from dist_transformer.config.plain import read_json
from dist_transformer.cost.hardware import GPUS

Results = Iterator[tuple[str, dict[str, Any]]]
_USEFUL = ("deepspeed", "transformers", "accelerate", "datasets", "ctranslate2", "pytest", "hypothesis")
_PART_SECONDS = 8 * 60
# Speed-up from which on compiling is worth its time at the start.
_PAYS = 1.05
_WHOLE_STEP = ("--batch.packs-per-micro-batch", 64)
# The paper's warm-up takes longer than a training of minutes.
_BRIEF = [
    *("--max-steps", 2000, "--save-every", 100, "--validate-every", 0, *_WHOLE_STEP),
    *("--optimizer.schedule", "inverse_sqrt", "--optimizer.peak-lr", 7e-4, "--optimizer.warmup-steps", 1000),
]


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """Flags."""

    part: tuple[str, ...] = ()
    """Parts to check; default: all."""
    data: Path | None = None
    """Folder of corpora; default: DIST_TRANSFORMER_DATA."""
    work: Path = Path("runs/gpu-check")
    """Folder for data folder and models."""
    out: Path = Path("results/speed")
    """Folder of the result."""


def main() -> None:
    settings = read_flags(Settings)
    require_known("--part", settings.part, PARTS)
    parts = settings.part or tuple(PARTS)
    if not torch.cuda.is_available():
        say("nothing is checked, because there is no GPU here")
        # The part `data` needs no GPU, but runs only if it was requested by name.
        parts = tuple(part for part in settings.part if part == "data")
    if absent := missing_packages(_USEFUL):
        say(f"not installed, so what needs them is left out: {absent}")
    failed = [part for part in parts if not passes(part, settings)]
    for line in advice(settings.out):
        say(line)
    if failed:
        raise UserError(f"{', '.join(failed)} failed: the output above says why")


def passes(part: str, settings: Settings) -> bool:
    """Measure a part into the file, and return whether that succeeded."""
    file = settings.out / f"gpu-check-{device_name()}.json"
    try:
        corpora = find_corpora(settings.data)
        if corpora is None and part not in ("tests", "kernels"):
            raise UserError(f"part {part} needs text: name the folder of corpora with {CORPORA} or --data")
        suite = Suite(corpora=corpora or Path(), work=settings.work, deadline=time.monotonic() + _PART_SECONDS)
        # Each result is written at once, so that it is kept when time runs out.
        for name, result in PARTS[part](suite):
            merge(file, name, result, what="`make gpu-check`: what needs a GPU, compared with peers in the same run")
            say(f"{name}: done, in {file}")
    except (UserError, subprocess.SubprocessError) as error:
        say(f"{part}: {error}")
        return False
    return True


def advice(out: Path) -> Iterator[str]:
    """Derive two constants of the code from the figures: whether steps are compiled, and the planner's MFU."""
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
    measured = [step for name, step in steps.items() if name.startswith("step-")]
    reached = [step["share_of_product_rate"] * step["product_flops_per_second"] for step in measured]
    kind = GPUS.get(device_name())
    if reached and kind is not None and kind.bf16_tflops is not None:
        yield f"cost/hardware.py: MFU = {max(reached) / (kind.bf16_tflops * 1e12):.2f}"


def data_of(suite: Suite) -> Path:
    return suite.data("mix_en_de", 37_000)


def make_data(suite: Suite) -> Results:
    data_of(suite)
    yield from ()


def run_tests(_: Suite | None = None, *, seconds: float = _PART_SECONDS) -> Results:
    """Run the tests marked gpu.

    Raises:
        UserError: a test fails.
    """
    if missing := missing_packages(("pytest", "hypothesis")):
        raise UserError(f"the tests need {missing}: install them, or leave out PART=tests")
    places = ["tests/model", "tests/inference", "tests/training"]
    # Most of the tests' time is start-up on the host.
    at_once = [] if missing_packages(["xdist"]) else ["-n", "4"]
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", *at_once, *places]
    started = time.monotonic()
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


def measure_kernels(suite: Suite) -> Results:
    yield "kernels", suite.measure("kernels", "kernels", "--preset", "big")


def measure_step(suite: Suite) -> Results:
    """Measure steps with all packs at once and with an eighth of them, compiled and not."""
    for packs in (64, 8):
        for compiled in (True, False):
            name = f"step-{packs}{'-compiled' if compiled else ''}"
            flags = ["--batch.packs-per-micro-batch", packs, "--compile", "on" if compiled else "off"]
            yield name, suite.measure(name, "step", "--preset", "big", "--data", data_of(suite), "--", *flags)


def measure_training(suite: Suite, *, ending: str = "", peers: Sequence[str] = ("plain",)) -> Results:
    for preset in ("big", "base"):
        name = f"train-{preset}{ending}"
        flags = ["--preset", preset, "--data", data_of(suite), "--steps", 10, "--rounds", 4]
        yield name, suite.measure(name, "train", *flags, "--peers", *peers, "--", *_WHOLE_STEP, "--compile", "on")


def measure_decoding(suite: Suite, *, ending: str = "", peers: Sequence[str] = ("ours",)) -> Results:
    name, model = f"decode{ending}", suite.model("base", data_of(suite), _BRIEF)
    # Many sentences, because few leave slots idle; `generate` may take a minute for them.
    flags = ["--model", model, *suite.test_set("newstest2014"), "--sentences", 2000, "--rounds", 2]
    yield name, suite.measure(name, "decode", *flags, "--peers", *peers)


def measure_bleu(suite: Suite) -> Results:
    """Score a model after a short training on little text: this shows that all parts learn, and no more."""
    model = suite.model("base", data_of(suite), _BRIEF)
    for name in ("newstest2014", "test_2016_flickr"):
        command = ["decode", "--model", model, *suite.test_set(name), "--peers", "ours", "--rounds", 1]
        result = suite.measure(f"bleu-{name}", *command)
        yield f"bleu-{name}", {**result, "rows": []}


def measure_peers(suite: Suite) -> Results:
    yield from measure_training(suite, ending="-peers", peers=["torch", "trainer", "compiled"])
    yield from measure_decoding(suite, ending="-peers", peers=["generate", "ctranslate2"])


PARTS: dict[str, Callable[[Suite], Results]] = {
    "data": make_data,
    "tests": run_tests,
    "kernels": measure_kernels,
    "step": measure_step,
    "train": measure_training,
    "decode": measure_decoding,
    "bleu": measure_bleu,
    "peers": measure_peers,
}
