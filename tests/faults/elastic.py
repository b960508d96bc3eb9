"""Runs taken on in another world, ZeRO stage, precision or number of threads, beside the same runs left alone.

A run of 20 steps saves after ten. From there a copy of it resumes under another setting, by the same command, to step
20: its ledger must be the same, byte for byte, and its losses near those of the run itself. Their limit is relative:
1e-5 in fp32, 1e-3 in bf16, 5e-3 where one follows the other.
"""

import itertools
import shutil
from dataclasses import dataclass

from safetensors.torch import load_file

from dist_transformer.run.layout import read_records
from tests.faults.campaign import STAGES, Campaign, Case, Found, Lab, failing

_STEPS = 20
_SAVED_AT = _STEPS // 2
_FLAGS = (
    # Adam's usual epsilon of 1e-9 lets rounding decide where a nearly dead neuron goes; compared is what a change of
    # setting does.
    *("--optimizer.epsilon", 1e-6, "--ema-decay", 0.9, "--max-steps", _STEPS, "--save-every", _SAVED_AT),
)
_LIMITS = {"fp32": 1e-5, "bf16": 1e-3, "changed": 5e-3}
"""Largest difference by the precision of both runs."""
_ALL_STAGES = (*STAGES, "zero3_offload")


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """The settings that may change between two starts of a run."""

    ranks: int = 2
    stage: str = "zero1"
    precision: str = "fp32"
    threads: int = 1
    """Threads of each rank."""

    def __str__(self) -> str:
        return f"{self.ranks} x {self.threads} thread(s), {self.stage}, {self.precision}"


def stages(precision: str) -> list[tuple[Setting, Setting]]:
    pairs = itertools.permutations(_ALL_STAGES, 2)
    return [tuple(Setting(stage=stage, precision=precision) for stage in pair) for pair in pairs]  # type: ignore[misc]


PAIRS: dict[str, list[tuple[Setting, Setting]]] = {
    "worlds": [tuple(Setting(ranks=n) for n in pair) for pair in itertools.product(range(1, 5), repeat=2)],  # type: ignore[misc]
    "stages, fp32": stages("fp32"),
    "stages, bf16": stages("bf16"),
    "precision": [
        (Setting(precision="fp32"), Setting(precision="bf16")),
        (Setting(precision="bf16"), Setting(precision="fp32")),
    ],
    "threads": [(Setting(threads=1), Setting(threads=2))],
}
"""Settings under which a run begins and resumes."""


def run(case: Case, lab: Lab) -> Found:
    """Resume from `before` under `after`; return how far apart the two runs are at the steps that follow."""
    before, after = PAIRS[case.kind][case.number]
    begun = {"world": before.ranks, "stage": before.stage, "threads": before.threads}
    whole = lab.undisturbed(f"elastic {before}", *_FLAGS, "--precision", before.precision, **begun)  # type: ignore[arg-type]
    other = lab.folder / "run"
    shutil.copytree(whole, other)
    shutil.rmtree(other / "checkpoints" / f"step-{_STEPS:08d}")
    flags = (*_FLAGS, "--precision", after.precision, "--resume", "required")
    lab.train(other, *flags, world=after.ranks, stage=after.stage, threads=after.threads)
    runs = [[record["loss"] for record in read_records(folder, "train")] for folder in (whole, other)]
    apart = max(abs(loss - expected) / expected for expected, loss in zip(*runs, strict=True))
    averages = [load_file(folder / "weights" / f"ema-{_STEPS:08d}.safetensors") for folder in (whole, other)]
    ledgers = [(folder / "ledger.jsonl").read_bytes() for folder in (whole, other)]
    limit = _LIMITS[before.precision if before.precision == after.precision else "changed"]
    checks = {
        f"{before} -> {after}: losses differ by {apart:.1e}": len(runs[0]) == _STEPS and apart <= limit,
        f"{before} -> {after}: another ledger": ledgers[0] == ledgers[1],
    }
    averages_apart = max(float((averages[0][name] - averages[1][name]).abs().max()) for name in averages[0])
    return Found(problems=failing(checks), highest={"losses_differ_by": apart, "averages_differ_by": averages_apart})


CAMPAIGN = Campaign(
    name="elastic",
    must_hold="the same sentences in every step, losses within the stated tolerance, by the same command",
    full={kind: len(pairs) for kind, pairs in PAIRS.items()},
    run=run,
)
