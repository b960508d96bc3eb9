"""Muon at every stage of ZeRO on 1, 2 and 3 ranks: the same losses, and resumed bit for bit."""

import json
from pathlib import Path
from typing import Any

import pytest

from dist_transformer.data.folder.reader import DataFolder
from tests.conftest import run_ranks

pytestmark = pytest.mark.slow

PRECISIONS = {"fp32": 1e-5, "bf16": 1e-3}
CASES = {
    "2-fp32": (2, "fp32"),
    **{f"{ranks}-{precision}": (ranks, precision) for ranks in (1, 2, 3) for precision in PRECISIONS},
}


@pytest.fixture(scope="module")
def results(toy_data: DataFolder, tmp_path_factory: pytest.TempPathFactory) -> Any:
    known: dict[str, Any] = {}

    def run(case: str) -> Any:
        if case not in known:
            out = tmp_path_factory.mktemp(case)
            ranks, precision = CASES[case]
            run_ranks(ranks, Path(__file__).with_name("worker_muon.py"), toy_data.path, out, precision, timeout=1200)
            known[case] = json.loads((out / "results.json").read_text())
        return known[case]

    return run


def daily(case: str) -> Any:
    return case if case == "2-fp32" else pytest.param(case, marks=pytest.mark.slice(name="worlds"))


@pytest.mark.parametrize("case", map(daily, CASES))
def test_every_stage_has_the_losses_of_stage_0_and_resumes_bit_for_bit(results: Any, case: str) -> None:
    _, precision = CASES[case]
    found, limit = results(case), PRECISIONS[precision]
    first = found[f"zero0-{precision}"]["losses"]
    assert len(first) == 20
    assert first[-1] < first[0] - 0.3
    for stage in range(4):
        outcome = found[f"zero{stage}-{precision}"]
        assert outcome["losses"] == pytest.approx(first, rel=limit), stage
        assert outcome["resumed_losses"] == outcome["losses"]
        assert outcome["weights_differ_by"] == 0.0
        assert outcome["same_ledger"]
    # One step at each stage, each in the checkpoint of the one before.
    assert found[f"handed-over-{precision}"] == pytest.approx(first[:6], rel=limit)


@pytest.mark.slice(name="worlds")
def test_the_number_of_ranks_changes_nothing(results: Any) -> None:
    alone = results("1-fp32")["zero0-fp32"]["losses"]
    for case in ("2-fp32", "3-fp32"):
        assert results(case)["zero0-fp32"]["losses"] == pytest.approx(alone, rel=1e-5)


def test_another_optimizer_and_an_offloaded_one_are_refused(results: Any) -> None:
    found = results("2-fp32")
    other, offloaded = found["refused"]
    assert "was trained with optimizer.kind = 'muon', not 'adam': use the old value, or another --run-dir" in other
    assert "offloads the optimizer to DeepSpeed's CPU Adam" in offloaded
    assert not found["offloaded_is_there"]
