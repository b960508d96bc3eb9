"""Helpers of the tests of a run's records."""

import dataclasses
import json
from pathlib import Path
from typing import Any

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from dist_transformer.data.loading.packing import Budgets, EpochSummary, Totals
from dist_transformer.evaluation.samples import Sample, SampleSheet

VALUES = {
    "loss": 1.5,
    "nll": 1.25,
    "ppl": 3.49,
    "learning_rate": 3e-4,
    "gradient_norm": 0.75,
    "target_tokens_per_second": 12345.6,
    "fill": 0.987,
    "data_stall": 0.004,
    "skipped_steps": 0,
}


def lines_of(folder: Path) -> list[dict[str, Any]]:
    """Read lines as a strict parser does: NaN and Infinity are not JSON."""

    def refuse(name: str) -> None:
        raise ValueError(name)

    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line, parse_constant=refuse) for line in lines]


def epoch_of(corpus: int) -> EpochSummary:
    return EpochSummary(
        corpus=corpus,
        epoch=2,
        budgets=Budgets(max_source_tokens=100, max_target_tokens=300, max_sentences=9),
        totals=Totals(packs=10, pairs=1234, source_tokens=900, target_tokens=2940),
        unfit_pairs=7,
        left_out_pairs=50,
    )


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    board = EventAccumulator(str(folder / "tensorboard"))
    board.Reload()
    return {tag: [(event.step, event.value) for event in board.Scalars(tag)] for tag in board.Tags()["scalars"]}


HOSTILE = r"a | b <b>x</b> &amp; *y* _z_ `c` ~~d~~ [l](u) # h \ 1. $x$ <script> https://a.b \| \* ![i](j)"


def make_sheet(step: int) -> SampleSheet:
    plain = Sample(
        source="A street.",
        reference="Eine Straße.",
        hypothesis="Die Straße 你好.",
        source_tokens=["A", "▁street", ".", "</s>"],
        target_tokens=["Die", "▁Straße", "</s>"],
        attention_LTS=[[[0.7, 0.1, 0.1, 0.1], [0.1, 0.8, 0.05, 0.05], [0.0, 0.0, 0.5, 0.5]]] * 2,
    )
    samples = (
        plain,
        dataclasses.replace(plain, source=HOSTILE, reference="- x\n\n# y", hypothesis="", attention_LTS=None),
        dataclasses.replace(plain, source="Second map"),
    )
    return SampleSheet(step=step, sentences=1014, bleu=30.125, signature="nrefs:1|case:lc|tok:13a", samples=samples)
