"""Sample translations of a run with their attention maps: made at validation, read by pictures and reports."""

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dist_transformer.base.errors import UserError
from dist_transformer.base.files import make_folder, write_file
from dist_transformer.config.measures import LABELS, Measure
from dist_transformer.config.plain import read_json
from dist_transformer.inference.attention_maps import attention_maps, readable_pieces
from dist_transformer.inference.translator import Translator
from dist_transformer.run.layout import SAMPLES, step_name

# Characters of a text in the log.
_SHOWN = 60
# Longer sentences get no maps: their pictures would be illegible, and a map of 1,024 by 1,024 is 6 MB of text.
LONGEST_MAP = 60


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """One sentence of the validation set."""

    source: str
    reference: str
    hypothesis: str
    source_tokens: list[str]
    """Readable pieces, `</s>` last: the S columns of the maps."""
    target_tokens: list[str]
    """Readable pieces of the hypothesis, `</s>` last: the T rows of the maps; row i is the step that made piece i."""
    attention_LTS: list[list[list[float]]] | None
    """Cross-attention of each decoder layer, mean over its heads, 3 decimals; None for most samples."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleSheet:
    """The samples of one validation, and its scores."""

    step: int
    sentences: int
    """Sentences that were decoded and scored."""
    bleu: float
    signature: str
    """sacreBLEU's signature of `bleu`."""
    samples: tuple[Sample, ...]
    chrf: float | None = None
    """chrF of the same sentences; None in sheets of versions that did not compute it."""
    ter: float | None = None
    """TER of the same sentences, as `chrf`."""
    signatures: dict[str, str] = field(default_factory=dict)
    """sacreBLEU's signatures of `chrf` and `ter`, by name."""
    source_language: str | None = None
    """Language of the sources; None if the run has one direction. Otherwise there is one sheet per direction."""
    target_language: str | None = None

    @property
    def direction(self) -> str | None:
        return None if self.source_language is None else f"{self.source_language}-{self.target_language}"

    @property
    def scores(self) -> dict[str, tuple[float, str]]:
        """Score and signature of each metric, by its label."""
        found: dict[Measure, float | None] = {"bleu": self.bleu, "chrf": self.chrf, "ter": self.ter}
        signatures = {"bleu": self.signature, **self.signatures}
        return {LABELS[name]: (value, signatures.get(name, "")) for name, value in found.items() if value is not None}


def make_samples(
    translator: Translator,
    sources: Sequence[str],
    references: Sequence[str],
    hypotheses: Sequence[str],
    *,
    count: int,
    with_attention: int,
) -> tuple[Sample, ...]:
    """Make at most `count` samples, spread evenly over the lists, the same ones each time.

    Args:
        hypotheses: translations of `sources` by `translator`.
        with_attention: number of samples with attention maps; the first ones with short enough sentences get them.
    """
    count = min(count, len(sources))
    tokenizer = translator.tokenizer
    longest = min(LONGEST_MAP, translator.model.config.max_positions)
    samples: list[Sample] = []
    maps = 0
    for i in (place * len(sources) // count for place in range(count)):
        source = translator.source_ids(sources[i])
        target = [*translator.target_tag_ids, *tokenizer.target.encode(hypotheses[i])]
        attention = None
        if maps < with_attention and max(len(source), len(target)) < longest:
            attention = _mean_of_heads(translator, source, target)
            maps += 1
        samples.append(
            Sample(
                source=sources[i],
                reference=references[i],
                hypothesis=hypotheses[i],
                source_tokens=readable_pieces(tokenizer.source, source),
                target_tokens=readable_pieces(tokenizer.target, target),
                attention_LTS=attention,
            )
        )
    return tuple(samples)


def lines_of(sheet: SampleSheet) -> str:
    """Return lines of a log with the first sample of a sheet, the same sentence each time; its texts are shortened."""
    lines = []
    for name in ("source", "hypothesis", "reference"):
        text = " ".join(getattr(sheet.samples[0], name).split())
        lines.append(f"  {f'{name}:':11} {text if len(text) <= _SHOWN else f'{text[: _SHOWN - 1]}…'}")
    return "\n".join(lines)


def _mean_of_heads(translator: Translator, source: list[int], target: list[int]) -> list[list[list[float]]] | None:
    mean_LTS = attention_maps(translator.model, source, target, "cross")["cross"].double().mean(1)
    # If the weights are no longer finite, the sample still has its text.
    return mean_LTS.round(decimals=3).tolist() if mean_LTS.isfinite().all() else None


def write_sheet(run_dir: Path, *sheets: SampleSheet) -> Path:
    """Write one sheet, or the sheets of several directions, to `RUN/samples/step-00001000.json`, whole or not at all.

    Raises:
        UserError: the file cannot be written.
    """
    path = run_dir / SAMPLES / f"{step_name(sheets[0].step)}.json"
    plain = [
        {name: value for name, value in dataclasses.asdict(sheet).items() if value is not None} for sheet in sheets
    ]
    content = plain[0] if len(plain) == 1 else {"sheets": plain}
    text = json.dumps(content, ensure_ascii=False, allow_nan=False)
    make_folder(path.parent)
    write_file(path, f"{text}\n")
    return path


def read_sheets(run_dir: Path) -> list[SampleSheet]:
    """Read all sheets of a run, if any, in order of step.

    Raises:
        UserError: a sheet is damaged.
    """
    sheets = [sheet for path in (run_dir / SAMPLES).glob("step-*.json") for sheet in _read_sheets(path)]
    return sorted(sheets, key=lambda sheet: sheet.step)


def _read_sheets(path: Path) -> list[SampleSheet]:
    content: dict[str, Any] = read_json(path)
    try:
        return [
            SampleSheet(**{**values, "samples": tuple(Sample(**sample) for sample in values["samples"])})
            for values in content.get("sheets", [content])
        ]
    except (KeyError, TypeError) as error:
        raise UserError(
            f"{path} is not a sheet of samples ({error}): remove it, the run will write a newer one"
        ) from None
