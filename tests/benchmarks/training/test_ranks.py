"""One rank beside several: who is started, what is shared out, and what the figures say."""

import dataclasses
import json
import sys
from pathlib import Path

import pytest

from benchmarks.training import ranks as module
from benchmarks.training.ranks import RanksBenchmark, ranks_table, run_ranks_benchmark
from dist_transformer.base.errors import UserError
from dist_transformer.config.settings import BatchConfig, TrainConfig
from dist_transformer.data.folder.reader import DataFolder
from tests.conftest import run_command

CONFIG = TrainConfig.of(data=("unused",), run_dir=Path("unused"), batch=BatchConfig(packs_per_step=4))


def test_the_shares_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """8 s on one rank are 2 s of work for each of four: of 2.5 s a fifth is something else, and of 2 s nothing.

    Processes apart took 2.25 s and 1.5 s for that work, all four alike.
    """
    alone = {4: iter((8.0, 8.0)), 1: iter((2.25, 2.25, 2.25, 2.25, 1.5, 1.5, 1.5, 1.5))}
    several, asked = iter((2.5, 2.0)), []

    def step_seconds(config: TrainConfig, *, ranks: int, steps: int) -> float:
        assert steps == 3
        asked.append((ranks, config.batch.packs_per_step))
        return next(several) if ranks == 4 else next(alone[config.batch.packs_per_step])

    monkeypatch.setattr(module, "step_seconds", step_seconds)
    figures = run_ranks_benchmark(RanksBenchmark(config=CONFIG, ranks=4, steps=3, rounds=2), lambda _: None)
    there = [(1, 4), *[(1, 1)] * 4, (4, 4)]
    assert asked == [*there, *reversed(there)]
    assert figures["overhead_percent"]["values"] == pytest.approx([20.0, 0.0])
    assert figures["communication_percent"]["values"] == pytest.approx([10.0, 25.0])
    table = ranks_table(figures)
    assert "beyond their share of the work   10.0 (0–20)%" in table
    assert "of it communication              17.5 (10–25)%" in table


def test_settings_that_cannot_be_measured() -> None:
    settings = RanksBenchmark(config=CONFIG, ranks=2, steps=1, rounds=1)
    with pytest.raises(UserError, match="--ranks is 1: give 2 or more"):
        dataclasses.replace(settings, ranks=1)
    with pytest.raises(UserError, match="--steps is 0: give 1 or more"):
        dataclasses.replace(settings, steps=0)
    with pytest.raises(UserError, match=r"--batch\.packs-per-step is 4, which 3 ranks cannot share evenly"):
        dataclasses.replace(settings, ranks=3)


@pytest.mark.slice(name="benchmarks")
def test_the_command(toy_data: DataFolder, tmp_path: Path) -> None:
    command = [
        sys.executable,
        "tools/benchmark.py",
        "ranks",
        "--data",
        toy_data.path,
        "--steps",
        "2",
        "--rounds",
        "1",
        "--json",
        tmp_path / "r.json",
        "--",
        "--model.width",
        "32",
        "--model.heads",
        "2",
    ]
    output = run_command(*command)
    figures = json.loads((tmp_path / "r.json").read_text())["figures"]
    assert (figures["ranks"], figures["packs_per_step"], figures["max_target_tokens"]) == (2, 2, 1024)
    assert 0 < figures["several_ranks"]["median"] < 60
    assert ranks_table(figures) in output


@pytest.mark.slice(name="benchmarks")
def test_what_a_rank_refuses_is_said_once(tmp_path: Path) -> None:
    output = run_command(sys.executable, "tools/benchmark.py", "ranks", "--data", tmp_path, status=1)
    lines = output.strip().splitlines()
    assert lines[-1].startswith(f"error: training on 1 rank(s) failed: {tmp_path} ")
    assert "Traceback" not in output
    assert "UserError" not in output
