"""Takes runs on in other worlds, ZeRO stages and precisions, and compares them with the same runs left alone.

    python -m tests.faults.elastic --data DATA --json results/elastic.json

A run of 20 steps saves after ten. From there a copy of it goes on under another setting, by the same command, to step
20: its ledger must be the same, byte for byte, and its losses and its averaged weights near those of the run itself.
The limit of the losses is relative: 1e-5 in fp32, 1e-3 in bf16, 5e-3 where one follows the other. What the JSON file
holds already is not done again.
"""

import argparse
import itertools
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from dist_transformer.benchmarks.measure import result_of, write_result
from dist_transformer.config import read_json
from dist_transformer.data.folder import DataFolder
from dist_transformer.errors import UserError, exit_on_user_error
from dist_transformer.launch import deepspeed_command
from dist_transformer.training.metrics import read_records

_ROOT = Path(__file__).resolve().parents[2]
_STEPS = 20
_SAVED_AT = _STEPS // 2
# Adam's usual epsilon of 1e-9 lets rounding decide where a nearly dead neuron goes; compared is what a change of
# setting does.
_SMALL = (
    "--preset tiny --model.width 32 --model.ffn-width 64 --model.heads 2 --batch.max-target-tokens 256 "
    "--batch.packs-per-step 4 --optimizer.warmup-steps 10 --optimizer.epsilon 1e-6 --ema-decay 0.9 "
    f"--validate-every 0 --log-every 1 --max-steps {_STEPS} --save-every {_SAVED_AT}"
)
_LIMITS = {"fp32": 1e-5, "bf16": 1e-3, "changed": 5e-3}
"""By the precision of both runs."""
_STAGES = ("zero0", "zero1", "zero2", "zero3", "zero3_offload")


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """What may change between two starts of a run."""

    ranks: int = 2
    stage: str = "zero1"
    precision: str = "fp32"
    threads: int = 1
    """Of each rank."""

    def __str__(self) -> str:
        return f"{self.ranks} x {self.threads} thread(s), {self.stage}, {self.precision}"


def pairs() -> Iterator[tuple[Setting, Setting]]:
    """Where a run begins, and where it goes on."""
    for before, after in itertools.product(range(1, 5), repeat=2):
        yield Setting(ranks=before), Setting(ranks=after)
    for precision in ("fp32", "bf16"):
        for first, second in itertools.permutations(_STAGES, 2):
            yield Setting(stage=first, precision=precision), Setting(stage=second, precision=precision)
    yield Setting(precision="fp32"), Setting(precision="bf16")
    yield Setting(precision="bf16"), Setting(precision="fp32")
    yield Setting(threads=1), Setting(threads=2)


def main() -> None:
    arguments, started = parse_arguments(), time.monotonic()
    cases = read_json(arguments.json)["figures"]["cases"] if arguments.json and arguments.json.exists() else []
    done = {(case["before"], case["after"]) for case in cases}
    with tempfile.TemporaryDirectory() as scratch:
        for before, after in pairs():
            if (str(before), str(after)) in done:
                continue
            cases.append(compare(before, after, arguments.data, Path(scratch)))
            print(cases[-1], flush=True)
            if arguments.json:
                write_result(arguments.json, describe(cases, arguments.data, round(time.monotonic() - started, 1)))
    if failed := [case for case in cases if not case["passed"]]:
        raise UserError(f"{len(failed)} of {len(cases)} did not go on as they would have, the first: {failed[0]}")


def compare(before: Setting, after: Setting, data: Path, scratch: Path) -> dict[str, Any]:
    """Go on from `before` under `after`; how far apart the two runs are at the steps that follow."""
    whole, other = scratch / str(before), scratch / "other"
    if not whole.exists():
        train(before, data, whole)
    shutil.rmtree(other, ignore_errors=True)
    shutil.copytree(whole, other)
    shutil.rmtree(other / "checkpoints" / f"step-{_STEPS:08d}")
    train(after, data, other, "--resume", "required")
    runs = [[record["loss"] for record in read_records(run, "train")] for run in (whole, other)]
    losses = max(abs(loss - expected) / expected for expected, loss in zip(*runs, strict=True))
    averages = [load_file(run / "weights" / f"ema-{_STEPS:08d}.safetensors") for run in (whole, other)]
    ledgers = [(run / "ledger.jsonl").read_bytes() for run in (whole, other)]
    precision = before.precision if before.precision == after.precision else "changed"
    return {
        "before": str(before),
        "after": str(after),
        "precision": precision,
        "losses_differ_by": losses,
        "averages_differ_by": max(float((averages[0][name] - averages[1][name]).abs().max()) for name in averages[0]),
        "same_ledger": ledgers[0] == ledgers[1],
        "passed": ledgers[0] == ledgers[1] and len(runs[0]) == _STEPS and losses <= _LIMITS[precision],
    }


def train(setting: Setting, data: Path, run_dir: Path, *flags: str) -> None:
    config = _ROOT / "ds_configs" / f"{setting.stage}.json"
    words = [*deepspeed_command(setting.ranks), "--module", "dist_transformer.train", *_SMALL.split(), *flags]
    words += ["--data", data, "--run-dir", run_dir, "--deepspeed-config", config, "--precision", setting.precision]
    environment = {**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": str(setting.threads)}
    done = subprocess.run(
        [str(word) for word in words], cwd=_ROOT, env=environment, check=False, text=True, timeout=1800,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    if done.returncode != 0:
        raise UserError(f"{setting} ended with status {done.returncode}: {done.stdout[-2000:]}")


def describe(cases: list[dict[str, Any]], data: Path, wall_seconds: float) -> dict[str, Any]:
    """The result in the layout of tools/results_table.py."""
    largest = {
        precision: max((case["losses_differ_by"] for case in cases if case["precision"] == precision), default=0.0)
        for precision in _LIMITS
    }
    figures = {
        "cases": cases,
        "count": len(cases),
        "passed": sum(case["passed"] for case in cases),
        "steps": _STEPS,
        "largest": largest,
    }
    return result_of(
        DataFolder.open(data).index,
        what="runs taken on in another world, under another ZeRO stage or in another precision",
        command="python -m tests.faults.elastic --data DATA",
        seeds=[1],
        wall_seconds=wall_seconds,
        figures=figures,
        row={
            "what": "runs taken on half-way in another world, under another ZeRO stage, in another precision",
            "steps": "{figures[steps]}",
            "result": "{figures[passed]} of {figures[count]} changes: the same sentences, losses at most "
            "{figures[largest][fp32]:.0e} (fp32), {figures[largest][bf16]:.0e} (bf16) and "
            "{figures[largest][changed]:.0e} (from one to the other) apart, relatively",
        },
    )


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="data folder")
    parser.add_argument("--json", type=Path, help="table of results, which this adds to")
    return parser.parse_args()


if __name__ == "__main__":
    exit_on_user_error(main)
