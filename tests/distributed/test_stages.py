"""Real 2-rank DeepSpeed, ZeRO 0 to 3, bf16 and fp32: token-exact gradients, exact resume, steps that are not finite."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from dist_transformer.data.folder.reader import DataFolder
from tests.conftest import run_ranks

pytestmark = pytest.mark.slow

EVERY = [f"zero{stage}-{precision}" for stage in range(4) for precision in ("fp32", "bf16")]
# What every change needs; a slice does the others. ZeRO-2 takes part in the chain.
DAILY = ("zero0-fp32", "zero1-bf16", "zero3-fp32", "chain-fp32", "frozen-bf16", "rdrop-zero3")


def some_daily(*names: str) -> list[Any]:
    return [name if name in DAILY else pytest.param(name, marks=pytest.mark.slice(name="worlds")) for name in names]


CASES = some_daily(*EVERY)


@pytest.fixture(scope="module")
def out(request: pytest.FixtureRequest, toy_data: DataFolder, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run what the selected tests ask for, and what they compare it with."""
    out = tmp_path_factory.mktemp("stages")
    chosen = [item.callspec.params for item in request.session.items if item.path == request.path if "[" in item.name]
    names = {"zero0-fp32", "zero3-fp32", *(str(value) for params in chosen for value in params.values())}
    worker = Path(__file__).with_name("worker_stages.py")
    run_ranks(2, worker, toy_data.path, out, *sorted(names), timeout=1200)
    return out


@pytest.fixture(scope="module")
def results(out: Path) -> dict[str, Any]:
    return json.loads((out / "results.json").read_text())


def averaged(run_dir: Path) -> dict[str, torch.Tensor]:
    return load_file(run_dir / "weights" / "ema-00000006.safetensors")


def require_exact(resume: dict[str, Any]) -> None:
    """A resumed run is equal to the whole one bit for bit."""
    assert resume["weights_differ_by"] == 0.0
    assert resume["resumed_losses"] == resume["losses"]
    assert resume["same_ledger"]


@pytest.mark.parametrize("case", CASES)
def test_gradient_is_that_of_one_big_batch(results: dict[str, Any], case: str) -> None:
    # In bf16 accumulation and reduction alone are measured; a loss that is scaled otherwise may round otherwise.
    limit = 1e-6 if case.endswith("fp32") else 1e-4
    for kind in ("gradient_errors", "errors_of_frozen"):
        errors = results[case][kind]
        worst = max(errors, key=errors.__getitem__)
        assert errors[worst] <= limit, f"{kind}, {worst}: {errors[worst]:.2e}"
    assert {"norm", "encoder.1.feed_forward.inner.weight"} <= results[case]["errors_of_frozen"].keys()
    assert "embedding" not in results[case]["errors_of_frozen"]


@pytest.mark.parametrize("run", some_daily("rdrop-zero1", "rdrop-zero3"))
def test_rdrop_has_the_gradient_of_one_process_and_resumes(results: dict[str, Any], out: Path, run: str) -> None:
    # ZeRO-1 runs in bf16.
    limit, errors = (1e-6 if run == "rdrop-zero3" else 1e-4), results[run]["gradient_errors"]
    worst = max(errors, key=errors.__getitem__)
    assert errors[worst] <= limit, f"{worst}: {errors[worst]:.2e}"
    resume, plain = results[run]["resume"], results["zero3-fp32"]["resume"]
    require_exact(resume)
    assert resume["flops"] == [2 * count for count in plain["flops"]]
    # The divergence is a part of the loss.
    assert resume["losses"][0] > plain["losses"][0] + 0.01
    ledgers = [(out / name / "ledger.jsonl").read_text() for name in (run, "zero3-fp32")]
    assert ledgers[0] == ledgers[1]


@pytest.mark.parametrize("case", CASES)
def test_resume_continues_bit_for_bit(results: dict[str, Any], out: Path, case: str) -> None:
    whole, resumed = averaged(out / case), averaged(out / f"{case}-resumed")
    assert all(whole[name].equal(resumed[name]) for name in whole)
    require_exact(results[case]["resume"])


@pytest.mark.parametrize("precision", ["fp32", pytest.param("bf16", marks=pytest.mark.slice(name="worlds"))])
def test_stages_agree_on_losses(results: dict[str, Any], precision: str) -> None:
    limit = 1e-5 if precision == "fp32" else 1e-3
    first, *others = (case for case in EVERY if case.endswith(precision) and case in results)
    assert others
    for case in others:
        assert results[case]["resume"]["losses"] == pytest.approx(results[first]["resume"]["losses"], rel=limit), case


@pytest.mark.parametrize("run", some_daily("zero1-fp32", "zero2-fp32", "zero3-fp32", "chain-fp32"))
def test_stages_agree_on_the_average(out: Path, run: str) -> None:
    first, other = averaged(out / "zero0-fp32"), averaged(out / run)
    assert first.keys() == other.keys()
    assert max(float((first[name] - other[name]).abs().max()) for name in first) <= 1e-6


@pytest.mark.parametrize(
    ("run", "case", "limit"),
    [
        ("chain-fp32", "zero0-fp32", 1e-5),
        pytest.param("chain-bf16", "zero0-bf16", 1e-3, marks=pytest.mark.slice(name="worlds")),
    ],
)
def test_each_stage_resumes_where_another_ended(
    results: dict[str, Any], out: Path, run: str, case: str, limit: float
) -> None:
    assert results[run] == pytest.approx(results[case]["resume"]["losses"], rel=limit)
    assert (out / run / "ledger.jsonl").read_text() == (out / case / "ledger.jsonl").read_text()


@pytest.mark.parametrize("run", some_daily("frozen-fp32", "frozen-bf16"))
def test_frozen_parts_stay_bit_for_bit_at_every_stage(results: dict[str, Any], run: str) -> None:
    """Weights, moments, their average and the copies that compute, through checkpoints that each stage hands over."""
    outcome = results[run]
    assert outcome["frozen_differ_by"] == 0.0
    assert outcome["least_moved"] > 1e-4
    assert "freeze" in outcome["message"]


def test_a_run_may_change_its_precision(results: dict[str, Any], out: Path) -> None:
    # Two of the six steps are computed with 8 bits of a number.
    assert results["precisions"] == pytest.approx(results["zero0-fp32"]["resume"]["losses"], rel=5e-3)
    assert (out / "precisions/ledger.jsonl").read_text() == (out / "zero0-fp32/ledger.jsonl").read_text()


@pytest.mark.parametrize("case", CASES)
def test_weights_begin_unrounded_and_their_average_is_as_defined(results: dict[str, Any], case: str) -> None:
    """In bf16 too: rounded fp32 weights lie where the small updates of a warm-up move no bf16 weight."""
    outcome = results[case]["not_finite"]
    assert outcome["begins_beside_what_was_drawn"] == 0.0
    assert outcome["average_error"] <= 1e-6
    assert outcome["average_moved"] >= 1e-4


@pytest.mark.parametrize("case", CASES)
def test_all_ranks_skip_a_step_that_is_not_finite_on_one(results: dict[str, Any], case: str) -> None:
    outcome = results[case]["not_finite"]
    assert outcome["state_differs_by"] == 0.0
    # The schedule counts updates, not steps.
    assert outcome["updates"] == [4, 4, 5]
    assert outcome["rates"] == pytest.approx([1e-3, 1e-3, 1e-3 * (4 / 5) ** 0.5], rel=1e-12)
    assert outcome["differs_from_a_run_without"] == 0.0
    assert outcome["skipped"] == 4
    assert "3 steps in a row" in outcome["message"]
    assert "loss of rank 1 in pack" in outcome["message"]


@pytest.mark.parametrize("case", CASES)
def test_the_model_that_validation_decodes_with_is_the_trained_one(results: dict[str, Any], case: str) -> None:
    # bf16 keeps 8 bits of a weight, and these are below 4.
    assert results[case]["resume"]["plain_model_differs_by"] <= (0.0 if case.endswith("fp32") else 2**-7)


def test_stages_translate_alike(results: dict[str, Any]) -> None:
    first = results["zero0-fp32"]["resume"]["sheets"]
    assert [sheet["step"] for sheet in first] == [3, 6]
    assert [sheet["sentences"] for sheet in first] == [6, 6]
    assert all(len(sheet["samples"]) == 6 for sheet in first)
    for sheets in (results[case]["resume"]["sheets"] for case in EVERY if case in results and case.endswith("fp32")):
        for ours, expected in zip(sheets, first, strict=True):
            assert [s["hypothesis"] for s in ours["samples"]] == [s["hypothesis"] for s in expected["samples"]]
            assert ours["bleu"] == expected["bleu"]
