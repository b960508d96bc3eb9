"""The examples of docs/extending.md, run as they stand on the page."""

import re
import runpy
import sys
from pathlib import Path

import pytest
import torch

from dist_transformer.config.registry import ATTENTIONS, POSITIONS
from dist_transformer.config.settings import ModelConfig, OptimizerConfig, TrainConfig
from dist_transformer.data.folder.reader import DataFolder
from dist_transformer.model.positions import sinusoidal_positions
from dist_transformer.run.layout import read_records
from dist_transformer.training.engine.schedule import learning_rate
from tests.conftest import ROOT, run_command, run_python
from tests.support.tiny import TINY_FLAGS

PAGE = (ROOT / "docs" / "extending.md").read_text(encoding="utf-8")
EXAMPLES = {
    heading: block
    for heading, section in re.findall(r"^## (.*?)\n(.*?)(?=^## |\Z)", PAGE, flags=re.MULTILINE | re.DOTALL)
    for block in re.findall(r"^```python\n(.*?)^```", section, flags=re.MULTILINE | re.DOTALL)
}
SCHEDULE, POSITION, ATTENTION = "A learning-rate schedule", "A position encoding", "Attention"
SINK = "A metric sink"
FLAGS = {
    SCHEDULE: ["--optimizer.schedule", "linear"],
    POSITION: ["--model.positions", "scaled"],
    ATTENTION: ["--model.attention", "alibi"],
}
PROGRAM = [sys.executable, "-m", "dist_transformer"]
IN_SLICE = pytest.mark.slice(name="commands")
EXAMPLE = pytest.mark.parametrize(
    "heading", [ATTENTION, *(pytest.param(heading, marks=IN_SLICE) for heading in (SCHEDULE, POSITION))]
)
SMALL = (
    "--precision fp32 --max-steps 6 --save-every 6 --validate-every 0 --log-every 1 --optimizer.warmup-steps 2 "
    "--optimizer.peak-lr 2e-3 --batch.packs-per-step 1"
)


def write(heading: str, folder: Path) -> Path:
    script = folder / f"{FLAGS[heading][1]}.py"
    script.write_text(EXAMPLES[heading], encoding="utf-8")
    return script


@pytest.mark.parametrize("heading", [*FLAGS, SINK])
def test_an_example_has_fewer_than_20_lines(heading: str) -> None:
    assert 3 < sum(bool(line.strip()) for line in EXAMPLES[heading].splitlines()) < 20
    assert " ".join(FLAGS.get(heading, [])) in PAGE


@pytest.mark.slow
@pytest.mark.usefixtures("registrations")
def test_the_sink_gets_every_log_line(toy_data: DataFolder, tmp_path: Path) -> None:
    script, run = tmp_path / "losses.py", tmp_path / "run"
    script.write_text(EXAMPLES[SINK], encoding="utf-8")
    given = ["--import", script, *TINY_FLAGS, *SMALL.split(), "--data", toy_data.path, "--run-dir", run]
    run_command(*PROGRAM, "train", *given)
    rows = (run / "losses.csv").read_text().splitlines()
    assert rows == [f"{step},{loss}" for step, loss in enumerate(read_metrics(run, "loss"), 1)]
    assert len(rows) == 6
    # A resume after the third step records the fourth one again.
    table = runpy.run_path(str(script))["LossTable"](run, 3)
    table.record("train", 4, {"loss": 7.0})
    table.close()
    assert (run / "losses.csv").read_text().splitlines() == [*rows[:3], "4,7.0"]


@pytest.mark.usefixtures("registrations")
def test_the_schedule_is_its_line(tmp_path: Path) -> None:
    runpy.run_path(str(write(SCHEDULE, tmp_path)))
    optimizer = OptimizerConfig(schedule="linear", warmup_steps=10, peak_lr=1e-3, min_lr=1e-4)
    config = TrainConfig.of(data=("d",), run_dir=Path("r"), max_steps=110, optimizer=optimizer)
    rates = [learning_rate(step, config) for step in (1, 10, 60, 85, 109, 110, 200)]
    assert rates == pytest.approx([1e-4, 1e-3, 5e-4, 2.5e-4, 1e-4, 1e-4, 1e-4], rel=1e-12)


@pytest.mark.usefixtures("registrations")
def test_the_positions_are_scaled_sinusoids(tmp_path: Path) -> None:
    runpy.run_path(str(write(POSITION, tmp_path)))
    positions = POSITIONS["scaled"](ModelConfig(positions="scaled", width=8, heads=2, max_positions=10))
    with torch.no_grad():
        positions.scale.fill_(0.5)
    found = positions(torch.tensor([3, 9]))
    torch.testing.assert_close(found, 0.5 * sinusoidal_positions(10, 8)[[3, 9]])
    found.sum().backward()
    assert positions.scale.grad is not None


@pytest.mark.usefixtures("registrations")
def test_the_attention_is_that_of_press_et_al(tmp_path: Path) -> None:
    """Their slopes for 8 heads are 1/2, 1/4, …, 1/256."""
    runpy.run_path(str(write(ATTENTION, tmp_path)))
    config = ModelConfig(attention="alibi", width=16, heads=8)
    scores, places = torch.zeros(1, 8, 4, 4), torch.arange(4)
    where = places.view(1, 1, 4, 1), places.view(1, 1, 1, 4)
    adjusted = ATTENTIONS["alibi"](config, "decoder").adjust_scores(scores, *where)
    assert adjusted[0, :, 3, 0].tolist() == [-3 / 2**head for head in range(1, 9)]
    assert adjusted[0, 0].diagonal().tolist() == [0.0] * 4
    assert not ATTENTIONS["alibi"](config, "cross").adjust_scores(scores, *where).any()


def read_metrics(run: Path, field: str) -> list[float]:
    return [record[field] for record in read_records(run, "train")]


@pytest.fixture(scope="module")
def plain_losses(toy_data: DataFolder, tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    run = tmp_path_factory.mktemp("plain") / "run"
    folders = ["--data", toy_data.path, "--run-dir", run]
    run_command(sys.executable, "-m", "dist_transformer.train", *TINY_FLAGS, *SMALL.split(), *folders)
    return read_metrics(run, "loss")


@pytest.mark.slow
@EXAMPLE
def test_an_example_trains_and_translates(
    heading: str, plain_losses: list[float], toy_data: DataFolder, tmp_path: Path
) -> None:
    script, run = write(heading, tmp_path), tmp_path / "run"
    given = [*TINY_FLAGS, *SMALL.split(), *FLAGS[heading], "--data", toy_data.path, "--run-dir", run]
    run_command(*PROGRAM, "train", "--import", script, *given)
    losses, rates = read_metrics(run, "loss"), read_metrics(run, "learning_rate")
    assert len(losses) == len(plain_losses) == 6
    if heading == SCHEDULE:
        assert rates == pytest.approx([1e-3, 2e-3, 1.5e-3, 1e-3, 5e-4, 0.0], abs=1e-12)
        assert losses[:3] == plain_losses[:3]
    else:
        # The scale begins at 1: the first step is that of plain sinusoids.
        assert (losses[0] == plain_losses[0]) == (heading == POSITION)
    assert losses[-1] != plain_losses[-1]

    model = tmp_path / "model"
    run_command(*PROGRAM, "average", "--import", script, "--run-dir", run, "--last", 1, "--out", model)
    words = ["-m", "dist_transformer", "translate", f"--import={script}", "--model", model]
    done = run_python(*words, input="a b\nc\n")
    assert (done.returncode, len(done.stdout.splitlines())) == (0, 2), done.stderr
    if heading == SCHEDULE:
        return
    setting, name = FLAGS[heading][0].removeprefix("--model."), FLAGS[heading][1]
    output = run_command(sys.executable, "tools/translate.py", "--model", model, status=1)
    assert f"config.json, model.{setting} is '{name}': pass the file that registers this " in output
    assert " with --import (docs/extending.md), or choose one of " in output
    assert "Traceback" not in output
