"""Encoding of each chunk's text to ids, and the pairs that are dropped as unfit."""

import functools
import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pyarrow as pa

from dist_transformer.data.folder import format as shards
from dist_transformer.data.folder.format import TokenLists
from dist_transformer.data.prepare.ingest import AUGMENTATION, SEGMENTATION, SHUFFLE, Chunk, Report, pair_hash
from dist_transformer.data.prepare.settings import PrepareSettings
from dist_transformer.data.prepare.shuffle import pair_keys
from dist_transformer.data.prepare.tasks import TaskRunner
from dist_transformer.data.prepare.vocabularies import strengths_of, tokenizer_path
from dist_transformer.data.prepare.words import id_type, words_of
from dist_transformer.data.prepare.work_dir import Work
from dist_transformer.data.prepare.worker_pool import Progress
from dist_transformer.data.text.alignments import link_tokens
from dist_transformer.data.text.augment import MODIFIERS, Neighbours
from dist_transformer.data.text.pairs import Pair
from dist_transformer.data.text.sentences import has_several_sentences
from dist_transformer.data.text.terms import Terms
from dist_transformer.data.vocabulary.kinds import load_vocabulary
from dist_transformer.data.vocabulary.placeholders import (
    encode_marked,
    placeholders_of,
    shared_placeholders,
    without_marks,
)
from dist_transformer.data.vocabulary.tokenizer import UNK_ID, Tokenizer, Vocabulary

UNCHANGED = "unchanged"
"""Name of a change that is drawn for a pair and changes nothing, or leaves nothing or more than fits of a side."""
LONG_LINE = "long_line"
"""Reason for pairs with a line above `LONGEST_LINE`; reported only if there are such pairs."""
DROP_REASONS = ("empty", "too_long", "length_ratio", "in_validation", LONG_LINE)
# Tokens that are added to both lengths before their ratio is computed, so that "Yes." may become four words.
_RATIO_ALLOWANCE = 5
# Texts that are encoded at a time: few, because the library's encodings take about 100 bytes per token.
_ENCODE_ROWS, _ENCODE_BYTES = 4_096, 2**24

# Pairs in which words that translate each other are looked for, from the first.
_NEIGHBOURS_PAIRS = 20_000

# Characters that became <unk> and are shown, by language.
_SHOWN_UNKNOWN = 10


def _encode(
    work: Work,
    chunk: Chunk,
    held_out: np.ndarray,
    settings: PrepareSettings,
    strengths: Sequence[float | None],
    neighbours: Neighbours,
    progress: Progress,
) -> list[dict[str, int]]:
    """Write the ids of a chunk's kept pairs, sorted by their shuffle hash; return counts, and unknown characters.

    The counts are the pairs for each reason, and of the kept pairs the tokens and the sources of several sentences.
    After them come the kept pairs of all variants by the name of their change.

    Args:
        held_out: rows of the chunk that are validation text, and so left out here.
        strengths: strength of each side's sampling, None for a side that has its best segmentation.
        neighbours: words that translate each other, beside which text is copied.
    """
    tokenizer = load_vocabulary(tokenizer_path(work))
    rows = np.setdiff1d(np.arange(chunk.pairs), held_out)
    sizes = chunk.sizes(work)[rows]
    parts, empty_parts, several_parts = [], [], []
    sides = (tokenizer.source, tokenizer.target)
    unknown: tuple[Counter[str], ...] = tuple(Counter() for _ in sides)
    for block in _blocks(sizes):
        texts = chunk.texts(work, rows[block])
        parts.append([words_of(tokenizer, side).encode(column) for side, column in enumerate(texts)])
        blank = [list(map(side.is_blank, column)) for side, column in zip(sides, texts, strict=True)]
        empty_parts.append(np.any(blank, axis=0))
        several_parts.append(np.fromiter(map(has_several_sentences, texts[0]), dtype=bool))
        for counted, side, column, ids in zip(unknown, sides, texts, parts[-1], strict=True):
            counted.update(_unknown(side, column, ids))
        progress(len(texts[0]))
    source, target = (TokenLists.concatenate(side) for side in zip(*parts, strict=True))
    fronts = tokenizer.fronts(settings.tags_with(tokenizer))
    progress(len(held_out))

    shorter, longer = np.minimum(source.lengths, target.lengths), np.maximum(source.lengths, target.lengths)
    fronted = np.maximum(source.lengths + len(fronts[0]), target.lengths + len(fronts[1]))
    long_line = sizes < 0
    empty = (np.concatenate(empty_parts) | (shorter == 0)) & ~long_line
    too_long = ~empty & (fronted + 1 > settings.max_tokens)
    unlike = (longer + _RATIO_ALLOWANCE) > settings.max_length_ratio * (shorter + _RATIO_ALLOWANCE)
    unlike &= ~empty & ~too_long & ~long_line

    kept = np.flatnonzero(~(empty | too_long | unlike | long_line))
    best = [source.take(kept), target.take(kept)]
    of_sides = (
        [best[side]] * settings.segmentations
        if strength is None
        else _sampled(work, chunk, settings, sides[side], side, rows[kept], strength)
        for side, strength in enumerate(strengths)
    )
    variants = list(zip(*of_sides, strict=True))
    changes = np.zeros((0, len(kept)), dtype=str)
    if settings.augment:
        variants, changes = _augmented(
            work, chunk, settings, tokenizer, rows[kept], variants, strengths, neighbours, fronts
        )
    finished = _finished(work, chunk, settings, tokenizer, rows[kept], variants, fronts)
    longest = np.max([np.maximum(one.lengths, other.lengths) for one, other, *_ in finished], axis=0)
    places = np.flatnonzero(longest < settings.max_tokens)
    too_long[np.delete(kept, places)] = True
    keys = pair_keys(*(side.take(places) for side in best))
    in_validation = np.isin(keys, read_validation_keys(work))
    if not settings.keep_overlap:
        places, keys = places[~in_validation], keys[~in_validation]
    several = np.concatenate(several_parts)[kept[places]]
    for path, written in ((chunk.keys(work), keys), (chunk.several_keys(work), keys[several])):
        shards.write_batch(path, {"key": pa.array(np.sort(written))})
    # A key in place of a number gives all repeats of a pair one hash, of which only the first pair is written.
    order = pair_hash(keys if settings.drop_repeats else chunk.first + rows[kept[places]], settings.seed, SHUFFLE)
    by_order = np.argsort(order, kind="stable")
    places = places[by_order]
    columns = [column.take(places) for lists in finished for column in lists]
    arrays = {str(number): side.to_arrow() for number, side in enumerate(columns)}
    shards.write_batch(chunk.ids(work), {"order": pa.array(order[by_order]), **arrays})
    dropped = (empty, too_long, unlike, in_validation, long_line)
    counts = dict(zip(DROP_REASONS, map(int, map(np.count_nonzero, dropped)), strict=True))
    counts |= {"tokens": sum(len(side.values) for side in columns), "several": int(several.sum())}
    return [counts, Counter(filter(None, changes[:, places].flat)), *unknown]


def _sampled(
    work: Work,
    chunk: Chunk,
    settings: PrepareSettings,
    tokenizer: Tokenizer,
    side: int,
    rows: np.ndarray,
    strength: float,
) -> list[TokenLists]:
    """Draw all segmentations of one side of rows of the chunk."""
    parts: list[list[TokenLists]] = [[] for _ in range(settings.segmentations)]
    for block in _blocks(chunk.sizes(work)[rows]):
        texts, numbers = chunk.texts(work, rows[block])[side], chunk.first + rows[block]
        purposes = [SEGMENTATION + 2 * variant + side for variant in range(settings.segmentations)]
        seeds = [pair_hash(numbers, settings.seed, purpose).tolist() for purpose in purposes]
        drawn = [tokenizer.sample(text, strength, each) for text, *each in zip(texts, *seeds, strict=True)]
        for number, part in enumerate(parts):
            part.append(TokenLists.from_lists([row[number] for row in drawn], id_type(tokenizer)))
    return [TokenLists.concatenate(part) for part in parts]


def _augmented(
    work: Work,
    chunk: Chunk,
    settings: PrepareSettings,
    vocabulary: Vocabulary,
    rows: np.ndarray,
    variants: Sequence[tuple[TokenLists, TokenLists]],
    strengths: Sequence[float | None],
    neighbours: Neighbours,
    fronts: tuple[Sequence[int], Sequence[int]],
) -> tuple[list[tuple[TokenLists, TokenLists]], np.ndarray]:
    """Change some pairs of each variant of rows of the chunk; each pair and variant draws one change, or none.

    Also return the name of the change of each variant and row, empty for none.
    """
    shares, names = np.cumsum(list(settings.rates.values())), np.array([*settings.rates, ""], dtype=object)
    sides = (vocabulary.source, vocabulary.target)
    more: dict[str, tuple[Any, ...]] = {"copy": (neighbours, list(shared_placeholders(vocabulary)))}
    if settings.terms is not None:
        more["terms"] = (Terms.read(settings.terms),)
    changed, changes = [], []
    for variant, columns in enumerate(variants):
        seeds = pair_hash(chunk.first + rows, settings.seed, AUGMENTATION + variant)
        drawn = names[np.searchsorted(shares, seeds / 2.0**64, side="right")]
        order, (found,) = np.arange(len(rows)), np.nonzero(drawn)
        new: tuple[list[list[int]], list[list[int]]] = ([], [])
        for place, *texts in zip(found.tolist(), *chunk.texts(work, rows[found]), strict=True):
            name, seed = drawn[place], int(seeds[place])
            own = [*map(without_marks, texts)]
            pair = [*MODIFIERS[name](*own, Random(seed), *more.get(name, ()))]
            ids = [_ids_of(*each, seed) for each in zip(sides, pair, strengths, strict=True)]
            longest = max(len(front) + len(row) for front, row in zip(fronts, ids, strict=True))
            if pair == own or not all(ids) or longest >= settings.max_tokens:
                drawn[place] = UNCHANGED
                continue
            order[place] = len(rows) + len(new[0])
            for column, row in zip(new, ids, strict=True):
                column.append(row)
        one, other = (
            TokenLists.concatenate([column, TokenLists.from_lists(lists, id_type(side))]).take(order)
            for column, lists, side in zip(columns, new, sides, strict=True)
        )
        changed.append((one, other))
        changes.append(drawn)
    return changed, np.stack(changes)


def _finished(
    work: Work,
    chunk: Chunk,
    settings: PrepareSettings,
    vocabulary: Vocabulary,
    rows: np.ndarray,
    variants: Sequence[tuple[TokenLists, TokenLists]],
    fronts: tuple[Sequence[int], Sequence[int]],
) -> list[tuple[TokenLists, ...]]:
    """Put the tags in front of variants of rows of the chunk; add the links of the target tokens, if there are any."""
    finished = [(one.prefixed(fronts[0]), other.prefixed(fronts[1])) for one, other in variants]
    if not settings.is_aligned:
        return [*finished]
    sides, of_sources = (vocabulary.source, vocabulary.target), placeholders_of(vocabulary.source)
    placeholders = {token: of_sources[mark] for mark, token in shared_placeholders(vocabulary).items()}
    texts, lines = [*zip(*chunk.texts(work, rows), strict=True)], chunk.links(work, rows)
    found: list[tuple[TokenLists, ...]] = []
    for variant in finished:
        ids = zip(*map(TokenLists.to_lists, variant), strict=True)
        links = [link_tokens(sides, *row, placeholders) for row in zip(texts, lines, ids, strict=True)]
        found.append((*variant, TokenLists.from_lists(links, np.uint32)))
    return found


def _ids_of(tokenizer: Tokenizer, text: str, strength: float | None, seed: int) -> list[int]:
    def encode(part: str) -> list[int]:
        return tokenizer.encode(part) if strength is None else tokenizer.sample(part, strength, [seed])[0]

    return encode_marked(tokenizer, text, encode)


def _unknown(tokenizer: Tokenizer, texts: Sequence[str], ids: TokenLists) -> Iterator[str]:
    """Yield the characters that became `<unk>`."""
    places = np.flatnonzero(ids.values == UNK_ID)
    for row in np.unique(np.searchsorted(ids.offsets, places, side="right") - 1).tolist():
        yield from tokenizer.unknown(texts[row])


def encode_chunks(
    runner: TaskRunner, settings: PrepareSettings, chunks: Sequence[Chunk], held_out: np.ndarray, report: Report
) -> tuple[Counter[str], int, int, dict[str, int] | None]:
    """Encode all chunks; return the number of pairs for each reason, and, of the kept pairs, the tokens, the sources
    of several sentences, and those that are changed in all variants, by the name of the change.

    Collective: every rank must call it.
    """
    strengths = runner.ranks.lead(lambda: strengths_of(settings, load_vocabulary(tokenizer_path(runner.work))))
    known: list[Pair] = []
    for chunk in chunks if "copy" in settings.rates else ():
        rows = np.arange(min(chunk.pairs, _NEIGHBOURS_PAIRS - len(known)))
        known += zip(*chunk.texts(runner.work, rows), strict=True)
    neighbours = Neighbours(known)
    tasks = {
        f"encode-{chunk.name}": functools.partial(
            _encode, runner.work, chunk, chunk.rows_of(held_out), settings, strengths, neighbours
        )
        for chunk in chunks
    }
    sizes = [chunk.pairs for chunk in chunks]
    merged = runner.merged("encode", tasks, _merge, [Counter[str]() for _ in range(4)], sizes=sizes)
    total, changes, *unknown = map(Counter, merged)
    for side, (language, counted) in enumerate(zip(settings.languages, unknown, strict=True)):
        learned = any(side in one.sides and one.tokenizer is None for one in settings.vocabularies)
        if counted:
            remedy = ": --byte-fallback or a higher --character-coverage keeps them" * learned
            report(_unknown_line(language, counted) + remedy)
    reasons = [reason for reason in DROP_REASONS if reason != LONG_LINE or total[reason]]
    changed = {name: changes[name] for name in (*settings.rates, UNCHANGED)} if settings.augment else None
    return Counter({reason: total[reason] for reason in reasons}), total["tokens"], total["several"], changed


def _merge(one: Sequence[dict[str, int]], other: Sequence[dict[str, int]]) -> list[Counter[str]]:
    return [Counter(some) + Counter(more) for some, more in zip(one, other, strict=True)]


def _unknown_line(language: str, counted: Counter[str]) -> str:
    most = sorted(counted, key=lambda character: (-counted[character], character))[:_SHOWN_UNKNOWN]
    shown = ", ".join(f"{character!r} {counted[character]:,}" for character in most)
    return (
        f"unknown: {counted.total():,} characters of {language}, {len(counted):,} different ones, became <unk>; most "
        f"often {shown}"
    )


def _blocks(sizes: np.ndarray) -> Iterator[slice]:
    """Split rows into blocks that are encoded together, by their sizes in bytes."""
    group = np.cumsum(np.maximum(sizes, 0)) // _ENCODE_BYTES
    rows = np.arange(len(sizes)) // _ENCODE_ROWS
    starts = np.flatnonzero((np.diff(group) != 0) | (np.diff(rows) != 0)) + 1
    for first, stop in itertools.pairwise([0, *starts.tolist(), len(sizes)]):
        yield slice(first, stop)


def write_validation_keys(work: Work, pairs: Sequence[Pair]) -> None:
    """Write the keys of the validation pairs, which training pairs are compared with."""
    if _validation_keys(work).exists():
        return
    tokenizer = load_vocabulary(tokenizer_path(work))
    columns = [list(side) for side in zip(*pairs, strict=True)] or [[], []]
    keys = np.unique(pair_keys(*(words_of(tokenizer, side).encode(column) for side, column in enumerate(columns))))
    shards.write_batch(_validation_keys(work), {"key": pa.array(keys)})


def read_validation_keys(work: Work) -> np.ndarray:
    return shards.read_batch(_validation_keys(work)).column("key").to_numpy()


def _validation_keys(work: Work) -> Path:
    return work.folder / "keys-validation.arrow"
