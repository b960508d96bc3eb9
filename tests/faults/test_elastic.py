"""Runs taken on in another world, ZeRO stage, precision or number of threads, compared with the same runs left alone.

A run of 20 steps saves after ten. From there a copy of it resumes under another setting, by the same command, to step
20: its ledger must be the same, byte for byte, and its losses near those of the run itself. Their limit is relative:
1e-5 in fp32, 1e-3 in bf16, 5e-3 where one follows the other.
"""

import itertools
import shutil
from typing import Any

import pytest

from dist_transformer.run.layout import read_records
from tests.faults.campaign import STAGES, Case, Lab, campaign, in_slice

_STEPS = 20
_FLAGS = (
    # Adam's usual epsilon of 1e-9 lets rounding decide where a nearly dead neuron goes; compared is what a change of
    # setting does.
    *("--optimizer.epsilon", 1e-6, "--ema-decay", 0.9, "--max-steps", _STEPS, "--save-every", _STEPS // 2),
)
# Each is a value before the change and one after it.
_PAIRS: dict[str, list[tuple[Any, Any]]] = {
    "world": list(itertools.product(range(1, 5), repeat=2)),
    "stage": list(itertools.permutations((*STAGES, "zero3_offload"), 2)),
    "stage in bf16": list(itertools.permutations((*STAGES, "zero3_offload"), 2)),
    "precision": [("fp32", "bf16"), ("bf16", "fp32")],
    "threads": [(1, 2)],
}


@in_slice
@campaign({kind: len(pairs) for kind, pairs in _PAIRS.items()}, sample=("threads",))
def test_elastic(case: Case, lab: Lab) -> None:
    name, _, precision = case.kind.partition(" in ")
    starts = [{"precision": precision or "fp32", name: value} for value in _PAIRS[case.kind][case.number]]
    precisions = [start.pop("precision") for start in starts]
    flags = [(*_FLAGS, "--precision", precision) for precision in precisions]
    whole = lab.undisturbed(f"elastic {case.kind} {starts[0]} {precisions[0]}", *flags[0], **starts[0])
    other = lab.copy_of(whole)
    shutil.rmtree(other / "checkpoints" / f"step-{_STEPS:08d}")
    lab.train(other, *flags[1], "--resume", "required", **starts[1])
    assert (whole / "ledger.jsonl").read_bytes() == (other / "ledger.jsonl").read_bytes(), "another ledger"
    expected, found = ([record["loss"] for record in read_records(folder, "train")] for folder in (whole, other))
    limit = 5e-3 if name == "precision" else 1e-3 if precision else 1e-5
    assert len(found) == _STEPS
    assert found == pytest.approx(expected, rel=limit), "losses differ"
