"""Scores of existing translations, and a test whether two systems differ by more than chance.

The paired bootstrap is sacreBLEU's (Koehn 2004). It resamples test sets of the same size from the lines, with
replacement, and counts how often the difference of two systems would be as large by chance.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dist_transformer.data.text.pairs import read_aligned
from dist_transformer.evaluation.bleu import Scores, metric_of, score

_LABELS = {"bleu": "BLEU", "chrf_pp": "chrF++"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Resampled:
    """One score of one system over all resampled test sets."""

    mean: float
    margin: float
    """Half of the 95% confidence interval, which is `mean` ± `margin`."""
    p_value: float | None
    """Two-sided p-value of the difference from the first system: 1 without a difference, None for the first system."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """Scores of one or more files of translations on one test set."""

    files: tuple[Path, ...]
    references: tuple[Path, ...]
    sentences: int
    scores: tuple[Scores, ...]
    """Scores of each file."""
    resampled: dict[str, tuple[Resampled, ...]]
    """Results of each file by the name of the score (`bleu`, `chrf_pp`); empty for a single file."""
    signatures: dict[str, str]
    """Signatures by the same names, with the seed and the number of resampled test sets."""

    def report(self) -> dict[str, Any]:
        """Convert to JSON values: the scores of one file, or of several files with the results of the bootstrap."""
        test_set = {"sentences": self.sentences, "references": [str(file) for file in self.references]}
        systems = [
            {**scores.report(), "hypotheses": str(file)} for file, scores in zip(self.files, self.scores, strict=True)
        ]
        if len(systems) == 1:
            return {**systems[0], **test_set}
        for number, system in enumerate(systems):
            system["paired_bootstrap"] = {name: asdict(row[number]) for name, row in self.resampled.items()}
        return {**test_set, "systems": systems, "signatures": self.signatures}

    def __str__(self) -> str:
        """Lay out tables in 80 columns, except for file names."""
        parts = []
        for file, scores in zip(self.files, self.scores, strict=True):
            parts.append(f"{file}\n{scores}" if len(self.files) > 1 else str(scores))
        if self.resampled:
            parts.append(f"paired bootstrap; p: p-value of the difference from {self.files[0]}")
            for name, row in self.resampled.items():
                parts += [_row(_LABELS[name], each, file) for each, file in zip(row, self.files, strict=True)]
            parts += [f"{_LABELS[name]:8} {signature}" for name, signature in self.signatures.items()]
        return "\n".join(parts)


def _row(label: str, found: Resampled, file: Path) -> str:
    p = "" if found.p_value is None else f"p = {found.p_value:.4f}"
    return f"{label:8} {found.mean:6.2f} ± {found.margin:4.2f}  {p:10}  {file}"


def compare(
    files: Sequence[Path], references: Sequence[Path], *, target_language: str, lowercase: bool = False
) -> Comparison:
    """Score files of translations, and test the difference of each from the first.

    Raises:
        UserError: a file cannot be read, or the files are empty or of different length.
    """
    texts = read_aligned(*references, *files)
    expected, hypotheses = texts[: len(references)], texts[len(references) :]
    scores = [score(lines, *expected, target_language=target_language, lowercase=lowercase) for lines in hypotheses]
    resampled, signatures = _bootstrap(hypotheses, expected, target_language, lowercase) if len(files) > 1 else ({}, {})
    return Comparison(
        files=tuple(files),
        references=tuple(references),
        sentences=len(texts[0]),
        scores=tuple(scores),
        resampled=resampled,
        signatures=signatures,
    )


def _as_resampled(result: Any, first_score: float) -> Resampled:
    # For equal systems sacreBLEU reports the lowest possible p-value, because no resampled difference (all are 0) is
    # above the real one.
    p_value = 1.0 if result.p_value is not None and result.score == first_score else result.p_value
    return Resampled(mean=float(result.mean), margin=float(result.ci), p_value=p_value)


def _bootstrap(
    hypotheses: Sequence[Sequence[str]], references: Sequence[Sequence[str]], target_language: str, lowercase: bool
) -> tuple[dict[str, tuple[Resampled, ...]], dict[str, str]]:
    from sacrebleu.significance import PairedTest

    systems = [(str(number), lines) for number, lines in enumerate(hypotheses)]
    resampled: dict[str, tuple[Resampled, ...]] = {}
    signatures: dict[str, str] = {}
    for name in ("bleu", "chrf_pp"):
        metric = metric_of(name, target_language, lowercase=lowercase)
        # One metric at a time: results have sacreBLEU's own metric names, after a column of system names.
        test: Any = PairedTest(systems, {name: metric}, references, test_type="bs")
        found_signatures, found = test()
        (signatures[name],) = map(str, found_signatures.values())
        _, results = found.values()
        resampled[name] = tuple(_as_resampled(each, results[0].score) for each in results)
    return resampled, signatures
