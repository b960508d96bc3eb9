"""Rows of result files, for the tables of `benchmarks/results_table.py`: texts with placeholders for figures."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

Row = dict[str, Any]
MISSING = "–"
"""Cell of what was not measured."""
_TRAINERS = ("trainer", "loop", "compiled", "torch")
_DECODERS = ("ours", "ours_bf16", "ours_int8", "generate", "ctranslate2", "int8")
_STUDIED = {
    "multi30k": "Multi30k",
    "two_packs": "Multi30k, two packs per step",
    "captions": "captions, English to Chinese",
    "few": "further training, few pairs",
    "many": "further training",
    "base_width": "Multi30k, `base_width`",
}
_WAITS = {
    "import torch": "`import torch` alone",
    "--help": "`dist-transformer --help`",
    "train --help": "`train --help`",
    "translate one line": "`translate` of one line",
    "the first step of tiny": "the first step of `tiny`",
}


def markdown_line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def markdown_table(columns: Sequence[str], rows: Iterable[Iterable[str]]) -> str:
    return "\n".join([markdown_line(columns), f"|{'---|' * len(columns)}", *map(markdown_line, rows)])


def row(table: str, *cells: str) -> Row:
    return {"table": table, "cells": [*cells]}


DATA_ROW = row(
    "data",
    "{figures[fill_percent][both]:.1f}%",
    "{figures[target_tokens_per_second][feed][median]:,.0f}",
    "{figures[target_tokens_per_second][feed_8_packs][median]:,.0f}",
    "{figures[target_tokens_per_second][prepare][median]:,.0f}",
    "{figures[target_tokens_per_second][tokenizers_encode_batch][median]:,.0f}",
    "{figures[preparation_memory][10x][peak_mib]:,.0f} for {figures[preparation_memory][10x][pairs]:,} pairs",
)
STEP_ROW = row(
    "steps_gpu",
    "`{figures[preset]}`, {figures[packs_per_micro_batch]} packs at a time, {figures[way]}",
    "{figures[rates][median]:,.0f}",
    "{figures[milliseconds]:.1f}",
    "{figures[tokens_per_step]:,.0f}",
    "{figures[peak_gib]:.1f}",
    "{figures[launches]:,.0f}",
)


def train_row(contenders: Sequence[str], *, gpu: bool) -> Row:
    """Return the row of a comparison of trainers.

    Args:
        contenders: their names, ours first.
    """
    cells = (
        f"{{figures[contenders][{name}][rates][median]:,.0f}}" if name in contenders else MISSING
        for name in (contenders[0], *_TRAINERS)
    )
    return row("training_gpu" if gpu else "training", "`{figures[preset]}`, {figures[precision]}", *cells)


def decode_row(contenders: Sequence[str], *, gpu: bool) -> Row:
    cells = (
        f"{{figures[contenders][{name}][sentences_per_second][median]:,.0f}}" if name in contenders else MISSING
        for name in _DECODERS
        # On a GPU all compute in bf16.
        if not (gpu and name.startswith("ours_"))
    )
    model = "{figures[parameters]:,} parameters, beam {figures[beam_size]}, {figures[precision]}"
    return row("decoding_gpu" if gpu else "decoding", model, *cells)


def start_rows(waits: Sequence[str]) -> list[Row]:
    return [
        row(
            "start",
            label,
            f"{{figures[waits][{name}][seconds][median]:.2f}}",
            f"{{figures[waits][{name}][cpu_seconds][median]:.2f}}",
            f"{{figures[waits][{name}][peak_mib]:,.0f}}",
        )
        for name, label in _WAITS.items()
        if name in waits
    ]


def race_rows(figures: Mapping[str, Any], goals: Sequence[str]) -> list[Row]:
    """Return a row for each toolkit of a race.

    Args:
        goals: keys of the BLEU scores to show.
    """
    rows = []
    for name, found in figures["toolkits"].items():
        at = f"figures[toolkits][{name}]"
        if "failure" in found:
            rows.append(row("race", f"{found['label']}, which did not run", *[MISSING] * (len(goals) + 3)))
            continue
        times = (
            f"{{{at}[cpu_seconds_to_bleu][{goal}][median]:,.0f}}" if found["cpu_seconds_to_bleu"][goal] else MISSING
            for goal in goals
        )
        end = (
            f"{{{at}[tokens_per_cpu_second][median]:,.0f}}",
            f"{{{at}[bleu_of_beam][median]:.1f}}",
            f"{{{at}[peak_mib]:,.0f}}",
        )
        rows.append(row("race", f"{found['label']}, `{{figures[size]}}`", *times, *end))
    return rows


def optimizer_rows(stages: Mapping[str, Any], goals: Sequence[str]) -> list[Row]:
    """Return a row for each recipe of a comparison of optimizers, and one for the ratio of times.

    Args:
        goals: keys of the BLEU scores to show.
    """
    rows = []
    for stage, text in _STUDIED.items():
        for name, found in stages.get(stage, {}).items():
            at = f"figures[stages][{stage}][{name}]"
            if "recipe" not in found and not any(found["steps_to_bleu"].values()):
                continue
            recipe, form, test = f"{found['label']}", ":.2f", MISSING
            if "recipe" in found:
                recipe += f", {{{at}[recipe][peak_lr]:g}} after {{{at}[recipe][warmup_steps]}}"
                form, test = "[median]:,.0f", f"{{{at}[test_bleu][median]:.1f}}"
            times = (
                f"{{{at}[{key}][{goal}]{form}}}" if found[key][goal] else MISSING
                for key in ("steps_to_bleu", "cpu_seconds_to_bleu")
                for goal in goals
            )
            rows.append(row("optimizers", text, recipe, *times, test))
    return rows
