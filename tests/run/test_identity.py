"""Settings, checkpoint and ledger are of one run, or it is not resumed."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from dist_transformer.averaging.choice import choose_weights
from dist_transformer.base.errors import UserError
from dist_transformer.config.settings import TrainConfig
from dist_transformer.run.ledger import Ledger, read_ledger
from dist_transformer.run.verify import verify_run
from tests.run.small_run import small_config, train_and_save


@pytest.fixture
def config(tmp_path: Path) -> TrainConfig:
    """The settings of a run of four steps, saved after two and four."""
    config = small_config(tmp_path)
    train_and_save(config, 2, 2)
    return config


def refusal(config: TrainConfig) -> str:
    """In one sentence; the folder is as it was."""
    before = {path: path.read_bytes() for path in config.run_dir.rglob("*") if path.is_file()}
    with pytest.raises(UserError) as refused:
        train_and_save(config)
    assert {path: path.read_bytes() for path in config.run_dir.rglob("*") if path.is_file()} == before
    assert "\n" not in str(refused.value)
    return str(refused.value)


def test_what_belongs_together_is_resumed_without_a_word(config: TrainConfig) -> None:
    run = train_and_save(config)
    assert run.resumed_at == 4
    assert run.notes == [f"resumed from {config.run_dir}/checkpoints/step-00000004"]


@pytest.mark.parametrize("left", [None, b"", b'{\n "model": {', b"\0" * 100])
def test_lost_settings_are_rebuilt_from_the_checkpoint(config: TrainConfig, left: bytes | None) -> None:
    file = config.run_dir / "config.json"
    before = file.read_bytes()
    file.unlink() if left is None else file.write_bytes(left)
    run = train_and_save(config)
    assert run.resumed_at == 4
    assert f"it is rebuilt from {config.run_dir}/checkpoints/step-00000004/manifest.json" in run.notes[0]
    assert json.loads(file.read_bytes()) == json.loads(before)
    # And a setting that must not change is refused as ever.
    file.unlink()
    with pytest.raises(UserError, match=r"with seed = 1, not 2: use the old value"):
        train_and_save(config.changed(seed=2))


def test_the_checkpoint_of_another_run_is_refused(config: TrainConfig, tmp_path: Path) -> None:
    other = small_config(tmp_path / "other", seed=2)
    train_and_save(other, 6)
    copied = shutil.copytree(other.run_dir / "checkpoints/step-00000006", config.run_dir / "checkpoints/step-00000006")
    assert refusal(config) == (
        f"{copied} is from another run than {config.run_dir} and was trained with seed = 2, not 1: move it out of the "
        "folder, then the run resumes from its own checkpoint"
    )
    shutil.rmtree(copied)
    assert train_and_save(config).resumed_at == 4


def test_a_renamed_checkpoint_is_not_used(config: TrainConfig) -> None:
    folder = config.run_dir / "checkpoints"
    (folder / "step-00000004").rename(folder / "step-00000009")
    run = train_and_save(config)
    assert run.resumed_at == 2
    assert "step-00000009 is not what its name says (its manifest is of step 4): it is not used" in run.notes[0]


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
    assert train_and_save(config).resumed_at == 4


def test_the_ledger_of_another_run_is_refused(config: TrainConfig) -> None:
    ledger = config.run_dir / "ledger.jsonl"
    ledger.unlink()
    other = Ledger(ledger)
    for step in range(1, 5):
        other.add(step, pair_hash=step, target_tokens=1)
    other.flush()
    assert "are from two runs, their chains differ at step 4" in refusal(config)


def test_a_ledger_that_continues_after_the_checkpoint_is_cut(config: TrainConfig) -> None:
    """Killed after step 5 was logged; and what follows may be torn."""
    train_and_save(config, rest=1)
    with (config.run_dir / "ledger.jsonl").open("a") as file:
        file.write('{"step": 6, "ha')
    assert train_and_save(config).resumed_at == 4
    assert [entry["step"] for entry in read_ledger(config.run_dir / "ledger.jsonl")] == [1, 2, 3, 4]
    assert [check.found for check in verify_run(config.run_dir) if not check.passed] == []


@pytest.mark.parametrize(("lines", "first"), [(0, 1), (1, 2)])
def test_lost_records_are_told_and_do_not_stop_the_run(config: TrainConfig, lines: int, first: int) -> None:
    metrics = config.run_dir / "metrics.jsonl"
    metrics.write_text("".join(metrics.read_text().splitlines(keepends=True)[:lines]))
    run = train_and_save(config)
    assert run.resumed_at == 4
    assert f"{metrics} has lost the records from step {first} to 4: reports lack them" in run.notes


def test_a_checkpoint_that_is_gone_is_told(config: TrainConfig) -> None:
    checkpoints = config.run_dir / "checkpoints"
    shutil.rmtree(checkpoints / "step-00000004")
    run = train_and_save(config)
    assert run.resumed_at == 2
    named = f"{checkpoints}/latest names step-00000004, which is gone"
    assert f"{named}: every step after 2 is computed again" in run.notes


def lose_all_but(kept: str) -> Callable[[Path], None]:
    def lose(run_dir: Path) -> None:
        for name in {"checkpoints", "weights", "metrics.jsonl", "ledger.jsonl"} - {kept}:
            path = run_dir / name
            shutil.rmtree(path) if path.is_dir() else path.unlink()

    return lose


LOST: dict[str, tuple[Callable[[Path], object], str]] = {
    "missing": (lambda run: shutil.rmtree(run / "checkpoints"), "weights has the weights of step 4"),
    "emptied": (
        lambda run: [shutil.rmtree(path) for path in (run / "checkpoints").glob("step-*")],
        "checkpoints/latest names one",
    ),
    "only weights": (lose_all_but("weights"), "weights has the weights of step 4"),
    "only metrics": (lose_all_but("metrics.jsonl"), "metrics.jsonl has the save of step 2"),
    # Of the six steps only the first two are of a first save that a kill may have ended, and one more interval.
    "only the ledger": (lose_all_but("ledger.jsonl"), "ledger.jsonl has 6 steps, of which every 2th was saved"),
}


@pytest.mark.parametrize("lost", LOST)
@pytest.mark.parametrize("seed", [1, 2])
def test_a_run_whose_checkpoints_are_gone_does_not_start_over(lost: str, seed: int, tmp_path: Path) -> None:
    config = small_config(tmp_path, save_every=2)
    train_and_save(config, 2, 2, rest=2)
    lose, found = LOST[lost]
    lose(config.run_dir)
    assert refusal(config.changed(seed=seed)) == (
        f"{config.run_dir}/checkpoints holds no checkpoint, but {config.run_dir}/{found}: restore the step folders, or "
        f"start a new run in another --run-dir, or after you move {config.run_dir} away"
    )


def test_a_training_killed_before_its_first_checkpoint_starts_again(tmp_path: Path) -> None:
    """It has records; killed in the first save, also weights and the save's temporary folder."""
    config = small_config(tmp_path, save_every=2)
    checkpoints, metrics = config.run_dir / "checkpoints", config.run_dir / "metrics.jsonl"
    assert train_and_save(config, rest=4).resumed_at is None
    train_and_save(config, 4)
    (checkpoints / "step-00000004").rename(checkpoints / ".step-00000004.0123.tmp")
    (checkpoints / "latest").unlink()
    metrics.write_text("".join(line for line in metrics.read_text().splitlines(keepends=True) if "train" in line))
    run = train_and_save(config, rest=4)
    # What the killed save left is gone.
    assert list((config.run_dir / "weights").glob("step-*")) == []
    assert run.notes == [f"{config.run_dir}/ledger.jsonl has 4 steps, and none was saved: they are computed again"]


def test_files_of_another_run_are_named(config: TrainConfig, tmp_path: Path) -> None:
    """They have another seed, and all else is equal."""
    other = small_config(tmp_path / "other", seed=2)
    train_and_save(other, 2, 2, 2)
    file, checkpoint = "weights/step-00000006.safetensors", "checkpoints/step-00000006"
    shutil.copy(other.run_dir / file, config.run_dir / file)
    shutil.copytree(other.run_dir / checkpoint, config.run_dir / checkpoint)
    found = {check.name: check.found for check in verify_run(config.run_dir) if not check.passed}
    assert found == {
        "checkpoint step-00000006": f"{config.run_dir / checkpoint} is from another run than config.json: move it out "
        "of the folder",
        "weights": f"{config.run_dir / file} is from another run than config.json: move it out of the folder",
    }
    message = f"{config.run_dir / file} is from another run than {config.run_dir}/config.json: move it out of the"
    for choice in ({}, {"last": 1}, {"last": 3}):
        with pytest.raises(UserError, match=message):
            choose_weights(config.run_dir, **choice)


def test_fewer_steps_than_are_done_change_nothing(config: TrainConfig) -> None:
    assert refusal(config.changed(max_steps=3)).startswith(
        f"{config.run_dir} is at step 4, beyond --max-steps 3: raise"
    )
