"""The vocabularies of a preparation: those that exist are checked, and others are learned from the text."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from dist_transformer.base.errors import UserError
from dist_transformer.data.folder.format import TOKENIZER_FILE
from dist_transformer.data.prepare.ingest import VOCABULARY, Chunk, Normalizations, Report, pair_hash
from dist_transformer.data.prepare.settings import PrepareSettings, VocabularyChoice
from dist_transformer.data.prepare.work_dir import Work
from dist_transformer.data.text.terms import Terms
from dist_transformer.data.vocabulary.kinds import load_vocabulary, wrap_pair
from dist_transformer.data.vocabulary.normalization import DEFAULT_NORMALIZATION, Normalization
from dist_transformer.data.vocabulary.placeholders import placeholders_of, term_marks_of
from dist_transformer.data.vocabulary.tokenizer import Tokenizer, Vocabulary, show_sizes

_STRENGTH = 0.1


def tokenizer_path(work: Work) -> Path:
    return work.data / TOKENIZER_FILE


def check_tokenizers(settings: PrepareSettings, report: Report) -> None:
    """Check the vocabularies that exist, and what is changed in text for those that are learned.

    Raises:
        UserError: one cannot be read, or does not do what the settings ask of it.
    """
    if settings.terms is not None:
        Terms.read(settings.terms)
    for choice in settings.vocabularies:
        if choice.tokenizer is None:
            new = "the vocabulary to be learned"
            _require_changes(settings, new, "set --placeholders 8", settings.placeholders > 0, settings.lowercase)
            if settings.placeholders and "copy" not in settings.rates:
                report("warning: no pair has placeholders, so a model does not learn them: set --augment copy:0.15")
            continue
        vocabulary = load_vocabulary(choice.tokenizer, is_foreign=True)
        tokenizers = [(side, (vocabulary.source, vocabulary.target)[side]) for side in choice.sides]
        for side, tokenizer in tokenizers:
            path, flag = choice.tokenizer, f"{choice.flags}tokenizer"
            if settings.lowercase and not tokenizer.lowercase:
                raise UserError(f"{path} keeps case, which excludes lowercase: leave out --lowercase or {flag}")
            if settings.normalization not in (None, tokenizer.normalization):
                raise UserError(
                    f"{path} has the normalization {tokenizer.normalization or 'of its own table'}, which excludes "
                    f"{settings.normalization}: leave out --normalization or {flag}"
                )
            if side in settings.sampled_sides:
                _strength(settings, tokenizer)
            has_placeholders = bool(placeholders_of(tokenizer))
            _require_changes(settings, path, f"leave out copy or {flag}", has_placeholders, tokenizer.lowercase)
            if side == 0:
                if settings.terms is not None and not term_marks_of(tokenizer):
                    raise UserError(f"terms needs tags around terms, and {path} has none: leave out terms or {flag}")
                tokenizer.fronts(settings.tags_with(tokenizer))
        first = tokenizers[0][1]
        sizes = vocabulary.sizes if len(tokenizers) > 1 else (first.vocab_size, 0)
        wants_another_size = choice.vocab_size not in (None, first.vocab_size)
        report(
            f"{_name(settings, choice)}: {show_sizes(sizes)} entries from {choice.tokenizer}, {first.text_rule}"
            + f", {choice.flags}vocab-size has no effect" * wants_another_size
        )


def _name(settings: PrepareSettings, choice: VocabularyChoice) -> str:
    """Return how reports call a vocabulary."""
    languages = [settings.languages[side] for side in choice.sides]
    return "vocabulary" if len(languages) > 1 else f"vocabulary of {languages[0]}"


def _require_changes(
    settings: PrepareSettings, vocabulary: Path | str, remedy: str, has_placeholders: bool, lowercase: bool
) -> None:
    """Refuse changes of the text of which a vocabulary has nothing."""
    if "copy" in settings.rates and not has_placeholders:
        raise UserError(f"--augment copy needs placeholders, and {vocabulary} has none: {remedy}")
    for name in ("upper", "title"):
        if name in settings.rates and lowercase:
            raise UserError(f"--augment {name} has no effect, because {vocabulary} is in lower case: leave it out")


def strengths_of(settings: PrepareSettings, vocabulary: Vocabulary) -> tuple[float | None, ...]:
    """Return the strength of each side's sampling, None for a side that is not sampled.

    Raises:
        UserError: a side's kind of vocabulary is not sampled by these settings.
    """
    sides = enumerate((vocabulary.source, vocabulary.target))
    return tuple(_strength(settings, side) if i in settings.sampled_sides else None for i, side in sides)


def _strength(settings: PrepareSettings, tokenizer: Tokenizer) -> float:
    """Return what `Tokenizer.sample` takes for a side."""
    values = {"dropout": settings.segmentation_dropout, "alpha": settings.segmentation_alpha}
    if tokenizer.sampled_by is None:
        raise UserError(
            f"--segmentations {settings.segmentations} needs BPE or a unigram model, and a {tokenizer.kind} vocabulary "
            "has one segmentation of a text: leave it out"
        )
    own = values.pop(tokenizer.sampled_by)
    if own is None and any(value is not None for value in values.values()):
        raise UserError(
            f"--segmentation-{next(iter(values))} is not for a {tokenizer.kind} vocabulary: set "
            f"--segmentation-{tokenizer.sampled_by}"
        )
    return _STRENGTH if own is None else own


def normalizations(settings: PrepareSettings) -> Normalizations:
    """Return the rules for text of sources and targets, which are known before the vocabularies are learned."""
    rules: list[Normalization | None] = [settings.normalization or DEFAULT_NORMALIZATION] * 2
    for choice in settings.vocabularies:
        if choice.tokenizer is not None:
            vocabulary = load_vocabulary(choice.tokenizer)
            for side in choice.sides:
                rules[side] = (vocabulary.source, vocabulary.target)[side].normalization
    return rules[0], rules[1]


def make_tokenizer(
    work: Work, settings: PrepareSettings, chunks: Sequence[Chunk], held_out: np.ndarray, report: Report
) -> None:
    """Write the vocabulary to the data folder: what exists, and what is learned from the text."""
    pairs = sum(chunk.pairs for chunk in chunks) - len(held_out)
    if (taken := work.result("vocabulary")) is None:
        rows = [*_sample(settings, chunks, held_out, pairs)]
        taken = sum(map(len, rows))

        def texts(sides: Sequence[int]) -> Iterator[str]:
            for chunk, chosen in zip(chunks, rows, strict=True):
                columns = chunk.texts(work, chosen)
                for side in sides:
                    yield from columns[side]

        parts: list[Vocabulary] = [
            load_vocabulary(choice.tokenizer)
            if choice.tokenizer is not None
            else settings.learning(choice).learn(texts(choice.sides))
            for choice in settings.vocabularies
        ]
        vocabulary = parts[0] if len(parts) == 1 else wrap_pair(*parts)
        vocabulary.save(tokenizer_path(work))
        work.keep_result("vocabulary", taken)
    vocabulary = load_vocabulary(tokenizer_path(work))
    for choice in settings.vocabularies:
        if choice.tokenizer is None:
            assert choice.vocab_size is not None
            tokenizer = vocabulary.source if 0 in choice.sides else vocabulary.target
            fewer = f"; the text yields fewer than the requested {choice.vocab_size:,}"
            report(
                f"{_name(settings, choice)}: {tokenizer.vocab_size:,} entries, {tokenizer.kind}, {tokenizer.text_rule}"
                + (f", tags {' '.join(tokenizer.tags)}" if tokenizer.tags else "")
                + (f", learned from a sample of {taken:,} of {pairs:,} pairs" if taken < pairs else "")
                + (fewer if tokenizer.vocab_size < choice.vocab_size else "")
            )


def _sample(
    settings: PrepareSettings, chunks: Sequence[Chunk], held_out: np.ndarray, pairs: int
) -> Iterator[np.ndarray]:
    """Yield the rows of each chunk to learn vocabularies from: all but the held-out ones, or a sample by hash."""
    bound = 2**64 * settings.vocab_sample_pairs // max(1, pairs)
    for chunk in chunks:
        rows = np.setdiff1d(np.arange(chunk.pairs), chunk.rows_of(held_out))
        if pairs > settings.vocab_sample_pairs:
            rows = rows[pair_hash(chunk.first + rows, settings.seed, VOCABULARY) < np.uint64(bound)]
        yield rows
