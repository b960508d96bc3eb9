"""Headline and key figures of a run's report, computed from its records."""

import statistics
from collections.abc import Iterable
from typing import Any, NamedTuple

from dist_transformer.config.measures import LABELS, MEASURES, Measure, badness
from dist_transformer.config.plain import to_plain
from dist_transformer.config.presets import PRESETS
from dist_transformer.reporting.html.run import Run
from dist_transformer.reporting.html.values import number, scientific

# Scores of the best validation, and their format.
_FORMS: dict[Any, str] = {"nll": ".3f", "ppl": ".2f", "bleu": ".1f", "chrf": ".1f", "ter": ".1f", "command": ".4g"}


class Spread(NamedTuple):
    """A median and its range."""

    median: float
    low: float
    high: float
    of: int
    """Number of values."""


class Status(NamedTuple):
    """Progress of a run, judged from its records and settings."""

    label: str
    sentence: str
    is_over: bool


class Bleu(NamedTuple):
    """The BLEU score of the headline."""

    value: float
    signature: str
    where: str
    """Description of the scored text."""


def spread(values: Iterable[float | None]) -> Spread | None:
    """Compute the spread of the values that are not None; None if there are none."""
    known = [value for value in values if value is not None]
    return Spread(statistics.median(known), min(known), max(known), len(known)) if known else None


def judge(run: Run) -> Status:
    """Judge whether a run is finished, out of patience, or neither."""
    # From its records, a running process cannot be distinguished from a killed one.
    max_steps = number(run.settings, "max_steps")
    of_all = f" of {max_steps:,.0f}" if max_steps else ""
    if run.step == 0:
        return Status("no step recorded", f"No step{of_all} is recorded yet.", is_over=False)
    # A finished run whose max_steps was raised continues after its `end`.
    has_ended = bool(run.ends) and run.ends[-1]["step"] == run.step
    if has_ended and (max_steps is None or run.step >= max_steps):
        return Status("finished", f"All {run.step:,} steps are done.", is_over=True)
    patience = number(run.settings, "patience") or 0
    if has_ended and 0 < patience <= validations_since_best(run):
        sentence = f"Stopped at step {run.step:,}{of_all}: no better validation in {patience:.0f}."
        return Status("out of patience", sentence, is_over=True)
    return Status("running or interrupted", f"The last record is of step {run.step:,}{of_all}.", is_over=False)


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
        file = run.scores[0]
        sentences = number(file.values, "sentences")
        where = f"{file.name}{file.model and f': {file.model}'}{f', {sentences:,.0f} sentences' if sentences else ''}"
        return Bleu(file.values["bleu"], file.values["signature"], where)
    # The mean over several directions has no signature.
    signatures = {s.step: s.signature if s.direction is None else "mean over the directions" for s in run.sheets}
    for record in reversed(run.valid):
        if (value := number(record, "bleu")) is not None:
            return Bleu(value, signatures.get(record["step"], ""), f"validation, step {record['step']:,}")
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
        if network == plain["model"] and all(settings.get(group) == plain[group] for group in ("batch", "optimizer")):
            return name
    return None


def described(run: Run) -> str:
    """Describe corpus and network: `toy · en → de · preset base · 61 M parameters · 6 + 6 layers, width 512, …`."""
    model, preset = run.settings.get("model"), preset_name(run.settings)
    ways = (
        [way.get("source_language"), way.get("target_language")]
        for way in run.identity.get("directions") or [run.identity]
    )
    network = "{encoder_layers} + {decoder_layers} layers, width {width}, {heads} heads, feed-forward {ffn_width}"
    parts = (
        run.identity.get("corpus"),
        ", ".join(" → ".join(filter(None, way)) for way in ways),
        preset and f"preset {preset}",
        run.parameters and f"{run.parameters / 1e6:.3g} M parameters",
        model and network.format_map(model),
    )
    return " · ".join(part for part in parts if part)


def key_figures(run: Run) -> list[tuple[str, str, str]]:
    """List label, value and note of the figures that are known."""
    names = ("train_seconds", "training_flops", "skipped_steps", "epoch", "target_tokens")
    seconds, flops, skipped, epoch, target_tokens = (newest(run, name) for name in names)
    speed, fill = (spread(number(r, name) for r in run.train) for name in ("target_tokens_per_second", "fill"))
    batch, max_steps = run.settings.get("batch", {}), number(run.settings, "max_steps")
    packs, size = number(batch, "packs_per_step") or 0, number(batch, "max_target_tokens") or 0
    ranks, stage = world_size(run), zero_stage(run)
    trained = f"complete; {scientific(target_tokens)} target tokens" if target_tokens else "complete"
    figures = (
        ("Steps", f"{run.step:,}", f"of {max_steps:,.0f}" if max_steps else ""),
        ("Epochs", epoch is not None and f"{epoch:,.0f}", trained),
        ("Training time", seconds is not None and duration(seconds), "without validation and saving"),
        ("Target tokens/s", speed and f"{speed.median:,.0f}", speed and _range(speed)),
        ("Fill", fill and f"{100 * fill.median:.1f} %", "of the token budgets is text"),
        ("Skipped steps", skipped is not None and f"{skipped:,.0f}", "loss or gradient not finite"),
        ("Training FLOPs", flops and scientific(flops), "by the model's matrix products"),
        ("Best validation", *_best(run)),
        ("Batch", packs and f"{packs * size:,.0f}", f"target tokens at most, in {packs:,.0f} packs of {size:,.0f}"),
        ("Ranks", ranks and f"{ranks:,.0f}", "process" if ranks == 1 else "processes"),
        ("ZeRO stage", stage is not None and f"{stage:.0f}", ""),
        ("Precision", run.settings.get("precision"), ""),
    )
    return [(label, str(value), str(note)) for label, value, note in figures if value]


def _best(run: Run) -> tuple[str, str]:
    best = best_validation(run)
    if best is None:
        return "none", "no validation is recorded"
    known = {name: value for name in _FORMS if (value := number(best, name)) is not None}
    first, *others = (f"{LABELS.get(name, name)} {value:{_FORMS[name]}}" for name, value in known.items())
    return first, ", ".join(
        [*others, f"step {best['step']:,}", f"best of {len(run.valid):,} by {LABELS[best_by(run)]}"]
    )


def duration(seconds: float) -> str:
    """Format a duration: `12.3 s`, `4 min 05 s`, `3 h 07 min`."""
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02d} s" if minutes < 60 else f"{minutes // 60:,} h {minutes % 60:02d} min"


def _range(values: Spread) -> str:
    if values.of == 1:
        return "of 1 interval"
    return f"median; {values.low:,.0f} to {values.high:,.0f} over {values.of:,} intervals"


def saved(run: Run) -> str:
    """Describe the seconds per save, and the time that training waited for saves."""
    seconds = spread(number(record, "seconds") for record in run.checkpoints)
    if seconds is None:
        return "No checkpoint is recorded."
    waited, trained = sum(number(record, "stall") or 0.0 for record in run.checkpoints), newest(run, "train_seconds")
    saves, spans = "1 save", f"{seconds.median:.2f} s"
    if seconds.of > 1:
        saves, spans = f"{seconds.of:,} saves", f"median {spans}, {seconds.low:.2f} to {seconds.high:.2f} s"
    share = f" ({100 * waited / trained:.1f} % of the training time)" if trained else ""
    last = run.checkpoints[-1]["step"]
    return f"{saves}, the last at step {last:,}: {spans}; training waited {waited:,.1f} s in all{share}."
