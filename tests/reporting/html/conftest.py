"""A run folder written by hand, so that every number of its report is known."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lxml.html
import pytest

from dist_transformer.config.plain import to_plain
from dist_transformer.config.presets import PRESETS
from dist_transformer.evaluation.samples import Sample, SampleSheet, write_sheet
from dist_transformer.reporting.html.page import write_report

Document = lxml.html.HtmlElement
ReadPage = Callable[[Path], Document]
SIGNATURE = "nrefs:1|case:mixed|eff:no|tok:13a|smooth:exp|version:2.6.0"


def train(step: int, **values: Any) -> dict[str, Any]:
    return {"kind": "train", "step": step, **values}


# Loss, nll, rate, norm of the gradient, target tokens/s, fill, epoch, skipped steps, FLOPs and seconds, by step.
TRAINED = {
    20: (5.0, 4.5, 1e-4, 2.0, 1000.0, 0.98, 0, 0, 1_000_000_000_000, 30.0),
    40: (4.0, 3.5, 2e-4, 1.0, 3000.0, 0.99, 1, 0, 2_000_000_000_000, 60.0),
    60: (3.0, 2.5, 3e-4, 0.5, 2000.0, 0.97, 1, 1, 3_000_000_000_000, 95.0),
    80: (2.5, 2.0, 4e-4, 0.25, 4000.0, 0.96, 2, 1, 4_210_000_000_000, 125.0),
}
NAMES = ("loss", "nll", "learning_rate", "gradient_norm", "target_tokens_per_second", "fill")
NAMES += ("epoch", "skipped_steps", "training_flops", "train_seconds")
AT_20, AT_40, AT_60, AT_80 = (train(step, **dict(zip(NAMES, row, strict=True))) for step, row in TRAINED.items())
RECORDS: list[dict[str, Any]] = [
    AT_20,
    AT_40,
    {"kind": "valid", "step": 40, "loss": 4.1, "nll": 2.0, "ppl": 7.389, "bleu": 10.0},
    {"kind": "checkpoint", "step": 40, "seconds": 1.0, "stall": 0.5},
    AT_60,
    {"kind": "valid", "step": 60, "loss": 3.1, "nll": 1.5, "ppl": 4.4817, "bleu": 20.0},
    AT_80,
    {"kind": "valid", "step": 80, "loss": 3.2, "nll": 1.6, "ppl": 4.953, "bleu": 21.25},
    {"kind": "checkpoint", "step": 80, "seconds": 4.0, "stall": 1.0},
    {
        **{"kind": "end", "step": 80, "train_seconds": 125.0, "target_tokens": 3_000_000, "world_size": 2},
        **{"training_flops": 4_210_000_000_000, "skipped_steps": 1, "zero_stage": 1},
    },
]


def settings(**changes: Any) -> dict[str, Any]:
    """config.json of preset tiny, 80 steps, trained by someone at home."""
    tiny = PRESETS["tiny"].changed(precision="bf16")
    model = dataclasses.replace(tiny.model, vocab_size=900)
    config = tiny.changed(
        data=("/home/someone/data/toy",), run_dir=Path("/home/someone/runs/1"), model=model, max_steps=80
    )
    deepspeed = {"zero_optimization": {"stage": 1, "overlap_comm": True}}
    return {**to_plain(config), "data_sha256": ["0" * 64], "deepspeed": deepspeed, **changes}


def write_run(run: Path, records: list[dict[str, Any]], **changes: Any) -> Path:
    run.mkdir(parents=True, exist_ok=True)
    (run / "config.json").write_text(json.dumps(settings(**changes)), encoding="utf-8")
    (run / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records), encoding="utf-8")
    return run


def write_scores(file: Path, bleu: float, **more: Any) -> None:
    signatures = {"bleu": SIGNATURE, "chrf": "nrefs:1|case:mixed|nc:6", "ter": "nrefs:1|case:lc|tok:tercom"}
    scores = {"bleu": bleu, "chrf": 61.5, "ter": 44.25, "signature": SIGNATURE, "signatures": signatures}
    how = {"sentences": 1000, "split_sentences": 2, "seconds": 12.34, "world_size": 2}
    values = {**scores, **how, "hypotheses": "/home/someone/bleu.hypotheses.txt", **more}
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(values), encoding="utf-8")


def sample(source: str, reference: str, hypothesis: str, *, with_map: bool = False) -> Sample:
    source_tokens, target_tokens = [*source.split(), "</s>"], [*hypothesis.split(), "</s>"]
    even = round(1 / len(source_tokens), 3)
    layers = [[[even for _ in source_tokens] for _ in target_tokens] for _ in range(2)]
    return Sample(
        source=source,
        reference=reference,
        hypothesis=hypothesis,
        source_tokens=source_tokens,
        target_tokens=target_tokens,
        attention_LTS=layers if with_map else None,
    )


def write_samples(run: Path, step: int, bleu: float, *samples: Sample, **scores: Any) -> None:
    write_sheet(run, SampleSheet(step=step, sentences=500, bleu=bleu, signature=SIGNATURE, samples=samples, **scores))


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """A finished run with two sheets of samples and one score file."""
    run = write_run(tmp_path / "my run", RECORDS)
    dog = ("the dog sleeps", "der Hund schläft")
    write_samples(run, 40, 10.0, sample(*dog, "der der"), sample("<b>one</b>", "eins", "ein"))
    hostile = sample("<script>alert(1)</script>", '"><img src=x onerror=alert(2)>', "& &lt; ' \"")
    write_samples(run, 80, 21.25, sample(*dog, "der Hund schläft gern", with_map=True), hostile)
    write_scores(run / "bleu.json", 23.456)
    return run


@pytest.fixture
def read_page() -> ReadPage:
    """Writes the report of a run folder and parses it."""
    return lambda run: lxml.html.document_fromstring(write_report(run).read_text(encoding="utf-8"))


def section(document: Document, title: str) -> Document:
    (found,) = [s for s in document.xpath("//section") if s.findtext("h2") == title]
    return found


def words(element: Document) -> str:
    return " ".join(element.text_content().split())


def rows(table: Document) -> list[list[str]]:
    return [[words(cell) for cell in row.xpath("./th|./td")] for row in table.xpath(".//tr")]


def figures(document: Document) -> dict[str, list[str]]:
    cells = section(document, "Key figures").xpath(".//dl/div")
    return {cell.findtext("dt"): [words(value) for value in cell.xpath("./dd[text()]")] for cell in cells}
