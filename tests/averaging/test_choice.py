"""The files of a run that averaging takes."""

import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from dist_transformer.averaging.choice import (
    best_weights,
    newest_weights,
    next_command,
    regular_weights,
    spaced_weights,
)
from dist_transformer.base.errors import UserError
from dist_transformer.runtime.launch import as_typed, own_command
from tests.averaging.conftest import save, validate, validated


def test_the_newest_by_step(run: Path) -> None:
    files = {step: save(run, step) for step in (90, 100, 5)}
    # Another set of weights of a step, and a file that is being written.
    (run / "weights" / "step-00000110.other.safetensors").touch()
    (run / "weights" / ".step-00000120.safetensors.tmp").touch()
    chosen = newest_weights(run, 2)
    assert (chosen.paths, chosen.steps) == ((files[90], files[100]), (90, 100))
    assert (chosen.how, chosen.warnings) == ("the last 2 weight files", ())
    assert newest_weights(run, 3).steps == (5, 90, 100)


def test_uneven_steps_are_said(run: Path) -> None:
    """save_every 10, validate_every 15."""
    for step in (10, 15, 20, 30):
        save(run, step)
    assert newest_weights(run, 4).warnings == (
        "the last 4 weight files are 5 to 10 steps apart, because interruptions, validations, the end of training and "
        "the best weights add files between those of save_every: --every MINUTES spaces them evenly",
    )
    assert newest_weights(run, 1).warnings == ()


def test_fewer_than_asked_for(run: Path) -> None:
    with pytest.raises(UserError, match="weights has 0 weight files, not 5: train first, or check --run-dir"):
        newest_weights(run, 5)
    save(run, 1)
    save(run, 2)
    with pytest.raises(UserError, match="weights has 2 weight files, not 5: use --last 2, or train longer"):
        newest_weights(run, 5)


REGULAR = {"save_every": 100, "validate_every": 0, "max_steps": 300, "optimizer": {"warmup_steps": 50}}


def test_files_of_interruptions_and_of_the_warm_up_are_left_out(run: Path) -> None:
    """A file states it; for those of older versions, the steps that were saved regularly tell it."""
    for step in (29, 50, 100, 132, 200, 300):
        save(run, step)
    (run / "config.json").write_text(json.dumps(REGULAR), encoding="utf-8")
    chosen = regular_weights(run)
    assert (chosen.steps, chosen.warnings) == ((100, 200, 300), ())
    assert chosen.how == "the last 3 weight files that were saved regularly after the warm-up of 50 steps"
    save(run, 200, interrupted=True)
    save(run, 132, interrupted=False)
    assert regular_weights(run).steps == (100, 132, 300)
    (run / "config.json").write_text(json.dumps({**REGULAR, "optimizer": {"warmup_steps": 300}}), encoding="utf-8")
    chosen = regular_weights(run)
    assert (chosen.steps, chosen.how[:48]) == ((300,), "the newest weight file, because none was saved r")
    (run / "config.json").write_text("{}", encoding="utf-8")
    assert regular_weights(run).steps == (29, 50, 100, 132, 300)
    (run / "config.json").unlink()
    assert regular_weights(run).steps == (29, 50, 100, 132, 300)


def test_the_next_command_can_be_pasted_into_a_shell(tmp_path: Path) -> None:
    """It leaves the choice of the files to average, and states it as it is now; a file that cannot be read, too."""
    run = tmp_path / "it's a run"
    for step in (29, 50, 100, 132, 200, 300):
        save(run, step)
    (run / "config.json").write_text(json.dumps(REGULAR), encoding="utf-8")
    weights, command = next_command(run).splitlines()
    assert weights == f"weights: {run / 'weights'}, of which average takes {regular_weights(run).how}"
    typed = command.removeprefix("next:").strip()
    flags = ["--run-dir", str(run), "--out", str(run / "model")]
    assert typed == as_typed(own_command("average", *flags))
    assert shlex.split(typed)[-len(flags) - 1 :] == ["average", *flags]
    (run / "weights" / "step-00000400.safetensors").touch()
    assert next_command(run).splitlines() == [f"weights: {run / 'weights'}", command]


def saved_after(run: Path, minutes: dict[int, float]) -> None:
    for step, time in minutes.items():
        save(run, step, train_seconds=60.0 * time)


def test_files_are_spaced_in_training_time(run: Path) -> None:
    """Files 4 minutes apart, of which none is 10 minutes before another: 8 and 12 are as near, and 12 is older."""
    saved_after(run, {step: 0.04 * step for step in range(100, 1001, 100)})
    chosen = spaced_weights(run, 3, 10)
    assert chosen.steps == (400, 700, 1000)
    assert [path.name for path in chosen.paths] == [f"step-{step:08d}.safetensors" for step in (400, 700, 1000)]
    assert chosen.how == "the last 3 weight files, about 10 minutes of training apart (12.0 to 12.0)"
    assert spaced_weights(run, 3, 8).steps == (600, 800, 1000)
    assert spaced_weights(run, 1, 10).how == "the last 1 weight file, about 10 minutes of training apart"


def test_steps_of_uneven_length_do_not_matter(run: Path) -> None:
    """Half the speed after step 300; validations in between."""
    saved_after(run, {100: 10.2, 200: 20.1, 250: 25.0, 300: 30.0, 350: 40.0, 375: 45.0, 400: 50.0})
    chosen = spaced_weights(run, 5, 10)
    assert chosen.steps == (100, 200, 300, 350, 400)
    assert chosen.how.endswith("apart (9.9 to 10.0)")


def test_too_few_that_are_so_far_apart(run: Path) -> None:
    with pytest.raises(UserError, match="weights has no weight files: train first, or check --run-dir"):
        spaced_weights(run, 2, 10)
    # The best weights of long ago are no part of the last half hour, nor is a file of half a minute before.
    saved_after(run, {10: 5.0, 500: 70.0, 600: 80.0, 700: 90.0, 704: 90.5})
    assert spaced_weights(run, 3, 10).steps == (500, 600, 704)
    with pytest.raises(UserError) as refused:
        spaced_weights(run, 4, 10)
    assert str(refused.value) == (
        f"{run / 'weights'} has 3 weight files about 10 minutes of training apart (steps 500, 600, 704), not 4: use "
        "--last 3 or another --every, or train with a lower --save-every and a higher --keep-weights"
    )
    with pytest.raises(UserError, match=r"has 1 weight file about 6 minutes .*\(step 704\), not 2"):
        spaced_weights(run, 2, 6)


def test_files_without_the_time_have_it_in_the_metrics(run: Path) -> None:
    for step in (10, 20, 30):
        save(run, step, train_seconds=None)
    with pytest.raises(UserError, match=r"step-000000.0\.safetensors and .* do not have the training time"):
        spaced_weights(run, 2, 10)
    records = [{"kind": "train", "step": step, "train_seconds": 30.0 * step} for step in (10, 20)]
    file = run / "metrics.jsonl"
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    with pytest.raises(UserError, match=r"step-00000030\.safetensors and .* do not have .* without --every"):
        spaced_weights(run, 2, 10)
    file.write_text(file.read_text() + '{"kind": "train", "step": 30, "train_seconds": 900.0}\n')
    assert spaced_weights(run, 2, 10).steps == (10, 30)
    assert spaced_weights(run, 3, 5).steps == (10, 20, 30)
    # The last line may be torn by a loss of power, another one only by damage.
    file.write_text("[\n")
    with pytest.raises(UserError, match=r"metrics\.jsonl cannot be read .*or use --last without --every"):
        spaced_weights(run, 2, 10)


def test_the_best_by_validation(run: Path) -> None:
    files = {step: save(run, step) for step in (10, 20, 30, 40, 50)}
    # Step 25 has no weight file, step 50 no validation; its loss was not finite at 40.
    validated(run, {10: 1.5, 20: 1.25, 25: 1.125, 30: 1.75, 40: None}, {10: 30.0, 20: 35.5, 25: 28.0, 30: 36.25})
    by_nll = best_weights(run, 2, "nll")
    assert (by_nll.paths, by_nll.steps) == ((files[10], files[20]), (10, 20))
    assert by_nll.how == "best validation nll at step 10 (1.5000), step 20 (1.2500)"
    assert by_nll.warnings == ("better by nll, but their weights were not kept: steps 25",)
    by_bleu = best_weights(run, 2, "bleu")
    assert (by_bleu.steps, by_bleu.warnings) == ((20, 30), ())
    assert by_bleu.how == "best validation bleu at step 20 (35.50), step 30 (36.25)"
    assert best_weights(run, 1, "bleu").steps == (30,)
    assert best_weights(run, 3, "bleu").steps == (10, 20, 30)


@pytest.mark.parametrize(("best_by", "step"), [("nll", 10), ("bleu", 20), ("chrf", 20), ("ter", 10), ("command", 20)])
def test_the_measure_is_the_one_of_the_run(run: Path, best_by: str, step: int) -> None:
    for saved in (10, 20):
        save(run, saved)
    lower, higher = ({"nll": 1.5, "ter": 60.0}, {"bleu": 20.0, "chrf": 40.0, "command": 0.5})
    other = {"nll": 1.75, "ter": 70.0, "bleu": 30.0, "chrf": 50.0, "command": 0.75}
    validate(run, {"step": 10, **lower, **higher}, {"step": 20, **other}, best_by=best_by)
    best = best_weights(run, 1)
    assert best.steps == (step,)
    assert best.how.startswith(f"best validation {best_by} at step {step} ")
    validated(run, {10: 1.5})
    with pytest.raises(UserError, match=r"metrics\.jsonl has no validation with bleu: use --by nll"):
        best_weights(run, 1, "bleu")


@pytest.mark.parametrize("by", ["nll", "bleu"])
def test_of_equal_validations_the_earlier(run: Path, by: Any) -> None:
    for step in (10, 20, 30):
        save(run, step)
    validated(run, dict.fromkeys((10, 20, 30), 2.0), dict.fromkeys((10, 20, 30), 20.0))
    assert best_weights(run, 2, by).steps == (10, 20)
    assert best_weights(run, 1, by).steps == (10,)


def test_too_few_validated_steps_with_weights(run: Path) -> None:
    with pytest.raises(UserError, match=r"metrics\.jsonl does not exist: train first, or check --run-dir"):
        best_weights(run, 1)
    validate(run)
    with pytest.raises(UserError, match=r"no validation with nll: use --last, or train with --validate-every above 0"):
        best_weights(run, 1)
    validated(run, {10: 1.5, 20: 1.75, 30: 1.0})
    with pytest.raises(UserError, match="has weight files of 0 validated steps, not of 1: use --last, or train with"):
        best_weights(run, 1)
    save(run, 10)
    save(run, 20)
    save(run, 40)
    with pytest.raises(UserError) as refused:
        best_weights(run, 3)
    assert str(refused.value) == (
        f"{run} has weight files of 2 validated steps (10, 20), not of 3: use --best 2, or train with keep_best 3 or "
        "more, which keeps the weights of that many best validations"
    )
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "va\n')
    with pytest.raises(UserError, match=r"metrics\.jsonl cannot be read .*: resume the run, which repairs it"):
        best_weights(run, 1)
