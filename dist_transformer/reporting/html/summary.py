"""Figures at the top of a run's report, computed from its records."""

import statistics
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from dist_transformer.config.measures import MEASURES, Measure, badness
from dist_transformer.config.plain import to_plain
from dist_transformer.config.presets import PRESETS
from dist_transformer.reporting.html.run import Run, number


@dataclass(frozen=True, kw_only=True, slots=True)
class Spread:
    """A median and its range."""

    median: float
    low: float
    high: float
    count: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Status:
    """Progress of a run, judged from its records and settings."""

    label: str
    sentence: str
    is_over: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Bleu:
    """The BLEU score of the headline."""

    value: float
    signature: str
    where: str
    """Description of the scored text."""


def spread(values: Iterable[float | None]) -> Spread | None:
    """Compute the spread of the values that are not None; None if there are none."""
    known = [value for value in values if value is not None]
    if not known:
        return None
    return Spread(median=statistics.median(known), low=min(known), high=max(known), count=len(known))


def judge(run: Run) -> Status:
    """Judge whether a run is finished, out of patience, or neither."""
    # From its records, a running process cannot be distinguished from a killed one.
    max_steps = number(run.settings, "max_steps")
    of_all = f" of {max_steps:,.0f}" if max_steps else ""
    if run.step == 0:
        return Status(label="no step recorded", sentence=f"No step{of_all} is recorded yet.", is_over=False)
    # A finished run whose max_steps was raised continues after its `end`.
    has_ended = bool(run.ends) and run.ends[-1]["step"] == run.step
    if has_ended and (max_steps is None or run.step >= max_steps):
        return Status(label="finished", sentence=f"All {run.step:,} steps are done.", is_over=True)
    patience = number(run.settings, "patience") or 0
    if has_ended and 0 < patience <= validations_since_best(run):
        sentence = f"Stopped at step {run.step:,}{of_all}: no better validation in {patience:.0f}."
        return Status(label="out of patience", sentence=sentence, is_over=True)
    return Status(
        label="running or interrupted", sentence=f"The last record is of step {run.step:,}{of_all}.", is_over=False
    )


def best_by(run: Run) -> Measure:
    """Return the measure by which the settings compare validations."""
    return next((measure for measure in MEASURES if run.settings.get("best_by") == measure), "nll")


def best_validation(run: Run) -> dict[str, Any] | None:
    """Return the best validation; among equals, the first."""
    name = best_by(run)
    known = [(badness(name, value), record) for record in run.valid if (value := number(record, name)) is not None]
    return min(known, key=lambda pair: pair[0])[1] if known else None


def validations_since_best(run: Run) -> int:
    best = best_validation(run)
    return 0 if best is None else sum(record["step"] > best["step"] for record in run.valid)


def headline_bleu(run: Run) -> Bleu | None:
    """Return the BLEU of the newest score file, or else of the newest validation with translations."""
    if run.scores:
        newest = run.scores[0]
        sentences = number(newest.values, "sentences")
        of = f", {sentences:,.0f} sentences" if sentences else ""
        model = f": {newest.model}" if newest.model else ""
        where = f"{newest.name}{model}{of}"
        return Bleu(value=newest.values["bleu"], signature=newest.values["signature"], where=where)
    signatures: dict[int, str] = {}
    for sheet in run.sheets:
        # The mean over several directions has no signature.
        signatures[sheet.step] = sheet.signature if sheet.direction is None else "mean over the directions"
    for record in reversed(run.valid):
        value = number(record, "bleu")
        if value is not None:
            where = f"validation, step {record['step']:,}"
            return Bleu(value=value, signature=signatures.get(record["step"], ""), where=where)
    if run.sheets:
        sheet = run.sheets[-1]
        return Bleu(value=sheet.bleu, signature=sheet.signature, where=f"validation, step {sheet.step:,}")
    return None


def newest(run: Run, name: str) -> float | None:
    """Return the last value of a measure among the records of training and its end; None if there is none."""
    records = sorted([*run.train, *run.ends], key=lambda record: record["step"])
    return next((value for record in reversed(records) if (value := number(record, name)) is not None), None)


def world_size(run: Run) -> float | None:
    """Return the ranks of the newest start, or of the end if starts are not recorded."""
    starts = [value for entry in run.environments if (value := number(entry, "world_size")) is not None]
    return starts[-1] if starts else newest(run, "world_size")


def zero_stage(run: Run) -> float | None:
    stage = number(run.settings.get("deepspeed", {}).get("zero_optimization", {}), "stage")
    return newest(run, "zero_stage") if stage is None else stage


def preset_name(settings: dict[str, Any]) -> str | None:
    """Find the preset with the network, batch and optimizer of these settings."""
    for name, preset in PRESETS.items():
        plain = to_plain(preset)
        network = {**settings.get("model", {}), "vocab_size": 0}
        if network.pop("target_vocab_size", 0) and network.get("tie_embeddings") == "target":
            network["tie_embeddings"] = plain["model"]["tie_embeddings"]
        if network != plain["model"]:
            continue
        if all(settings.get(group) == plain[group] for group in ("batch", "optimizer")):
            return name
    return None
