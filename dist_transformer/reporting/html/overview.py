"""Headline, key figures, curves and checkpoints, from the numbers in the records."""

import math
from typing import Any

from dist_transformer.config.measures import LABELS
from dist_transformer.reporting.html.curves import Chart, Series, draw, scientific
from dist_transformer.reporting.html.markup import Html, element, join
from dist_transformer.reporting.html.run import Run, number
from dist_transformer.reporting.html.summary import (
    Spread,
    best_by,
    best_validation,
    headline_bleu,
    judge,
    newest,
    preset_name,
    spread,
    world_size,
    zero_stage,
)

# Least logged intervals in the second half of the run for a separate picture of it.
_ENOUGH_FOR_A_CLOSE_LOOK = 10
_NOT_RECORDED = "not recorded"


def headline(run: Run) -> Html:
    """Lay out name, corpus, network, status and BLEU."""
    status = judge(run)
    described = " · ".join(part for part in (_corpus(run), _network(run)) if part)
    what = element(
        "div",
        element("p", "Training report", class_="kicker"),
        element("h1", run.name),
        element("p", described or "The folder does not record corpus or network.", class_="soft"),
        element(
            "p",
            element("span", status.label, class_="status over" if status.is_over else "status"),
            status.sentence,
        ),
        class_="what",
    )
    warning = ""
    if run.identity.synthetic:
        warning = element("p", "Synthetic corpus: the scores say nothing about real text.", class_="warning")
    return join(element("header", what, _bleu(run)), warning)


def _corpus(run: Run) -> str:
    identity = run.identity
    languages = " → ".join(str(name) for name in (identity.source_language, identity.target_language) if name)
    languages = ", ".join(identity.directions) or languages
    return " · ".join(part for part in (identity.corpus, languages) if part)


def _network(run: Run) -> str:
    """Describe the network: `preset base · 61 M parameters · 6 + 6 layers, width 512, 8 heads, feed-forward 2,048`."""
    parts = []
    preset = preset_name(run.settings)
    if preset:
        parts.append(f"preset {preset}")
    if run.identity.parameters:
        parts.append(f"{run.identity.parameters / 1e6:.3g} M parameters")
    model = run.settings.get("model")
    if isinstance(model, dict):
        parts.append(
            f"{model.get('encoder_layers')} + {model.get('decoder_layers')} layers, width {model.get('width')}, "
            f"{model.get('heads')} heads, feed-forward {model.get('ffn_width')}"
        )
    return " · ".join(parts)


def _bleu(run: Run) -> Html:
    bleu = headline_bleu(run)
    if bleu is None:
        return element("div", element("p", "No BLEU score in this folder."), class_="bleu")
    return element(
        "div",
        element("div", f"{bleu.value:.1f}", element("small", " BLEU"), class_="value"),
        element("p", bleu.where),
        element("p", bleu.signature, class_="mono") if bleu.signature else element("p", "signature not recorded"),
        class_="bleu",
    )


def key_figures(run: Run) -> Html:
    """Lay out a grid of cells with one number each."""
    if run.step == 0:
        return element(
            "p",
            "metrics.jsonl has no record yet: the first one comes with the first log line of training."
            if run.metrics_written
            else "There is no metrics.jsonl in this folder, so nothing is known about training.",
        )
    seconds, flops, skipped = (newest(run, name) for name in ("train_seconds", "training_flops", "skipped_steps"))
    speed = spread(number(record, "target_tokens_per_second") for record in run.train)
    fill = spread(number(record, "fill") for record in run.train)
    epoch, ranks, stage = newest(run, "epoch"), world_size(run), zero_stage(run)
    max_steps = number(run.settings, "max_steps")
    target_tokens = newest(run, "target_tokens")
    tokens = f"; {scientific(target_tokens)} target tokens" if target_tokens else ""
    cells = [
        _figure("Steps", f"{run.step:,}", f"of {max_steps:,.0f}" if max_steps else ""),
        _figure("Epochs", None if epoch is None else f"{epoch:,.0f}", f"complete{tokens}"),
        _figure("Training time", None if seconds is None else duration(seconds), "without validation and saving"),
        _figure("Target tokens/s", speed and f"{speed.median:,.0f}", _range(speed, ",.0f")),
        _figure("Fill", fill and f"{100 * fill.median:.1f} %", "of the token budgets is text"),
        _figure("Skipped steps", None if skipped is None else f"{skipped:,.0f}", "loss or gradient not finite"),
        _figure("Training FLOPs", flops and scientific(flops), "by the model's matrix products"),
        _best(run),
        _batch(run),
        _figure(
            "Ranks",
            ranks and f"{ranks:,.0f}",
            ("process" if ranks == 1 else "processes") if ranks else "written when the run ends",
        ),
        _figure("ZeRO stage", None if stage is None else f"{stage:.0f}", ""),
        _figure("Precision", run.settings.get("precision"), ""),
    ]
    return element("dl", *cells, class_="figures")


def _figure(label: str, value: object, note: str) -> Html:
    known = value is not None
    return element(
        "div",
        element("dt", label),
        element("dd", value if known else _NOT_RECORDED, class_="value" if known else "soft"),
        element("dd", note, class_="note") if note else "",
        class_="figure",
    )


def duration(seconds: float) -> str:
    """Format a duration: `12.3 s`, `4 min 05 s`, `3 h 07 min`."""
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02d} s" if minutes < 60 else f"{minutes // 60:,} h {minutes % 60:02d} min"


def _batch(run: Run) -> Html:
    batch = run.settings.get("batch")
    values = batch if isinstance(batch, dict) else {}
    packs, tokens = number(values, "packs_per_step"), number(values, "max_target_tokens")
    if packs is None or tokens is None:
        return _figure("Batch", None, "")
    return _figure("Batch", f"{packs * tokens:,.0f}", f"target tokens at most, in {packs:,.0f} packs of {tokens:,.0f}")


def _best(run: Run) -> Html:
    best = best_validation(run)
    if best is None:
        return _figure("Best validation", "none", "no validation is recorded")
    scores = ((LABELS[name], name, ".1f") for name in ("bleu", "chrf", "ter"))
    values = (("ppl", "ppl", ".2f"), *scores, (LABELS["command"], "command", ".4g"))
    others = [f"{label} {value:{form}}" for label, name, form in values if (value := number(best, name)) is not None]
    nll = number(best, "nll")
    note = ", ".join([*others, f"step {best['step']:,}", f"best of {len(run.valid):,} by {LABELS[best_by(run)]}"])
    return _figure("Best validation", None if nll is None else f"nll {nll:.3f}", note)


def _range(values: Spread | None, form: str) -> str:
    if values is None:
        return ""
    if values.count == 1:
        return "of 1 interval"
    return f"median; {values.low:{form}} to {values.high:{form}} over {values.count:,} intervals"


def curves(run: Run) -> Html:
    """Draw the charts for which there are records."""
    drawn = [figure for chart in _charts(run) if (figure := draw(chart)) is not None]
    if not drawn:
        return element("p", "No training interval is recorded, so there is no curve to draw.")
    lacking = "" if run.valid else element("p", "No validation is recorded.", class_="soft")
    return join(element("div", *drawn, class_="charts"), lacking)


def _charts(run: Run) -> list[Chart]:
    whole = (0, run.step)
    charts = [_loss_chart(run, "Loss", 0)]
    half = run.step // 2
    if sum(record["step"] >= half for record in run.train) >= _ENOUGH_FOR_A_CLOSE_LOOK:
        charts.append(_loss_chart(run, "Loss, second half", half))
    scores = (
        ("Validation BLEU", "0 to 100", "bleu"),
        ("Validation chrF", "0 to 100", "chrf"),
        ("Validation TER", "edits per 100 words, lower is better", "ter"),
        ("Validation command", "its score", "command"),
    )
    for title, unit, name in scores:
        series = Series(label="validation", points=_points(run.valid, name), style="second")
        charts.append(Chart(title=title, unit=unit, series=[series], steps=whole, from_zero=name != "command"))
    single = (
        ("Learning rate", "of Adam", "learning_rate"),
        ("Gradient norm", "L2, before clipping", "gradient_norm"),
        ("Throughput", "target tokens/s", "target_tokens_per_second"),
    )
    for title, unit, name in single:
        is_rate = name == "learning_rate"
        series = Series(label="training", points=_points(run.train, name), style="first", is_smooth=is_rate)
        chart = Chart(title=title, unit=unit, series=[series], steps=whole, from_zero=True, is_spiky=not is_rate)
        charts.append(chart)
    return charts


def _loss_chart(run: Run, title: str, first: int) -> Chart:
    """Make the chart of training and validation nll from step `first` on, with perplexity on the second axis."""
    train, valid = ([r for r in records if r["step"] >= first] for records in (run.train, run.valid))
    best = best_validation(run)
    nll = number(best, "nll") if best else None
    marked = None
    if best is not None and nll is not None and best["step"] >= first:
        marked = (best["step"], nll, f"best validation, nll {nll:.3f} at step {best['step']:,}")
    return Chart(
        title=title,
        unit="nats per target token",
        series=[
            Series(label="training loss (label-smoothed)", points=_points(train, "loss"), style="third"),
            Series(label="training nll", points=_points(train, "nll"), style="first"),
            Series(label="validation nll", points=_points(valid, "nll"), style="second"),
        ],
        steps=(first, run.step),
        right_axis=("perplexity", math.exp),
        marked=marked,
    )


def _points(records: list[dict[str, Any]], name: str) -> list[tuple[int, float | None]]:
    return [(record["step"], number(record, name)) for record in records]


def checkpoints(run: Run) -> Html:
    """Lay out the seconds per save, and the time that training waited for saves."""
    seconds = spread(number(record, "seconds") for record in run.checkpoints)
    if seconds is None:
        return element("p", "No checkpoint is recorded.")
    waited = sum(number(record, "stall") or 0.0 for record in run.checkpoints)
    saves = "1 save" if seconds.count == 1 else f"{seconds.count:,} saves"
    text = f"{saves}, the last at step {run.checkpoints[-1]['step']:,}: "
    if seconds.count == 1:
        text += f"{seconds.median:.2f} s"
    else:
        text += f"median {seconds.median:.2f} s, {seconds.low:.2f} to {seconds.high:.2f} s"
    trained = newest(run, "train_seconds")
    share = f" ({100 * waited / trained:.1f} % of the training time)" if trained else ""
    text += f"; training waited {waited:,.1f} s in all{share}."
    series = Series(label="save", points=_points(run.checkpoints, "seconds"), style="first")
    chart = Chart(title="Saving", unit="seconds per save", series=[series], steps=(0, run.step), from_zero=True)
    picture = draw(chart)
    shown = element("div", picture, class_="charts") if picture and seconds.count > 1 else ""
    return join(element("p", text), shown)
