"""Choice of the weight files to average: regular ones, the newest, files at even intervals of time, or the best."""

import itertools
from dataclasses import dataclass
from pathlib import Path

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

    Without a number, choose the newest files, at most `MOST_REGULAR`, without those of interruptions and of the
    warm-up. The weights of the warm-up are far from those of later steps, and a mean with them is a bad model. If
    nothing else is left, choose the newest file.

    Raises:
        UserError: there are not enough files, or one of them, or the newest, is from another run.
    """
    files = weight_files(run_dir)
    if not files:
        raise UserError(f"{run_dir / WEIGHTS} has no weight files: train first, or check --run-dir")
    settings = read_json(run_dir / SETTINGS_FILE) if (run_dir / SETTINGS_FILE).exists() else {}
    if best is not None:
        chosen = _best(run_dir, files, best, by or read_json(run_dir / SETTINGS_FILE)["best_by"])
    elif last is None:
        chosen = _regular(files, settings.get("optimizer", {}).get("warmup_steps", 0))
    else:
        chosen = _newest(run_dir, files, last) if every is None else _spaced(run_dir, files, last, every)
    for file in sorted({*chosen.paths, max(files.values())}):
        if settings and is_of_another_run(weight_file_metadata(file).get("run"), settings):
            raise UserError(f"{file} is from another run than {run_dir / SETTINGS_FILE}: move it out of the folder")
    return chosen


def next_command(run_dir: Path) -> str:
    """Return lines for a user whose run has ended: where the weights are, and the command that averages them."""
    try:
        found = f", of which average takes {choose_weights(run_dir).how}"
    except UserError:
        # The command reports it; training is finished.
        found = ""
    command = as_typed(own_command("average", "--run-dir", run_dir, "--out", run_dir / "model"))
    return f"weights: {run_dir / WEIGHTS}{found}\nnext:    {command}"


def _regular(files: dict[int, Path], warmup: int) -> ChosenWeights:
    """Choose the newest files saved regularly after the warm-up, or the newest one."""
    steps = [
        step for step, file in files.items() if step > warmup and not weight_file_metadata(file).get("interrupted")
    ]
    after = f" after the warm-up of {warmup:,} steps" if warmup else ""
    if not steps:
        return _chosen(files, [max(files)], f"the newest weight file, because none was saved regularly{after}")
    steps = steps[-MOST_REGULAR:]
    return _chosen(files, steps, f"the last {_count(steps)} saved regularly{after}")


def _newest(run_dir: Path, files: dict[int, Path], count: int) -> ChosenWeights:
    """Choose the newest files, with a warning if their steps are not evenly spaced."""
    steps = [*files][-count:]
    if len(steps) < count:
        raise UserError(
            f"{run_dir / WEIGHTS} has {_count(steps)}, not {count}: use --last {len(steps)}, or train longer"
        )
    gaps = {later - earlier for earlier, later in itertools.pairwise(steps)}
    warnings: tuple[str, ...] = ()
    if len(gaps) > 1:
        warnings = (
            f"the last {_count(steps)} are {min(gaps)} to {max(gaps)} steps apart, because interruptions, validations, "
            "the end of training and the best weights add files between those of save_every: --every MINUTES spaces "
            "them evenly",
        )
    return _chosen(files, steps, f"the last {_count(steps)}", *warnings)


def _spaced(run_dir: Path, files: dict[int, Path], count: int, minutes: float) -> ChosenWeights:
    """Choose the newest file and `count` - 1 older ones, each nearest to `minutes` of training before the next.

    Of two equally near files, the older one is chosen. Training time is the time of steps only: pauses between jobs,
    validation and saving do not count.

    Raises:
        UserError: there are fewer files at distances of `minutes` ± `minutes` / 2.
    """
    times = {step: weight_file_metadata(file)["train_seconds"] / 60 for step, file in files.items()}
    steps, gaps = [max(files)], list[float]()
    while len(steps) < count:
        newest = times[steps[0]]
        older = [step for step in files if step < steps[0]]
        step = min(older, key=lambda step: (abs(newest - times[step] - minutes), step), default=None)
        if step is None or abs(newest - times[step] - minutes) > minutes / 2:
            names = f"step{'s' * (len(steps) > 1)} {', '.join(map(str, steps))}"
            raise UserError(
                f"{run_dir / WEIGHTS} has {_count(steps)} about {minutes:g} minutes of training apart ({names}), "
                f"not {count}: use --last {len(steps)} or another --every, or train with a lower --save-every and a "
                "higher --keep-weights"
            )
        gaps.insert(0, newest - times[step])
        steps.insert(0, step)
    apart = f" ({min(gaps):.1f} to {max(gaps):.1f})" if gaps else ""
    return _chosen(files, steps, f"the last {_count(steps)}, about {minutes:g} minutes of training apart{apart}")


def _best(run_dir: Path, files: dict[int, Path], count: int, by: Measure) -> ChosenWeights:
    """Choose the files with the best validations; among equals the earlier, as in training.

    Warn about steps with a better validation than the worst chosen one whose weights were not kept.

    Raises:
        UserError: fewer validated steps have a weight file, or no validation has the measure.
    """
    metrics = run_dir / METRICS_FILE
    try:
        records = read_records(run_dir, "valid")
    except (OSError, ValueError) as error:
        raise UserError(
            f"{metrics} cannot be read ({error}): resume the run, which repairs it, or use --last"
        ) from None
    if by == "nll" and records:
        # A version that left longer pairs out may have validated the earlier steps; such losses are not comparable.
        records = [each for each in records if each.get("longer_pairs") == records[-1].get("longer_pairs")]
    # A loss that was not finite is written as null.
    values = {record["step"]: record[by] for record in records if record.get(by) is not None}
    if not values:
        remedy = "use --by nll" if records else "use --last, or train with --validate-every above 0"
        raise UserError(f"{metrics} has no validation with {by}: {remedy}")
    ranked = sorted(values, key=lambda step: (badness(by, values[step]), step))
    kept = [step for step in ranked if step in files]
    if len(kept) < count:
        listed = f" ({', '.join(map(str, sorted(kept)))})" if kept else ""
        remedy = f"use --best {len(kept)}" if kept else "use --last"
        raise UserError(
            f"{run_dir} has weight files of {len(kept)} validated steps{listed}, not of {count}: {remedy}, or train "
            f"with keep_best {count} or more, which keeps the weights of that many best validations"
        )
    lost = ", ".join(map(str, sorted(set(ranked[: ranked.index(kept[count - 1])]) - set(kept))))
    warnings = (f"better by {by}, but their weights were not kept: steps {lost}",) if lost else ()
    decimals = 2 if by in ("bleu", "chrf", "ter") else 4
    listed = ", ".join(f"step {step} ({values[step]:.{decimals}f})" for step in sorted(kept[:count]))
    return _chosen(files, sorted(kept[:count]), f"best validation {by} at {listed}", *warnings)


def _count(steps: list[int]) -> str:
    return f"{len(steps)} weight file{'s' if len(steps) != 1 else ''}"


def _chosen(files: dict[int, Path], steps: list[int], how: str, *warnings: str) -> ChosenWeights:
    return ChosenWeights(paths=tuple(files[step] for step in steps), steps=tuple(steps), how=how, warnings=warnings)
