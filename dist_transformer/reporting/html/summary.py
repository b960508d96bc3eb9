"""Figures and tables of a run's report: headline, key figures, settings, and the machines of its starts."""

import statistics
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple, cast

from dist_transformer.config.measures import LABELS, Measure, badness
from dist_transformer.config.plain import to_plain
from dist_transformer.config.presets import PRESETS
from dist_transformer.config.settings import TrainConfig
from dist_transformer.reporting.html.run import Run, shown

# Scores of the best validation, and their format.
_FORMS: dict[Any, str] = {"nll": ".3f", "ppl": ".2f", "bleu": ".1f", "chrf": ".1f", "ter": ".1f", "command": ".4g"}
# These have no default, or come from the data.
_GIVEN = frozenset({"data", "run_dir", "vocab_size", "target_vocab_size"})
# Entries of a start that are not about its machine.
_OTHER = frozenset({"step", "time", "settings"})
_MACHINE = {
    "python": "Python",
    "torch": "PyTorch",
    "deepspeed": "DeepSpeed",
    "cuda": "CUDA",
    "system": "System",
    "processor": "Processor",
    "cores": "Cores of a rank's host",
    "memory_gib": "Memory of the host, GiB",
    "gpus": "GPUs of the host",
    "hosts": "Hosts",
    "world_size": "Ranks",
    "state_bytes": "Bytes of weights, optimizer and buffers on a rank",
}

Row = tuple[str, str, str | None]
"""Name and value of a setting, and its default if it has another one."""


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
    max_steps = run.settings.get("max_steps")
    of_all = f" of {max_steps:,.0f}" if max_steps else ""
    if run.step == 0:
        return Status("no step recorded", f"No step{of_all} is recorded yet.", is_over=False)
    # A finished run whose max_steps was raised continues after its `end`.
    has_ended = bool(run.ends) and run.ends[-1]["step"] == run.step
    if has_ended and (max_steps is None or run.step >= max_steps):
        return Status("finished", f"All {run.step:,} steps are done.", is_over=True)
    patience = run.settings.get("patience") or 0
    if has_ended and 0 < patience <= validations_since_best(run):
        sentence = f"Stopped at step {run.step:,}{of_all}: no better validation in {patience:.0f}."
        return Status("out of patience", sentence, is_over=True)
    return Status("running or interrupted", f"The last record is of step {run.step:,}{of_all}.", is_over=False)


def best_by(run: Run) -> Measure:
    """Return the measure by which the settings compare validations."""
    return cast(Measure, run.settings.get("best_by", "nll"))


def best_validation(run: Run) -> dict[str, Any] | None:
    """Return the best validation; among equals, the first."""
    name = best_by(run)
    known = [(badness(name, value), record) for record in run.valid if (value := record.get(name)) is not None]
    return min(known, key=lambda pair: pair[0])[1] if known else None


def validations_since_best(run: Run) -> int:
    best = best_validation(run)
    return 0 if best is None else sum(record["step"] > best["step"] for record in run.valid)


def headline_bleu(run: Run) -> Bleu | None:
    """Return the BLEU of the newest score file, or else of the newest validation with translations."""
    if run.scores:
        file = run.scores[0]
        sentences = file.values.get("sentences")
        where = f"{file.name}{file.model and f': {file.model}'}{f', {sentences:,.0f} sentences' if sentences else ''}"
        return Bleu(file.values["bleu"], file.values["signature"], where)
    # The mean over several directions has no signature.
    signatures = {s.step: s.signature if s.direction is None else "mean over the directions" for s in run.sheets}
    for record in reversed(run.valid):
        if (value := record.get("bleu")) is not None:
            return Bleu(value, signatures.get(record["step"], ""), f"validation, step {record['step']:,}")
    return None


def newest(run: Run, name: str) -> float | None:
    """Return the last value of a measure among the records of training and its end; None if there is none."""
    records = sorted([*run.train, *run.ends], key=lambda record: record["step"])
    return next((value for record in reversed(records) if (value := record.get(name)) is not None), None)


def world_size(run: Run) -> float | None:
    """Return the ranks of the newest start, or of the end if starts are not recorded."""
    starts = [value for entry in run.environments if (value := entry.get("world_size")) is not None]
    return starts[-1] if starts else newest(run, "world_size")


def zero_stage(run: Run) -> float | None:
    stage = run.settings.get("deepspeed", {}).get("zero_optimization", {}).get("stage")
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
    speed, fill = (spread(r.get(name) for r in run.train) for name in ("target_tokens_per_second", "fill"))
    batch, max_steps = run.settings.get("batch", {}), run.settings.get("max_steps")
    packs, size = batch.get("packs_per_step") or 0, batch.get("max_target_tokens") or 0
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
    known = {name: value for name in _FORMS if (value := best.get(name)) is not None}
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
    seconds = spread(record.get("seconds") for record in run.checkpoints)
    if seconds is None:
        return "No checkpoint is recorded."
    waited, trained = sum(record.get("stall") or 0.0 for record in run.checkpoints), newest(run, "train_seconds")
    saves, spans = "1 save", f"{seconds.median:.2f} s"
    if seconds.of > 1:
        saves, spans = f"{seconds.of:,} saves", f"median {spans}, {seconds.low:.2f} to {seconds.high:.2f} s"
    share = f" ({100 * waited / trained:.1f} % of the training time)" if trained else ""
    last = run.checkpoints[-1]["step"]
    return f"{saves}, the last at step {last:,}: {spans}; training waited {waited:,.1f} s in all{share}."


def settings_groups(settings: dict[str, Any]) -> Iterator[tuple[str, list[Row], list[Row]]]:
    """Yield the groups of config.json at any depth: name, rows, and rows of settings that have their default."""
    return _groups("", settings, to_plain(TrainConfig.of(data=("data",), run_dir=Path("run"))))


def _groups(name: str, values: dict[str, Any], defaults: Any) -> Iterator[tuple[str, list[Row], list[Row]]]:
    known = {key: value for key, value in defaults.items() if key not in _GIVEN} if isinstance(defaults, dict) else {}
    own = {key: value for key, value in values.items() if not isinstance(value, dict)}
    changed = {key: shown(known[key]) for key, value in own.items() if known.get(key, value) != value}
    rows = [(key, shown(value), changed.get(key)) for key, value in own.items()]
    folded = [row for row in rows if row[0] in known.keys() - changed.keys()]
    if rows:
        yield name or "run", [row for row in rows if row not in folded], folded
    for key in [key for key in values if key not in own]:
        yield from _groups(f"{name}.{key}" if name else key, values[key], known.get(key))


def starts(entries: list[dict[str, Any]]) -> list[tuple[str, list[Row], str]]:
    """List the starts, oldest first: when, the machine, and what changed since the one before."""
    return [
        (
            f"after step {now['step']:,} ({now['time']})",
            [(_MACHINE.get(name, name), _text(value), None) for name, value in now.items() if name not in _OTHER],
            ", ".join([*_changes(before, now), *_changes(before.get("settings", {}), now.get("settings", {}))]),
        )
        for before, now in pairwise([{}, *entries])
    ]


def _text(value: Any) -> str:
    if isinstance(value, list):
        counts = Counter(map(shown, value))
        return ", ".join(f"{count} × {item}" if count > 1 else item for item, count in counts.items()) or "none"
    return shown(value)


def _changes(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """List what differs between two starts; nothing is known to differ if one of them recorded nothing."""
    names = [name for name in before | now if name not in _OTHER] if before and now else []
    return [
        f"{_MACHINE.get(name, name)} {_text(before.get(name))} → {_text(now.get(name))}"
        for name in names
        if before.get(name) != now.get(name)
    ]


def scientific(value: float) -> str:
    """Format a number as `2.45·10¹⁴`, without trailing zeros."""
    mantissa, exponent = f"{value:.2e}".split("e")
    return f"{float(mantissa):g}·10{superscript(int(exponent))}"


def superscript(number: int) -> str:
    return str(number).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))
