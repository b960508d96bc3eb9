"""Data of the benchmark pictures: rates of the contenders, with their spread."""

from typing import Any

from benchmarks.decoding import LABELS as DECODING
from benchmarks.figures import Bar, BarGroup, Curve
from benchmarks.training.field import LABELS as TRAINING

_DATA = {
    "ids, read at random": {
        "read_tokens": "ours",
        "datasets_random_arrow": "datasets, Arrow",
        "datasets_random_rows": "datasets, rows",
    },
    "tensors of a training, from planning on": {
        "feed": "ours, 1 pack per micro-batch",
        "feed_8_packs": "ours, 8 packs per micro-batch",
    },
    "text, prepared": {
        "prepare": "ours, to a data folder",
        "tokenizers_encode_batch": "tokenizers, encode_batch alone",
        "tokenizers_encode_batch_fast": "tokenizers, encode_batch_fast",
    },
}


def bar_groups(figures: dict[str, Any]) -> list[BarGroup]:
    """Collect the rates from a suite's figures, part by part."""
    groups: list[BarGroup] = []
    for part in figures.values():
        if "target_tokens_per_second" in part:
            groups += _data_groups(part)
        elif "contenders" in part:
            groups.append(_contenders(part))
    return groups


def curves(figures: dict[str, Any]) -> list[Curve]:
    """Convert the axes of a cost curve to curves."""
    labels = {
        "width": "model width",
        "sentence_tokens": "tokens per sentence",
        "tokens": "tokens per micro-batch and side",
    }
    return [
        Curve(
            label=labels[axis],
            values=tuple(point[axis] for point in points),
            seconds=tuple(
                tuple(point["step_seconds"][name] for name in ("median", "lowest", "highest")) for point in points
            ),
            mib=tuple(point["peak_mib"] for point in points),
        )
        for axis, points in figures["axes"].items()
    ]


def _data_groups(part: dict[str, Any]) -> list[BarGroup]:
    rates = part["target_tokens_per_second"]
    return [
        BarGroup(
            title=f"{title}, one thread",
            unit="target tokens per CPU second",
            bars=tuple(_bar(label, rates[name], ours=label.startswith("ours")) for name, label in labels.items()),
        )
        for title, labels in _DATA.items()
    ]


def _contenders(part: dict[str, Any]) -> BarGroup:
    """Convert the contenders of training or decoding to a group of bars."""
    trains = "preset" in part
    labels, rate = (TRAINING, "rates") if trains else (DECODING, "sentences_per_second")
    decoding = "decoding, {parameters:,} parameters, beam {beam_size}"
    title = f"training, {part['preset']}" if trains else decoding.format_map(part)
    if part.get("world_size", 1) > 1:
        title += f" on {part['world_size']} processes"
    found = part["contenders"]
    return BarGroup(
        title=f"{title}, {part['precision']}",
        unit=part["unit"],
        bars=tuple(_bar(labels[name], found[name][rate], ours=name.startswith("ours")) for name in found),
    )


def _bar(label: str, rate: dict[str, Any], *, ours: bool) -> Bar:
    return Bar(label=label, value=rate["median"], lowest=rate["lowest"], highest=rate["highest"], stressed=ours)
