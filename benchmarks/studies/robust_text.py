"""Translations of text as customers write it: capitals, errors of spelling, and spans that must stay as they are.

python tools/robust_text.py --plain MODEL … --robust MODEL … --capitals MODEL … --train en de --test en de \\
    --json FILE

Each model translates the test in four forms: as it is; in capitals, also with --recase auto; with errors as `prepare
--augment typos` makes them; and with one span inserted before a word that is drawn by --seed. Spans are, in turn, a
URL with the number of the line, a number with two decimals, `{name}` and `%s`. Counted are lines whose translation has
the span exactly once, or more than once, and of the former those where it is beside a neighbour's translation: one of
the words next to it in the output is among the ten target words with the highest Dice coefficients, in the training
text, with one of the words next to it in the source. Models translate with beam 4. Those with placeholders protect
spans, with `--missing-spans leave`.
"""

import re
import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any, TypeAlias

import sacrebleu

import dist_transformer
from benchmarks.measure import read_flags, result_of, say, spread, write_result
from benchmarks.rows import row
from dist_transformer.data.text.augment import typos
from dist_transformer.inference.trained_model import TrainedModel

KINDS = ("urls", "numbers", "placeholders")
_CANDIDATES = 10
_WORD = re.compile(r"\w+")
_SHOWN = ("bleu", "upper_bleu", "upper_recased_bleu", "typos_bleu", "spans_once", "spans_beside")
_ROWS = [
    ("without changes", "plain"),
    ("with changes", "robust"),
    ("with changes, `upper` and `title`, one seed", "capitals"),
]
"""Rows of the table: label, kind of model."""
Texts: TypeAlias = tuple[Path, Path]


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """Flags."""

    plain: tuple[Path, ...]
    """Model folders of a training without changes, one per seed."""
    robust: tuple[Path, ...]
    """Model folders of a training with changes and placeholders."""
    capitals: tuple[Path, ...]
    """Model folders of a training with capitals, too."""
    train: Texts
    """Training text."""
    test: Texts
    """Test text."""
    json: Path
    """Result file."""
    seed: int = 1
    """Seed of errors and places."""


def main() -> None:
    settings, started = read_flags(Settings), time.monotonic()
    sources, references = map(read, settings.test)
    translations = translations_of(*map(read, settings.train))
    kinds = {"plain": settings.plain, "robust": settings.robust, "capitals": settings.capitals}
    figures: dict[str, Any] = {}
    for kind, folders in kinds.items():
        found = [figures_of(folder, sources, references, translations, settings.seed) for folder in folders]
        figures[kind] = {name: spread(each[name] for each in found) for name in found[0]}
        say(f"{kind}: " + ", ".join(f"{name} {value['median']:.1f}" for name, value in figures[kind].items()))
    result = result_of(
        dist_transformer.load(settings.plain[0]).info,
        what="translation of text as customers write it, by models that were trained without and with changed text",
        command="python tools/robust_text.py --plain MODELS --robust MODELS --capitals MODELS --train SRC TGT "
        "--test SRC TGT --json FILE",
        figures=figures,
        wall_seconds=time.monotonic() - started,
        seeds=range(1, len(settings.robust) + 1),
        rows=[
            row("robust", name, *(f"{{figures[{kind}][{figure}][median]:.1f}}" for figure in _SHOWN))
            for name, kind in _ROWS
        ],
    )
    write_result(settings.json, result)


def read(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8").splitlines()


def translations_of(sources: Sequence[str], targets: Sequence[str]) -> dict[str, set[str]]:
    """Return the target words with the highest Dice coefficients of each source word, in lower case."""
    together: dict[str, Counter[str]] = defaultdict(Counter)
    counts: tuple[Counter[str], Counter[str]] = (Counter(), Counter())
    for pair in zip(sources, targets, strict=True):
        one, other = ({*_WORD.findall(text.lower())} for text in pair)
        counts[0].update(one)
        counts[1].update(other)
        for word in one:
            together[word].update(other)
    return {
        word: {*sorted(found, key=lambda other: -2 * found[other] / (counts[0][word] + counts[1][other]))[:_CANDIDATES]}
        for word, found in together.items()
    }


def figures_of(
    folder: Path, sources: Sequence[str], references: Sequence[str], translations: dict[str, set[str]], seed: int
) -> dict[str, float]:
    model = dist_transformer.load(folder)
    random = Random(seed)
    wrong = [typos(source, "", random)[0] for source in sources]
    upper = [source.upper() for source in sources]
    raised = [reference.upper() for reference in references]
    inserted = [insert(number, source, random) for number, source in enumerate(sources)]
    has_placeholders = any(tag.startswith("<ph") for tag in model.tokenizer.target.tags)
    how: dict[str, Any] = {"protect": KINDS, "missing_spans": "leave"} if has_placeholders else {}
    outputs = model.translate([line for line, *_ in inserted], **how)
    counts = [output.count(span) for output, (_, span, _) in zip(outputs, inserted, strict=True)]
    beside = [
        is_beside(output, span, words, translations)
        for output, (_, span, words), count in zip(outputs, inserted, counts, strict=True)
        if count == 1
    ]
    return {
        "bleu": bleu(model, sources, references),
        "upper_bleu": bleu(model, upper, raised),
        "upper_recased_bleu": bleu(model, upper, raised, recase="auto"),
        "typos_bleu": bleu(model, wrong, references),
        "spans_once": 100 * statistics.mean(count == 1 for count in counts),
        "spans_doubled": 100 * statistics.mean(count > 1 for count in counts),
        "spans_beside": 100 * statistics.mean(beside or [0]),
    }


def bleu(model: TrainedModel, sources: Sequence[str], references: Sequence[str], **how: str) -> float:
    return sacrebleu.corpus_bleu(model.translate(sources, **how), [[*references]]).score


def insert(number: int, source: str, random: Random) -> tuple[str, str, set[str]]:
    """Insert a span before a word; return the line, the span and the words next to it."""
    words = source.split()
    span = (f"https://example.org/{number}?a=b", f"{number}.50", "{name}", "%s")[number % 4]
    at = random.randrange(len(words))
    near = {word.lower() for word in _WORD.findall(" ".join(words[max(0, at - 1) : at + 1]))}
    return " ".join([*words[:at], span, *words[at:]]), span, near


def is_beside(output: str, span: str, near: set[str], translations: dict[str, set[str]]) -> bool:
    before, _, after = output.lower().partition(span.lower())
    found = {*_WORD.findall(before)[-1:], *_WORD.findall(after)[:1]}
    return any(found & translations.get(word, set()) for word in near)


if __name__ == "__main__":
    main()
