"""Settings, checkpoint and ledger are of one run, or it is not resumed."""

import json
import shutil
from contextlib import ExitStack
from pathlib import Path

import pytest

from dist_transformer.base.errors import UserError
from dist_transformer.config.settings import TrainConfig
from dist_transformer.run.ledger import read_ledger
from dist_transformer.run.verify import verify_run
from tests.run.small_run import SmallRun, small_config, train_and_save


@pytest.fixture
def config(tmp_path: Path) -> TrainConfig:
    """The settings of a run of four steps, saved after two and four."""
    config = small_config(tmp_path)
    train_and_save(config, 2, 2)
    return config


def resumed(config: TrainConfig) -> SmallRun:
    with ExitStack() as held:
        run = SmallRun(config, held)
        run.reporter.close()
    return run


def refusal(config: TrainConfig) -> str:
    """In one sentence; the folder is as it was."""
    before = {path: path.read_bytes() for path in config.run_dir.rglob("*") if path.is_file()}
    with pytest.raises(UserError) as refused:
        resumed(config)
    assert {path: path.read_bytes() for path in config.run_dir.rglob("*") if path.is_file()} == before
    assert "\n" not in str(refused.value)
    return str(refused.value)


def test_what_belongs_together_is_resumed_without_a_word(config: TrainConfig) -> None:
    run = resumed(config)
    assert run.resumed_at == 4
    assert run.notes == [f"resumed from {config.run_dir}/checkpoints/step-00000004"]


@pytest.mark.parametrize("left", [None, b"", b'{\n "model": {', b"\0" * 100])
def test_lost_settings_are_rebuilt_from_the_checkpoint(config: TrainConfig, left: bytes | None) -> None:
    file = config.run_dir / "config.json"
    before = file.read_bytes()
    file.unlink() if left is None else file.write_bytes(left)
    run = resumed(config)
    assert run.resumed_at == 4
    assert f"it is rebuilt from {config.run_dir}/checkpoints/step-00000004/manifest.json" in run.notes[0]
    assert json.loads(file.read_bytes()) == json.loads(before)
    # And a setting that must not change is refused as ever.
    file.unlink()
    with pytest.raises(UserError, match=r"with seed = 1, not 2: use the old value"):
        resumed(config.changed(seed=2))


def test_the_checkpoint_of_another_run_is_refused(config: TrainConfig, tmp_path: Path) -> None:
    other = small_config(tmp_path / "other", seed=2)
    train_and_save(other, 6)
    copied = shutil.copytree(other.run_dir / "checkpoints/step-00000006", config.run_dir / "checkpoints/step-00000006")
    assert refusal(config) == (
        f"{copied} is from another run than {config.run_dir} and was trained with seed = 2, not 1: move it out of the "
        "folder, then the run resumes from its own checkpoint"
    )
    shutil.rmtree(copied)
    assert resumed(config).resumed_at == 4


def test_a_renamed_checkpoint_is_not_used(config: TrainConfig) -> None:
    folder = config.run_dir / "checkpoints"
    (folder / "step-00000004").rename(folder / "step-00000009")
    run = resumed(config)
    assert run.resumed_at == 2
    assert "step-00000009/state.json states step 4, which is not the step of its folder: it is not used" in run.notes[0]


@pytest.mark.parametrize(
    ("damage", "found"),
    [
        (None, "ends at step 0, before step 4"),
        (lambda lines: [], "ends at step 0, before step 4"),
        (lambda lines: lines[:3], "ends at step 3, before step 4"),
        (lambda lines: [*lines[:3], lines[3][:20]], "is damaged after step 3, before step 4"),
        (lambda lines: [lines[0].replace("101", "102"), *lines[1:]], "is damaged after step 0, before step 4"),
    ],
)
def test_a_lost_or_torn_ledger_is_refused_with_the_remedy(config: TrainConfig, damage: object, found: str) -> None:
    ledger = config.run_dir / "ledger.jsonl"
    whole = ledger.read_text()
    if damage is None:
        ledger.unlink()
    else:
        ledger.write_text("".join(damage(whole.splitlines(keepends=True))))  # type: ignore[operator]
    message = refusal(config)
    assert f"{ledger} {found}" in message
    assert "restore ledger.jsonl from a backup, move" in message
    ledger.write_text(whole)
    assert resumed(config).resumed_at == 4


def test_the_ledger_of_another_run_is_refused(config: TrainConfig) -> None:
    ledger = config.run_dir / "ledger.jsonl"
    other = small_config(config.run_dir.parent / "other")
    with ExitStack() as held:
        run = SmallRun(other, held)
        run.ledger.add(1, pair_hash=1, target_tokens=1)
        run.progress.step = 1
        run.train(3)
        run.reporter.close()
    shutil.copy(other.run_dir / "ledger.jsonl", ledger)
    assert "are from two runs, their chains differ at step 4" in refusal(config)


def test_a_ledger_that_continues_after_the_checkpoint_is_cut(config: TrainConfig) -> None:
    """Killed after step 5 was logged; and what follows may be torn."""
    with ExitStack() as held:
        run = SmallRun(config, held)
        run.train(1)
        run.reporter.close()
    with (config.run_dir / "ledger.jsonl").open("a") as file:
        file.write('{"step": 6, "ha')
    assert resumed(config).resumed_at == 4
    assert [entry["step"] for entry in read_ledger(config.run_dir / "ledger.jsonl")] == [1, 2, 3, 4]
    assert [check.found for check in verify_run(config.run_dir) if not check.passed] == []


@pytest.mark.parametrize(("lines", "first"), [(0, 1), (1, 2)])
def test_lost_records_are_told_and_do_not_stop_the_run(config: TrainConfig, lines: int, first: int) -> None:
    metrics = config.run_dir / "metrics.jsonl"
    metrics.write_text("".join(metrics.read_text().splitlines(keepends=True)[:lines]))
    run = resumed(config)
    assert run.resumed_at == 4
    assert f"{metrics} has lost the records from step {first} to 4: reports lack them" in run.notes


def test_a_checkpoint_that_is_gone_is_told(config: TrainConfig) -> None:
    checkpoints = config.run_dir / "checkpoints"
    for step, left in ((4, 2), (2, 0)):
        shutil.rmtree(checkpoints / f"step-{step:08d}")
        run = resumed(config)
        assert run.resumed_at == (left or None)
        named = f"{checkpoints}/latest names step-{step:08d}, which is gone"
        assert f"{named}: every step after {left} is computed again" in run.notes


def test_fewer_steps_than_are_done_change_nothing(config: TrainConfig) -> None:
    assert refusal(config.changed(max_steps=3)).startswith(
        f"{config.run_dir} is at step 4, beyond --max-steps 3: raise"
    )
