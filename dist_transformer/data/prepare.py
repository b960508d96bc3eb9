"""Text to data folder: read → hold out → learn the vocabulary → encode and filter → scatter to shards.

The text is read once and staged as chunks beside the result, so a slow source is not read again and memory does not
grow with the corpus. Encoding is a function of one chunk, scattering of one shard. The result is a pure function of the
text and the settings: neither the chunk size nor the time nor the folder enters it.
"""

import contextlib
import hashlib
import itertools
import os
import shlex
import shutil
import time
import unicodedata
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa

from dist_transformer.data import shards
from dist_transformer.data.prepare_settings import PrepareSettings
from dist_transformer.data.shards import DataIndex, ShardInfo, SplitInfo, TextInfo, TokenLists
from dist_transformer.data.sources import Pair
from dist_transformer.data.tokenizer import DEFAULT_NORMALIZATION, Tokenizer, first_folded, train_tokenizer
from dist_transformer.errors import UserError
from dist_transformer.files import sync, write_synced

Report = Callable[[str], None]

# Pairs read, encoded and filtered at a time: about 20 MB of text.
CHUNK_PAIRS = 50_000
# Added to both lengths before their ratio is taken, so that "Yes." may become four words.
_RATIO_ALLOWANCE = 5
_DROP_REASONS = ("empty", "too_long", "length_ratio")
_SCATTER, _HOLD_OUT = 1, 2
# Share of target lines that NFKC may change in silence: above it, scores on the raw references have a ceiling.
_FOLDED_ALLOWANCE = 0.01


@dataclass(frozen=True, kw_only=True, slots=True)
class Chunk:
    """A staged piece of the corpus; pair `first` + i is row i of the text."""

    text: Path
    ids: Path
    first: int
    pairs: int


def prepare(settings: PrepareSettings, report: Report) -> DataIndex:
    """Make a data folder; `report` gets what was read, dropped and written, a line at a time.

    On any error, and on Ctrl-C, nothing is left behind.

    Raises:
        UserError: bad text, files or settings, or `out` exists.
    """
    started = time.monotonic()
    source_language, target_language = settings.languages
    given = _load_tokenizer(settings, report)
    with _new_folder(settings.out) as folder:
        work = folder / "work"
        work.mkdir()
        for source in (*settings.sources, *settings.validation):
            # A misspelt name or a wrong column fails now, and not after hours of reading.
            next(source.pairs(), None)
        chunks, candidates = _stage_text(settings, work, report)
        pairs_read = sum(chunk.pairs for chunk in chunks)
        _warn_of_folding(settings, given, chunks, report)
        valid_pairs, valid_empty, held_out = _validation_pairs(settings, chunks, candidates, report)

        tokenizer = given or _learn_vocabulary(settings, chunks, held_out, report)
        tokenizer.save(folder / shards.TOKENIZER_FILE)

        dropped = Counter(dict.fromkeys(_DROP_REASONS, 0))
        for chunk in chunks:
            dropped.update(_encode_chunk(chunk, tokenizer, settings, held_out))
        kept = pairs_read - len(held_out) - dropped.total()
        _require_pairs(kept, dropped, settings)
        train = shards.write_split(folder, _scatter(chunks, kept, folder, settings))
        valid, valid_text, valid_too_long = _write_validation(valid_pairs, folder, tokenizer, settings)
        shutil.rmtree(work)
        if settings.keep_text is not None:
            shutil.copytree(settings.keep_text, folder / "text")

        index = DataIndex(
            format_version=shards.FORMAT_VERSION,
            corpus=settings.corpus or settings.sources[0].name,
            synthetic=settings.synthetic,
            source_language=source_language,
            target_language=target_language,
            lowercase=tokenizer.lowercase,
            tokenizer_sha256=tokenizer.sha256,
            vocab_size=tokenizer.vocab_size,
            sources=tuple(source.name for source in settings.sources),
            seed=settings.seed,
            max_tokens=settings.max_tokens,
            max_length_ratio=float(settings.max_length_ratio),
            pairs_per_shard=settings.pairs_per_shard,
            pairs_read=pairs_read,
            dropped=dict(dropped),
            valid_held_out=not settings.validation,
            valid_dropped={"empty": valid_empty, "too_long": valid_too_long},
            valid_text=valid_text,
            train=train,
            valid=valid,
        )
        shards.write_index(folder, index)
    _report_result(index, settings.out, time.monotonic() - started, report)
    return index


def pair_hash(numbers: np.ndarray, seed: int, purpose: int) -> np.ndarray:
    """A uint64 for each pair number, no two alike: SplitMix64 (Steele et al. 2014), started from seed and purpose."""
    key = np.uint64((seed * 0xD1342543DE82EF95 + purpose * 0xDA942042E4DD58B5) % 2**64)
    z = (numbers.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15) + key
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def _load_tokenizer(settings: PrepareSettings, report: Report) -> Tokenizer | None:
    if settings.tokenizer is None:
        return None
    tokenizer = Tokenizer.load(settings.tokenizer)
    if settings.lowercase and not tokenizer.lowercase:
        raise UserError(
            f"{settings.tokenizer} keeps case, so lowercase does not go with it: leave out --lowercase or --tokenizer"
        )
    if settings.normalization not in (None, tokenizer.normalization):
        raise UserError(
            f"{settings.tokenizer} normalises by {tokenizer.normalization.upper()}, so {settings.normalization} does "
            "not go with it: leave out --normalization or --tokenizer"
        )
    note = ", --vocab-size has no effect" if settings.vocab_size not in (None, tokenizer.vocab_size) else ""
    report(f"vocabulary: {tokenizer.vocab_size:,} entries from {settings.tokenizer}, {tokenizer.text_rule}{note}")
    return tokenizer


def _warn_of_folding(
    settings: PrepareSettings, given: Tokenizer | None, chunks: Sequence[Chunk], report: Report
) -> None:
    if (given.normalization if given else settings.normalization or DEFAULT_NORMALIZATION) != "nfkc":
        return
    lines = (line for chunk in chunks for line in shards.read_batch(chunk.text).column("tgt").to_pylist())
    folded = Counter(filter(None, map(first_folded, lines)))
    share = folded.total() / max(1, sum(chunk.pairs for chunk in chunks))
    if share > _FOLDED_ALLOWANCE:
        ((character, _),) = folded.most_common(1)
        report(
            f"warning: NFKC changes {share:.1%} of the target lines, for example {character!r} -> "
            f"{unicodedata.normalize('NFKC', character)!r}: --normalization nfc keeps them"
            + (", without --tokenizer" if given else "")
        )


@contextlib.contextmanager
def _new_folder(out: Path) -> Iterator[Path]:
    """A folder beside `out` that is renamed to it at the end, and removed with all in it when the block fails."""
    out = Path(os.path.abspath(out))
    if os.path.lexists(out) and not (out.is_dir() and not out.is_symlink() and not any(out.iterdir())):
        raise UserError(f"{out} exists already: choose another --out, or remove it first")
    partial = out.parent / f".{out.name}.{uuid.uuid4().hex[:8]}.partial"
    new_parents = list(itertools.takewhile(lambda parent: not parent.exists(), out.parents))
    try:
        partial.mkdir(parents=True)
        yield partial
        sync(partial)
        partial.rename(out)
        sync(out.parent)
    except BaseException as error:
        shutil.rmtree(partial, ignore_errors=True)
        for parent in new_parents:
            with contextlib.suppress(OSError):
                parent.rmdir()
        if isinstance(error, OSError):
            raise UserError(
                f"{out} cannot be written ({error.strerror or error}): check the place, its rights and its free space"
            ) from error
        raise


def _stage_text(settings: PrepareSettings, work: Path, report: Report) -> tuple[list[Chunk], np.ndarray]:
    """Copy the sources into chunks; returns them and the numbers of the pairs to hold out if no validation is given."""
    chunks: list[Chunk] = []
    candidates = np.zeros(0, dtype=np.int64)
    non_empty = 0
    pairs_read = 0
    for source in settings.sources:
        before = pairs_read
        for batch in _batched(source.pairs(), CHUNK_PAIRS):
            number = len(chunks)
            chunk = Chunk(
                text=work / f"text-{number:05}.arrow",
                ids=work / f"ids-{number:05}.arrow",
                first=pairs_read,
                pairs=len(batch),
            )
            texts = dict(zip(("src", "tgt"), map(list, zip(*batch, strict=True)), strict=True))
            shards.write_batch(chunk.text, {side: pa.array(column, pa.string()) for side, column in texts.items()})
            chunks.append(chunk)
            usable = np.array([not _is_empty(pair) for pair in batch])
            non_empty += int(usable.sum())
            candidates = np.concatenate([candidates, pairs_read + np.flatnonzero(usable)])
            chosen = np.argsort(pair_hash(candidates, settings.seed, _HOLD_OUT))[: settings.valid_pairs]
            candidates = candidates[chosen]
            pairs_read += len(batch)
        report(f"read: {pairs_read - before:,} pairs from {source.name}")
    # At most a tenth, so that a small corpus keeps its training text.
    return chunks, candidates[: max(1, non_empty // 10)] if non_empty > 1 else candidates[:0]


def _validation_pairs(
    settings: PrepareSettings, chunks: Sequence[Chunk], candidates: np.ndarray, report: Report
) -> tuple[list[Pair], int, np.ndarray]:
    """The validation pairs without those with an empty side, the number of these, and the numbers of held-out pairs."""
    if not settings.validation:
        if len(candidates) == 0:
            raise UserError(
                "the text has fewer than two pairs with text on both sides, so none can be held out for validation: "
                "check the files, or give --valid-src and --valid-tgt"
            )
        held_out = np.sort(candidates)
        report(
            f"validation: {len(held_out):,} pairs held out from the training text "
            f"(seed {settings.seed}; at most {settings.valid_pairs:,} and a tenth)"
        )
        pairs = []
        for chunk in chunks:
            rows = held_out[(held_out >= chunk.first) & (held_out < chunk.first + chunk.pairs)] - chunk.first
            source, target = _texts(chunk, rows)
            pairs += list(zip(source, target, strict=True))
        return pairs, 0, held_out
    given = [pair for source in settings.validation for pair in source.pairs()]
    pairs = [pair for pair in given if not _is_empty(pair)]
    names = ", ".join(source.name for source in settings.validation)
    if not pairs:
        raise UserError(f"the validation text ({names}) has no pair with text on both sides: give other files")
    report(f"validation: {len(given):,} pairs from {names}, {len(given) - len(pairs):,} empty left out")
    return pairs, len(given) - len(pairs), np.zeros(0, dtype=np.int64)


def _learn_vocabulary(
    settings: PrepareSettings, chunks: Sequence[Chunk], held_out: np.ndarray, report: Report
) -> Tokenizer:
    assert settings.vocab_size is not None
    texts = (
        text
        for chunk in chunks
        for column in _texts(chunk, np.setdiff1d(np.arange(chunk.pairs), held_out - chunk.first))
        for text in column
    )
    tokenizer = train_tokenizer(
        texts,
        vocab_size=settings.vocab_size,
        lowercase=settings.lowercase,
        normalization=settings.normalization or DEFAULT_NORMALIZATION,
    )
    fewer = f"; the text gives no more than that of the {settings.vocab_size:,} asked for"
    report(
        f"vocabulary: {tokenizer.vocab_size:,} entries, joint byte-level BPE, {tokenizer.text_rule}"
        + (fewer if tokenizer.vocab_size < settings.vocab_size else "")
    )
    return tokenizer


def _encode_chunk(
    chunk: Chunk, tokenizer: Tokenizer, settings: PrepareSettings, held_out: np.ndarray
) -> dict[str, int]:
    """Write the ids of a chunk's pairs that stay, sorted by their scatter hash; returns the dropped, by reason."""
    rows = np.setdiff1d(np.arange(chunk.pairs), held_out - chunk.first)
    texts = _texts(chunk, rows)
    source, target = (TokenLists.from_lists(tokenizer.encode_batch(side), _id_type(tokenizer)) for side in texts)
    shorter, longer = np.minimum(source.lengths, target.lengths), np.maximum(source.lengths, target.lengths)
    empty = np.array([_is_empty(pair) for pair in zip(*texts, strict=True)], dtype=bool) | (shorter == 0)
    too_long = ~empty & (longer + 1 > settings.max_tokens)
    unlike = (longer + _RATIO_ALLOWANCE) > settings.max_length_ratio * (shorter + _RATIO_ALLOWANCE)
    unlike &= ~empty & ~too_long

    kept = np.flatnonzero(~(empty | too_long | unlike))
    order = pair_hash(chunk.first + rows[kept], settings.seed, _SCATTER)
    by_order = np.argsort(order)
    columns = {side: lists.take(kept[by_order]).to_arrow() for side, lists in (("src", source), ("tgt", target))}
    shards.write_batch(chunk.ids, {"order": pa.array(order[by_order]), **columns})
    return dict(zip(_DROP_REASONS, (int(mask.sum()) for mask in (empty, too_long, unlike)), strict=True))


def _scatter(chunks: Sequence[Chunk], kept: int, folder: Path, settings: PrepareSettings) -> list[ShardInfo]:
    """Deal the pairs to shards by their hash: shard i of n holds the hashes from i · 2^64 / n on, in order of hash."""
    count = -(-kept // settings.pairs_per_shard)
    edges = np.array([-(-(i << 64) // count) for i in range(count)], dtype=np.uint64)
    written: list[ShardInfo] = []
    for shard in range(count):
        last = shard + 1 == count
        orders, sources, targets = [], [], []
        for chunk in chunks:
            batch = shards.read_batch(chunk.ids)
            order = batch.column("order").to_numpy()
            start = int(np.searchsorted(order, edges[shard]))
            stop = len(order) if last else int(np.searchsorted(order, edges[shard + 1]))
            orders.append(order[start:stop])
            sources.append(TokenLists.from_arrow(batch.column("src")).slice(start, stop))
            targets.append(TokenLists.from_arrow(batch.column("tgt")).slice(start, stop))
        by_order = np.argsort(np.concatenate(orders))
        if len(by_order) == 0:  # only when shards are of a few pairs
            continue
        source, target = (TokenLists.concatenate(parts).take(by_order) for parts in (sources, targets))
        written.append(shards.write_shard(folder / f"train-{len(written):05}.arrow", source, target))
    return written


def _write_validation(
    pairs: Sequence[Pair], folder: Path, tokenizer: Tokenizer, settings: PrepareSettings
) -> tuple[SplitInfo, TextInfo, int]:
    """Write `valid/`: the raw text in full and shards of the pairs that fit; also returns how many do not."""
    valid = folder / shards.VALID_FOLDER
    valid.mkdir()
    columns: list[list[str]] = [list(side) for side in zip(*pairs, strict=True)] or [[], []]
    hashes = []
    for name, column in zip((shards.VALID_SOURCE_FILE, shards.VALID_TARGET_FILE), columns, strict=True):
        content = "".join(f"{text}\n" for text in column).encode("utf-8")
        write_synced(valid / name, content)
        hashes.append(hashlib.sha256(content).hexdigest())
    source, target = (TokenLists.from_lists(tokenizer.encode_batch(side), _id_type(tokenizer)) for side in columns)
    shorter, longer = np.minimum(source.lengths, target.lengths), np.maximum(source.lengths, target.lengths)
    fitting = np.flatnonzero((shorter > 0) & (longer + 1 <= settings.max_tokens))
    if len(fitting) == 0:
        raise UserError(
            f"none of the {len(pairs):,} validation pairs has at most max_tokens {settings.max_tokens} tokens a side: "
            "raise --max-tokens or give other validation text"
        )
    written: list[ShardInfo] = []
    for start in range(0, len(fitting), settings.pairs_per_shard):
        rows = fitting[start : start + settings.pairs_per_shard]
        path = valid / f"valid-{len(written):05}.arrow"
        written.append(shards.write_shard(path, source.take(rows), target.take(rows)))
    split = shards.write_split(valid, written)
    sync(valid)
    text = TextInfo(pairs=len(pairs), source_sha256=hashes[0], target_sha256=hashes[1])
    return split, text, len(pairs) - len(fitting)


def _require_pairs(kept: int, dropped: Counter[str], settings: PrepareSettings) -> None:
    if kept == 0:
        reasons = ", ".join(f"{count:,} {reason}" for reason, count in dropped.items())
        raise UserError(
            f"no training pair is left of {', '.join(source.name for source in settings.sources)} ({reasons} dropped): "
            "check the files, or raise --max-tokens and --max-length-ratio"
        )


def _report_result(index: DataIndex, out: Path, seconds: float, report: Report) -> None:
    train, valid = index.train, index.valid
    reasons = ", ".join(f"{count:,} {reason}" for reason, count in index.dropped.items())
    report(
        f"kept: {train.pairs:,} of {index.pairs_read:,} pairs; dropped {reasons} "
        f"(over {index.max_tokens} tokens; ratio over {index.max_length_ratio:g})"
    )
    for side, tokens in ((index.source_language, train.source_tokens), (index.target_language, train.target_tokens)):
        report(f"tokens: {tokens:,} {side}, {tokens / train.pairs:.1f} a sentence (the special token included)")
    report(f"validation shards: {valid.pairs:,} of {index.valid_text.pairs:,} pairs fit; the raw text is kept in full")
    report(f"wrote: {out}, {len(train.shards)} training shard{'s' * (len(train.shards) > 1)}, in {seconds:.1f} s")
    preset = "tiny" if index.synthetic else "multi30k" if train.pairs < 200_000 else "base"
    data = shlex.quote(str(out))
    report(f"next: python -m dist_transformer.train --preset {preset} --data {data} --run-dir runs/first")


def _texts(chunk: Chunk, rows: np.ndarray) -> tuple[list[str], list[str]]:
    batch = shards.read_batch(chunk.text).take(pa.array(rows))
    return batch.column("src").to_pylist(), batch.column("tgt").to_pylist()


def _id_type(tokenizer: Tokenizer) -> type:
    return np.uint16 if tokenizer.vocab_size <= 2**16 else np.uint32


def _is_empty(pair: Pair) -> bool:
    return not pair[0].strip() or not pair[1].strip()


def _batched(pairs: Iterator[Pair], size: int) -> Iterator[list[Pair]]:
    while batch := list(itertools.islice(pairs, size)):
        yield batch
