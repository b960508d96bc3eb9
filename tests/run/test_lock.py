"""A training that has lost its folder commits nothing more, whatever happens to its lock and whenever it wakes up."""

import os
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import pytest

from dist_transformer.base.errors import UserError
from dist_transformer.config.settings import TrainConfig
from dist_transformer.run import folder
from dist_transformer.run.lock import sole_training
from dist_transformer.run.verify import verify_run
from tests.run.small_run import SmallRun, small_config, train_and_save

LOST = "whose lock file was removed or replaced; another training may use the folder"


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TrainConfig:
    """Nobody waits for a process that is about to end."""
    monkeypatch.setattr(folder, "sole_training", partial(sole_training, patience=0.0))
    return small_config(tmp_path)


def contents(run_dir: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in run_dir.rglob("*") if path.is_file()}


@pytest.mark.parametrize("commit", ["save", "train"])
def test_a_training_whose_lock_was_removed_ends_at_its_next_commit(config: TrainConfig, commit: str) -> None:
    with ExitStack() as held:
        run = SmallRun(config, held)
        run.train(2)
        run.save()
        (config.run_dir / "lock").unlink()
        before = contents(config.run_dir)
        with pytest.raises(UserError, match=LOST) as refused:
            run.save() if commit == "save" else run.train(1)
        assert "\n" not in str(refused.value)
        assert contents(config.run_dir) == before
    # It does not touch the lock of the next one either, which resumes from the last commit.
    assert train_and_save(config, 1).resumed_at == 2


def test_a_training_that_wakes_up_beside_another_one_leaves_it_alone(config: TrainConfig) -> None:
    with ExitStack() as held, ExitStack() as other:
        asleep = SmallRun(config, held)
        asleep.train(2)
        asleep.save()
        asleep.train(1)
        (config.run_dir / "lock").unlink()
        awake = SmallRun(config, other)
        assert awake.resumed_at == 2
        awake.train(2)
        before = contents(config.run_dir)
        for commit in (asleep.save, partial(asleep.train, 1)):
            with pytest.raises(UserError, match=LOST):
                commit()
        held.close()
        assert contents(config.run_dir) == before
        awake.save()
    assert [check.found for check in verify_run(config.run_dir) if not check.passed] == []


def test_the_fence_stands_right_before_the_commit(config: TrainConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Suspended while the manifest is flushed, which is the last file of a checkpoint: no name changes."""
    with ExitStack() as held:
        run = SmallRun(config, held)
        run.train(1)
        run.save()
        run.train(1)
        fsync, lock_file = os.fsync, config.run_dir / "lock"

        def suspended(handle: int) -> None:
            fsync(handle)
            if ".manifest.json." in os.readlink(f"/proc/self/fd/{handle}"):
                lock_file.unlink()

        monkeypatch.setattr(os, "fsync", suspended)
        with pytest.raises(UserError, match=LOST):
            run.save()
    assert (config.run_dir / "checkpoints/latest").read_text() == "step-00000001\n"
    assert [file.name for file in (config.run_dir / "weights").glob("*.safetensors")] == ["step-00000001.safetensors"]
