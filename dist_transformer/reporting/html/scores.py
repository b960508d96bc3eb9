"""Files of scores that `dist-transformer evaluate --json` wrote into a run folder."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any

from dist_transformer.reporting.html.values import number, shown
from dist_transformer.run.layout import SAMPLES

_LABELS = {
    "bleu": "BLEU",
    "bleu_cased": "BLEU, case counts",
    "bleu_lowercase": "BLEU, case ignored",
    "bleu_tokenized": "BLEU, tokenised by Moses",
    "bleu_compound_split": "BLEU, tokenised, hyphens split",
    "chrf": "chrF",
    "chrf_pp": "chrF++",
    "ter": "TER (lower is better)",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class ScoreFile:
    """A file that dist-transformer evaluate wrote."""

    name: str
    """Path relative to the run folder."""
    values: dict[str, Any]

    @property
    def model(self) -> str:
        """Name of the evaluated model folder, with the steps of its weights, as far as they are recorded."""
        folder, steps = self.values.get("model"), self.values.get("steps") or []
        # Those of an ensemble are joined.
        name = " + ".join(PurePath(each).name for each in folder.split(" + ")) if folder else ""
        mean = f"mean of {len(steps)}, steps" if len(steps) > 1 else "step"
        weights = f"{mean} {' to '.join(f'{step:,}' for step in sorted({min(steps), max(steps)}))}" if steps else ""
        return f"{name} ({weights})" if name and weights else name or weights

    @property
    def row(self) -> tuple[str, ...]:
        """Cells of the table that compares files."""
        sentences = number(self.values, "sentences")
        counted = "" if sentences is None else f"{sentences:,.0f}"
        scores = (f"{self.values[name]:.2f}" for name in ("bleu", "chrf", "ter"))
        return self.model, self.name, counted, *scores, self.values["signature"]

    @property
    def metrics(self) -> list[tuple[str, str, str]]:
        """Label, score and signature of each metric; `bleu`, which equals one of the others, is listed once."""
        signatures = {**(self.values.get("signatures") or {}), "bleu": self.values["signature"]}
        found: dict[tuple[float, str], str] = {}
        for name, label in _LABELS.items():
            if (value := number(self.values, name)) is not None:
                found.setdefault((value, str(signatures.get(name, ""))), label)
        return [(label, f"{value:.2f}", signature) for (value, signature), label in found.items()]

    @property
    def facts(self) -> str:
        """List what is known about the evaluation."""
        values = self.values
        sentences, split, seconds, ranks = (
            number(values, name) for name in ("sentences", "split_sentences", "seconds", "world_size")
        )
        facts = (
            f"model: {self.model}" if self.model else "",
            f"{sentences:,.0f} sentences" if sentences is not None else "",
            f"{split:,.0f} of them split" if split else "",
            f"decoded in {seconds:,.1f} s" if seconds is not None else "",
            f"on {ranks:,.0f} rank(s)" if ranks else "",
            f"hypotheses in {shown(values['hypotheses'])}" if values.get("hypotheses") else "",
            "synthetic corpus" if values.get("synthetic") is True else "",
        )
        return ", ".join(fact for fact in facts if fact)


def read_scores(run_dir: Path) -> list[ScoreFile]:
    """Find the files with the keys of an evaluation in the run folder and one level below, newest first."""
    scores = []
    for file in (*run_dir.glob("*.json"), *run_dir.glob("*/*.json")):
        for values in read_objects([file]):
            has_scores = all(number(values, name) is not None for name in ("bleu", "chrf", "ter"))
            # Samples of a validation have scores, too.
            if has_scores and "signature" in values and file.parent.name != SAMPLES:
                name = file.relative_to(run_dir).as_posix()
                scores.append((-file.stat().st_mtime, name, ScoreFile(name=name, values=values)))
    return [file for _, _, file in sorted(scores, key=lambda score: score[:2])]


def read_objects(files: list[Path]) -> Iterator[dict[str, Any]]:
    """Yield the JSON objects among `files`; skip all other files."""
    for file in files:
        try:
            values = json.loads(file.read_bytes())
        except (OSError, ValueError):
            continue
        if isinstance(values, dict):
            yield values
