"""The files of a run that averaging takes."""

import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from dist_transformer.averaging.choice import choose_weights, next_command
from dist_transformer.base.errors import UserError
from dist_transformer.runtime.launch import as_typed, own_command
from tests.averaging.conftest import save, validate, validated


def test_the_newest_by_step(run: Path) -> None:
    files = {step: save(run, step) for step in (90, 100, 5)}
    # Another set of weights of a step, and a file that is being written.
    (run / "weights" / "step-00000110.other.safetensors").touch()
    (run / "weights" / ".step-00000120.safetensors.tmp").touch()
    chosen = choose_weights(run, last=2)
    assert (chosen.paths, chosen.steps) == ((files[90], files[100]), (90, 100))
    assert (chosen.how, chosen.warnings) == ("the last 2 weight files", ())
    assert choose_weights(run, last=3).steps == (5, 90, 100)


def test_uneven_steps_are_said(run: Path) -> None:
    """save_every 10, validate_every 15."""
    for step in (10, 15, 20, 30):
        save(run, step)
    assert choose_weights(run, last=4).warnings == (
        "the last 4 weight files are 5 to 10 steps apart, because interruptions, validations, the end of training and "
        "the best weights add files between those of save_every: --every MINUTES spaces them evenly",
    )
    assert choose_weights(run, last=1).warnings == ()


def test_fewer_than_asked_for(run: Path) -> None:
    with pytest.raises(UserError, match="weights has no weight files: train first, or check --run-dir"):
        choose_weights(run)
    save(run, 1)
    with pytest.raises(UserError, match="weights has 1 weight file, not 5: use --last 1, or train longer"):
        choose_weights(run, last=5)


WARM = {"optimizer": {"warmup_steps": 50}}


def test_files_of_interruptions_and_of_the_warm_up_are_left_out(run: Path) -> None:
    for step in (29, 50, 100, 132, 200, 300):
        save(run, step, interrupted=step in (29, 132))
    settings = run / "config.json"
    settings.write_text(json.dumps(WARM), encoding="utf-8")
    chosen = choose_weights(run)
    assert (chosen.steps, chosen.warnings) == ((100, 200, 300), ())
    assert chosen.how == "the last 3 weight files saved regularly after the warm-up of 50 steps"
    settings.write_text(json.dumps({"optimizer": {"warmup_steps": 300}}), encoding="utf-8")
    chosen = choose_weights(run)
    assert (chosen.steps, chosen.how[:48]) == ((300,), "the newest weight file, because none was saved r")
    settings.unlink()
    save(run, 29, interrupted=False)
    save(run, 132, interrupted=False)
    assert choose_weights(run).steps == (50, 100, 132, 200, 300)


def test_the_next_command_can_be_pasted_into_a_shell(tmp_path: Path) -> None:
    """It leaves the choice of the files to average, and states it as it is now; a file that cannot be read, too."""
    run = tmp_path / "it's a run"
    for step in (29, 50, 100, 132, 200, 300):
        save(run, step)
    (run / "config.json").write_text(json.dumps(WARM), encoding="utf-8")
    weights, command = next_command(run).splitlines()
    assert weights == f"weights: {run / 'weights'}, of which average takes {choose_weights(run).how}"
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
    chosen = choose_weights(run, last=3, every=10)
    assert chosen.steps == (400, 700, 1000)
    assert [path.name for path in chosen.paths] == [f"step-{step:08d}.safetensors" for step in (400, 700, 1000)]
    assert chosen.how == "the last 3 weight files, about 10 minutes of training apart (12.0 to 12.0)"
    assert choose_weights(run, last=3, every=8).steps == (600, 800, 1000)
    assert choose_weights(run, last=1, every=10).how == "the last 1 weight file, about 10 minutes of training apart"


def test_steps_of_uneven_length_do_not_matter(run: Path) -> None:
    """Half the speed after step 300; validations in between."""
    saved_after(run, {100: 10.2, 200: 20.1, 250: 25.0, 300: 30.0, 350: 40.0, 375: 45.0, 400: 50.0})
    chosen = choose_weights(run, last=5, every=10)
    assert chosen.steps == (100, 200, 300, 350, 400)
    assert chosen.how.endswith("apart (9.9 to 10.0)")


def test_too_few_that_are_so_far_apart(run: Path) -> None:
    # The best weights of long ago are no part of the last half hour, nor is a file of half a minute before.
    saved_after(run, {10: 5.0, 500: 70.0, 600: 80.0, 700: 90.0, 704: 90.5})
    assert choose_weights(run, last=3, every=10).steps == (500, 600, 704)
    with pytest.raises(UserError) as refused:
        choose_weights(run, last=4, every=10)
    assert str(refused.value) == (
        f"{run / 'weights'} has 3 weight files about 10 minutes of training apart (steps 500, 600, 704), not 4: use "
        "--last 3 or another --every, or train with a lower --save-every and a higher --keep-weights"
    )
    with pytest.raises(UserError, match=r"has 1 weight file about 6 minutes .*\(step 704\), not 2"):
        choose_weights(run, last=2, every=6)


def test_the_best_by_validation(run: Path) -> None:
    files = {step: save(run, step) for step in (10, 20, 30, 40, 50)}
    # Step 25 has no weight file, step 50 no validation; its loss was not finite at 40.
    validated(run, {10: 1.5, 20: 1.25, 25: 1.125, 30: 1.75, 40: None}, {10: 30.0, 20: 35.5, 25: 28.0, 30: 36.25})
    by_nll = choose_weights(run, best=2, by="nll")
    assert (by_nll.paths, by_nll.steps) == ((files[10], files[20]), (10, 20))
    assert by_nll.how == "best validation nll at step 10 (1.5000), step 20 (1.2500)"
    assert by_nll.warnings == ("better by nll, but their weights were not kept: steps 25",)
    by_bleu = choose_weights(run, best=2, by="bleu")
    assert (by_bleu.steps, by_bleu.warnings) == ((20, 30), ())
    assert by_bleu.how == "best validation bleu at step 20 (35.50), step 30 (36.25)"
    assert choose_weights(run, best=1, by="bleu").steps == (30,)
    assert choose_weights(run, best=3, by="bleu").steps == (10, 20, 30)


@pytest.mark.parametrize(("best_by", "step"), [("nll", 10), ("bleu", 20), ("chrf", 20), ("ter", 10), ("command", 20)])
def test_the_measure_is_the_one_of_the_run(run: Path, best_by: str, step: int) -> None:
    for saved in (10, 20):
        save(run, saved)
    lower, higher = ({"nll": 1.5, "ter": 60.0}, {"bleu": 20.0, "chrf": 40.0, "command": 0.5})
    other = {"nll": 1.75, "ter": 70.0, "bleu": 30.0, "chrf": 50.0, "command": 0.75}
    validate(run, {"step": 10, **lower, **higher}, {"step": 20, **other}, best_by=best_by)
    best = choose_weights(run, best=1)
    assert best.steps == (step,)
    assert best.how.startswith(f"best validation {best_by} at step {step} ")
    validated(run, {10: 1.5})
    with pytest.raises(UserError, match=r"metrics\.jsonl has no validation with bleu: use --by nll"):
        choose_weights(run, best=1, by="bleu")


@pytest.mark.parametrize("by", ["nll", "bleu"])
def test_of_equal_validations_the_earlier(run: Path, by: Any) -> None:
    for step in (10, 20, 30):
        save(run, step)
    validated(run, dict.fromkeys((10, 20, 30), 2.0), dict.fromkeys((10, 20, 30), 20.0))
    assert choose_weights(run, best=2, by=by).steps == (10, 20)
    assert choose_weights(run, best=1, by=by).steps == (10,)


def test_too_few_validated_steps_with_weights(run: Path) -> None:
    save(run, 40)
    with pytest.raises(UserError, match=r"metrics\.jsonl cannot be read \(.*No such file.*\): resume the run, which"):
        choose_weights(run, best=1, by="nll")
    validate(run)
    with pytest.raises(UserError, match=r"no validation with nll: use --last, or train with --validate-every above 0"):
        choose_weights(run, best=1)
    validated(run, {10: 1.5, 20: 1.75, 30: 1.0})
    with pytest.raises(UserError, match="has weight files of 0 validated steps, not of 1: use --last, or train with"):
        choose_weights(run, best=1)
    save(run, 10)
    save(run, 20)
    with pytest.raises(UserError) as refused:
        choose_weights(run, best=3)
    assert str(refused.value) == (
        f"{run} has weight files of 2 validated steps (10, 20), not of 3: use --best 2, or train with keep_best 3 or "
        "more, which keeps the weights of that many best validations"
    )
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "va\n')
    with pytest.raises(UserError, match=r"metrics\.jsonl cannot be read .*: resume the run, which repairs it"):
        choose_weights(run, best=1)
