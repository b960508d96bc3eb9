"""Tags around words of a text, and terms of a file: where they are in the translation.

python tools/tags_and_terms.py --train en de --terms FOLDER
python tools/tags_and_terms.py --train en de --terms FOLDER --test en de --model MODEL --terms-model MODEL --json FILE

The first form writes terms, by the Dice coefficients of the words of the first 20,000 training pairs: in `known.tsv`
and, for a quarter of the source words that a checksum draws, in `unseen.tsv`, pairs that are each other's best, with
a coefficient of 0.25 and four letters, in fewer than 2,000 pairs; and in `training.tsv`, for the other source words,
the best six target words each with a coefficient of 0.1 and three letters. Words are together in three pairs at
least. The model for terms has made 900 steps of `tiny` on data of `prepare --augment terms:0.25 --terms known.tsv`,
and then further ones, with `--init-from`, on data of `prepare --augment terms:0.7 --terms training.tsv`: a model
learns to copy only what it could not guess.

Tags: in each of the first 500 test lines, <b class="x"> is put around one to three words, drawn by --seed, and in half
of the lines <i> around the first of several. Counted are lines whose translation has the same tags, balanced for
Python's `html.parser`; and of the lines whose translation has a translation of a word in <b> anywhere (one of the ten
target words with the highest Dice coefficients), those that have one in <b>.

Terms: counted are those of a file that are in the source and whose target term is in the reference, and of these the
ones in the translations with and without --terms.
"""

import itertools
import re
import time
import zlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from html.parser import HTMLParser
from pathlib import Path
from random import Random
from typing import Any

import sacrebleu

import dist_transformer
from benchmarks.measure import read_flags, result_of, say, write_result
from benchmarks.rows import row
from benchmarks.studies.robust_text import Texts, read, translations_of
from dist_transformer.base.files import write_file
from dist_transformer.data.text.terms import Terms, count_terms
from dist_transformer.inference.trained_model import TrainedModel

_WORD = re.compile(r"\w+")
_LINES = 500
_KINDS = ("known", "unseen")
# Pairs that are read, and least pairs with both words.
_PAIRS, _LEAST_PAIRS = 20_000, 3
# Least coefficient and letters of a term, and most pairs with its source term; least ones, and target terms of a source
# term, of the training.
_DICE, _LETTERS, _MOST_PAIRS = 0.25, 4, 2_000
_TRAINING_DICE, _TRAINING_LETTERS, _TRAINING_TERMS = 0.1, 3, 6


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """Flags."""

    train: Texts
    """Training text."""
    terms: Path
    """Folder of the terms."""
    test: Texts | None = None
    """Test text."""
    model: Path | None = None
    """Model folder for the tags."""
    terms_model: Path | None = None
    """Model folder that was trained with the known terms."""
    json: Path | None = None
    """Result file."""
    seed: int = 1
    """Seed of the tags' places."""


def main() -> None:
    settings, started = read_flags(Settings), time.monotonic()
    train = [read(path) for path in settings.train]
    if settings.test is None or settings.model is None or settings.terms_model is None or settings.json is None:
        write_terms(settings.terms, *train)
        return
    sources, references = map(read, settings.test)
    model = dist_transformer.load(settings.model)
    figures: dict[str, Any] = {"tags": tags_of(model, sources[:_LINES], translations_of(*train), Random(settings.seed))}
    say(f"tags: {figures['tags']}")
    for kind in _KINDS:
        file = settings.terms / f"{kind}.tsv"
        figures[kind] = terms_of(dist_transformer.load(settings.terms_model), sources, references, file)
        say(f"{kind}: {figures[kind]}")
    result = result_of(
        model.info,
        what="tags and terms in translations: tags that are set around the right word, terms that come out",
        command="python tools/tags_and_terms.py --train SRC TGT --terms FOLDER --test SRC TGT --model MODEL "
        "--terms-model MODEL --json FILE",
        figures=figures,
        wall_seconds=time.monotonic() - started,
        rows=[
            row("tags", *(f"{{figures[tags][{name}]}}" for name in ("lines", "balanced", "possible", "around"))),
            *(
                row("terms", kind, *(f"{{figures[{kind}][{name}]{how}}}" for name, how in _SHOWN.items()))
                for kind in _KINDS
            ),
        ],
    )
    write_result(settings.json, result)


_SHOWN = {"wanted": "", "without": "", "with": "", "bleu_without": ":.1f", "bleu_with": ":.1f"}


def write_terms(folder: Path, sources: Sequence[str], targets: Sequence[str]) -> None:
    together, counts = Counter[tuple[str, str]](), (Counter[str](), Counter[str]())
    spelled: dict[str, Counter[str]] = {}
    for pair in itertools.islice(zip(sources, targets, strict=True), _PAIRS):
        words = [_words(text) for text in pair]
        counts[0].update(words[0])
        counts[1].update(words[1])
        together.update((one, other) for one in words[0] for other in words[1])
        for word in _WORD.findall(pair[1]):
            spelled.setdefault(word.lower(), Counter())[word] += 1
    dice = {
        pair: 2 * count / (counts[0][pair[0]] + counts[1][pair[1]])
        for pair, count in together.items()
        if count >= _LEAST_PAIRS
    }
    ranked: tuple[dict[str, list[str]], dict[str, list[str]]] = ({}, {})
    for one, other in sorted(dice, key=lambda pair: (-dice[pair], pair)):
        ranked[0].setdefault(one, []).append(other)
        ranked[1].setdefault(other, []).append(one)
    lines = dict.fromkeys((*_KINDS, "training"), "")
    for one, others in ranked[0].items():
        is_unseen = zlib.crc32(one.encode()) % 4 == 0
        for place, other in enumerate(others[:_TRAINING_TERMS]):
            line, letters = f"{one}\t{spelled[other].most_common(1)[0][0]}\n", min(len(one), len(other)) * one.isalpha()
            is_best = place == 0 and ranked[1][other][0] == one and counts[0][one] < _MOST_PAIRS
            if is_best and dice[one, other] >= _DICE and letters >= _LETTERS:
                lines[_KINDS[is_unseen]] += line
            if not is_unseen and dice[one, other] >= _TRAINING_DICE and letters >= _TRAINING_LETTERS:
                lines["training"] += line
    for kind, text in lines.items():
        write_file(folder / f"{kind}.tsv", text)


def terms_of(model: TrainedModel, sources: Sequence[str], references: Sequence[str], file: Path) -> dict[str, Any]:
    terms = Terms.read(file)
    wanted = [terms.annotate(*pair)[1] for pair in zip(sources, references, strict=True)]
    figures: dict[str, Any] = {"wanted": sum(map(len, wanted))}
    ways: dict[str, dict[str, Any]] = {"without": {}, "with": {"terms": file}}
    for name, how in ways.items():
        found = model.translate(sources, **how)
        figures[name] = sum(map(count_terms, wanted, found))
        figures[f"bleu_{name}"] = sacrebleu.corpus_bleu(found, [[*references]]).score
    return figures


class _Tags(HTMLParser):
    """Tags of a line, whether they are balanced, and the text in <b>."""

    def __init__(self, line: str) -> None:
        super().__init__()
        self.tags, self.inside, self.open, self.is_balanced = Counter[str | None](), "", list[str](), True
        self.feed(line)
        self.close()
        self.is_balanced &= not self.open

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.open.append(tag)
        self.tags[self.get_starttag_text()] += 1

    def handle_endtag(self, tag: str) -> None:
        self.is_balanced &= bool(self.open) and self.open.pop() == tag
        self.tags[f"/{tag}"] += 1

    def handle_data(self, data: str) -> None:
        self.inside += data * ("b" in self.open)


def tags_of(
    model: TrainedModel, sources: Sequence[str], translations: dict[str, set[str]], random: Random
) -> dict[str, int]:
    lines = [insert(source, random) for source in sources]
    counts = Counter[str](lines=len(lines))
    for line, found in zip(lines, model.translate(lines, markup="html"), strict=True):
        before, after = _Tags(line), _Tags(found)
        counts["balanced"] += after.is_balanced and after.tags == before.tags
        known = set[str]().union(*(translations.get(word, set()) for word in _words(before.inside)))
        counts["possible"] += bool(known & _words(re.sub("<[^>]*>", "", found)))
        counts["around"] += bool(known & _words(after.inside))
    return dict(counts)


def insert(source: str, random: Random) -> str:
    words = source.split()
    count = random.randint(1, min(3, len(words)))
    at = random.randrange(len(words) - count + 1)
    inner = words[at : at + count]
    if count > 1 and random.random() < 0.5:
        inner[0] = f"<i>{inner[0]}</i>"
    return " ".join([*words[:at], f'<b class="x">{" ".join(inner)}</b>', *words[at + count :]])


def _words(text: str) -> set[str]:
    return {*_WORD.findall(text.lower())}


if __name__ == "__main__":
    main()
