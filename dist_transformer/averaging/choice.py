"""Choice of the weight files to average: regular ones, the newest, files at even intervals of time, or the best."""

import itertools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dist_transformer.averaging.sources import weight_file_metadata
from dist_transformer.base.errors import UserError
from dist_transformer.config.measures import Measure, badness
from dist_transformer.config.plain import read_json
from dist_transformer.run.folder import is_of_another_run
from dist_transformer.run.layout import METRICS_FILE, SETTINGS_FILE, WEIGHTS, read_records, weight_files
from dist_transformer.runtime.launch import as_typed, own_command

MOST_REGULAR = 5
"""Most weight files that are averaged if no number is given; the paper averages 5 of base."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ChosenWeights:
    """Weight files of a run, oldest first."""

    paths: tuple[Path, ...]
    steps: tuple[int, ...]
    how: str
    """Rule of the choice, for the model card; empty if the user named the files."""
    warnings: tuple[str, ...] = ()
    """Warnings about the choice, one sentence each."""


def choose_weights(
    run_dir: Path,
    *,
    last: int | None = None,
    every: float | None = None,
    best: int | None = None,
    by: Measure | None = None,
) -> ChosenWeights:
    """Choose the `best` weight files of a run by a measure, or the `last` ones, optionally `every` minutes apart.

    Without a number, choose as `regular_weights` does.

    Raises:
        UserError: there are not enough files, or one of them, or the newest, is from another run.
    """
    if best is not None:
        chosen = best_weights(run_dir, best, by)
    elif last is None:
        chosen = regular_weights(run_dir)
    else:
        chosen = newest_weights(run_dir, last) if every is None else spaced_weights(run_dir, last, every)
    settings = _settings(run_dir)
    for file in sorted({*chosen.paths, max(weight_files(run_dir).values())}):
        if settings and is_of_another_run(weight_file_metadata(file).get("run"), settings):
            raise UserError(f"{file} is from another run than {run_dir / SETTINGS_FILE}: move it out of the folder")
    return chosen


def _settings(run_dir: Path) -> dict[str, Any]:
    """Read the settings of a run; none if there is no file of them."""
    return read_json(run_dir / SETTINGS_FILE) if (run_dir / SETTINGS_FILE).exists() else {}


def regular_weights(run_dir: Path) -> ChosenWeights:
    """Choose the newest files, at most `MOST_REGULAR`, without those of interruptions and of the warm-up.

    The weights of the warm-up are far from those of later steps, and a mean with them is a bad model. If nothing else
    is left, the newest file is chosen.

    Raises:
        UserError: there are no files, or one cannot be read.
    """
    files = weight_files(run_dir)
    if not files:
        raise _no_files(run_dir)
    settings = _settings(run_dir)
    warmup = settings.get("optimizer", {}).get("warmup_steps", 0)
    steps = [step for step in files if step > warmup and not _is_of_interruption(files[step], step, settings)]
    after = f" after the warm-up of {warmup:,} steps" if warmup else ""
    if not steps:
        return _chosen(files, [max(files)], how=f"the newest weight file, because none was saved regularly{after}")
    steps = steps[-MOST_REGULAR:]
    return _chosen(files, steps, how=f"the last {_files(len(steps))} that were saved regularly{after}")


def _is_of_interruption(file: Path, step: int, settings: dict[str, Any]) -> bool:
    """Return whether a file was saved only because training was asked to stop."""
    recorded: bool | None = weight_file_metadata(file).get("interrupted")
    if recorded is not None:
        return recorded
    # Versions that did not record it saved regularly at these steps only.
    regular = [every for name in ("save_every", "validate_every") if (every := settings.get(name))]
    return bool(regular) and all(step % every for every in regular) and step != settings.get("max_steps")


def next_command(run_dir: Path) -> str:
    """Return lines for a user whose run has ended: where the weights are, and the command that averages them."""
    try:
        found = f", of which average takes {regular_weights(run_dir).how}"
    except UserError:
        # The command reports it; training is finished.
        found = ""
    command = as_typed(own_command("average", "--run-dir", run_dir, "--out", run_dir / "model"))
    return f"weights: {run_dir / WEIGHTS}{found}\nnext:    {command}"


def newest_weights(run_dir: Path, count: int) -> ChosenWeights:
    """Choose the newest `count` weight files of a run, with a warning if their steps are not evenly spaced.

    Raises:
        UserError: there are fewer files.
    """
    files = weight_files(run_dir)
    if len(files) < count:
        raise UserError(
            f"{run_dir / WEIGHTS} has {_files(len(files))}, not {count}: "
            + (f"use --last {len(files)}, or train longer" if files else "train first, or check --run-dir")
        )
    steps = sorted(files)[-count:]
    gaps = {later - earlier for earlier, later in itertools.pairwise(steps)}
    warnings: tuple[str, ...] = ()
    if len(gaps) > 1:
        warnings = (
            f"the last {_files(count)} are {min(gaps)} to {max(gaps)} steps apart, because interruptions, validations, "
            "the end of training and the best weights add files between those of save_every: --every MINUTES spaces "
            "them evenly",
        )
    return _chosen(files, steps, how=f"the last {_files(count)}", warnings=warnings)


def spaced_weights(run_dir: Path, count: int, minutes: float) -> ChosenWeights:
    """Choose the newest weight file and `count` - 1 older ones, each nearest to `minutes` of training before the next.

    Of two equally near files, the older one is chosen. Training time is the time of steps only: pauses between jobs,
    validation and saving do not count.

    Raises:
        UserError: there are fewer files at distances of `minutes` ± `minutes` / 2.
    """
    files = weight_files(run_dir)
    if not files:
        raise _no_files(run_dir)
    times = _training_minutes(run_dir, files)
    steps = sorted(files)[-1:]
    gaps: list[float] = []
    while len(steps) < count:
        newest = times[steps[0]]
        older = [step for step in files if step < steps[0]]
        step = min(older, key=lambda step: (abs(newest - times[step] - minutes), step), default=None)
        if step is None or abs(newest - times[step] - minutes) > minutes / 2:
            names = f"steps {', '.join(map(str, steps))}" if len(steps) > 1 else f"step {steps[0]}"
            raise UserError(
                f"{run_dir / WEIGHTS} has {_files(len(steps))} about {minutes:g} minutes of training apart ({names}), "
                f"not {count}: use --last {len(steps)} or another --every, or train with a lower --save-every and a "
                "higher --keep-weights"
            )
        gaps.insert(0, newest - times[step])
        steps.insert(0, step)
    apart = f" ({min(gaps):.1f} to {max(gaps):.1f})" if gaps else ""
    how = f"the last {_files(count)}, about {minutes:g} minutes of training apart{apart}"
    return _chosen(files, steps, how=how)


def best_weights(run_dir: Path, count: int, by: Measure | None = None) -> ChosenWeights:
    """Choose the `count` weight files of a run with the best validations; among equals the earlier, as in training.

    Warn about steps with a better validation than the worst chosen one whose weights were not kept.

    Args:
        by: measure; None: the run's own `best_by`.

    Raises:
        UserError: fewer validated steps have a weight file, or no validation has the measure.
    """
    records = _records(run_dir, "valid", "use --last")
    if by is None:
        by = read_json(run_dir / SETTINGS_FILE)["best_by"]
    if by == "nll" and records:
        # A version that left longer pairs out may have validated the earlier steps; such losses are not comparable.
        records = [each for each in records if each.get("longer_pairs") == records[-1].get("longer_pairs")]
    # A loss that was not finite is written as null.
    values = {record["step"]: record[by] for record in records if record.get(by) is not None}
    if not values:
        remedy = "use --by nll" if records else "use --last, or train with --validate-every above 0"
        raise UserError(f"{run_dir / METRICS_FILE} has no validation with {by}: {remedy}")
    files = weight_files(run_dir)
    ranked = sorted(values, key=lambda step: (badness(by, values[step]), step))
    kept = [step for step in ranked if step in files]
    if len(kept) < count:
        listed = f" ({', '.join(map(str, sorted(kept)))})" if kept else ""
        remedy = f"use --best {len(kept)}" if kept else "use --last"
        raise UserError(
            f"{run_dir} has weight files of {len(kept)} validated steps{listed}, not of {count}: {remedy}, or train "
            f"with keep_best {count} or more, which keeps the weights of that many best validations"
        )
    before_worst = ranked[: ranked.index(kept[count - 1])]
    lost = ", ".join(map(str, sorted(set(before_worst) - set(kept))))
    decimals = 2 if by in ("bleu", "chrf", "ter") else 4
    listed = ", ".join(f"step {step} ({values[step]:.{decimals}f})" for step in sorted(kept[:count]))
    return _chosen(
        files,
        sorted(kept[:count]),
        how=f"best validation {by} at {listed}",
        warnings=(f"better by {by}, but their weights were not kept: steps {lost}",) if lost else (),
    )


def _files(count: int) -> str:
    return f"{count} weight file{'s' if count != 1 else ''}"


def _no_files(run_dir: Path) -> UserError:
    return UserError(f"{run_dir / WEIGHTS} has no weight files: train first, or check --run-dir")


def _chosen(files: dict[int, Path], steps: list[int], *, how: str, warnings: tuple[str, ...] = ()) -> ChosenWeights:
    return ChosenWeights(paths=tuple(files[s] for s in steps), steps=tuple(steps), how=how, warnings=warnings)


def _training_minutes(run_dir: Path, files: dict[int, Path]) -> dict[int, float]:
    """Find when each file was written, in minutes of training: from the file itself, or from the run's metrics."""
    seconds = {step: weight_file_metadata(file).get("train_seconds") for step, file in files.items()}
    if None in seconds.values():
        exists = (run_dir / METRICS_FILE).exists()
        records = _records(run_dir, "train", "use --last without --every") if exists else []
        logged = {record["step"]: record.get("train_seconds") for record in records}
        seconds = {step: logged.get(step) if value is None else value for step, value in seconds.items()}
    if lacking := [step for step, value in seconds.items() if value is None]:
        raise UserError(
            f"{files[lacking[0]]} and {run_dir / METRICS_FILE} do not have the training time at which it was written: "
            "use --last without --every"
        )
    return {step: value / 60 for step, value in seconds.items() if value is not None}


def _records(run_dir: Path, kind: str, remedy: str) -> list[dict[str, Any]]:
    file = run_dir / METRICS_FILE
    try:
        return read_records(run_dir, kind)
    except FileNotFoundError:
        raise UserError(f"{file} does not exist: train first, or check --run-dir") from None
    except (OSError, ValueError) as error:
        raise UserError(f"{file} cannot be read ({error}): resume the run, which repairs it, or {remedy}") from None
