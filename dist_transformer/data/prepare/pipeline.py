"""Text to data folder: read → hold out → learn the vocabulary → encode and filter → shuffle into shards.

The text is read once and staged as chunks next to the result, so a slow source is not read again, and memory does not
grow with the corpus. There is one encoding task per chunk, and one shuffling task per few shards. Tasks run on any
number of processes and ranks, and the finished tasks of an interrupted preparation are not repeated. The result is a
pure function of the text and the settings: it does not depend on the chunk size, the number of processes or the folder.
"""

import contextlib
import dataclasses
import hashlib
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from dist_transformer.base.errors import UserError
from dist_transformer.base.files import make_folder, move, refuse_content, whole_path, write_file
from dist_transformer.base.messages import as_kind
from dist_transformer.config.presets import preset_for
from dist_transformer.data.folder import format as shards
from dist_transformer.data.folder.format import DataIndex, ShardInfo, SplitInfo, TextInfo
from dist_transformer.data.folder.marks import LanguageMarks, find_marks
from dist_transformer.data.folder.reader import DataFolder
from dist_transformer.data.prepare.encode import LONG_LINE, encode_chunks, write_validation_keys
from dist_transformer.data.prepare.ingest import (
    Chunk,
    Report,
    Survey,
    count_traces,
    is_empty,
    read_sources,
    survey_chunks,
    warn_of_folding,
    warn_of_traces,
)
from dist_transformer.data.prepare.mpi_ranks import MpiRanks
from dist_transformer.data.prepare.settings import PrepareSettings
from dist_transformer.data.prepare.shuffle import count_repeats, shard_path, write_shards
from dist_transformer.data.prepare.tasks import TaskRunner
from dist_transformer.data.prepare.vocabularies import check_tokenizers, make_tokenizer, normalizations, tokenizer_path
from dist_transformer.data.prepare.words import words_of
from dist_transformer.data.prepare.work_dir import Work, fingerprint, work_folder
from dist_transformer.data.prepare.worker_pool import WorkerPool
from dist_transformer.data.text.lines import LONGEST_LINE
from dist_transformer.data.text.pairs import Pair
from dist_transformer.data.vocabulary.kinds import load_vocabulary
from dist_transformer.data.vocabulary.tokenizer import Vocabulary
from dist_transformer.runtime.launch import as_typed, has_gpu, own_command

# Pairs that are read, encoded and filtered at a time: about 20 MB of text.
CHUNK_PAIRS = 50_000

# A vocabulary beside it is that of a model.
_WEIGHTS_FILE = "model.safetensors"

# Pairs whose targets are encoded by another vocabulary, to find the marks of their language.
_MARKED_PAIRS = 20_000
# Validation lines, at most, that show whether the sides are swapped.
_LOOKED_AT = 1_000


@dataclass(frozen=True, kw_only=True, slots=True)
class _Validation:
    """The validation text, on rank 0; empty on the others."""

    pairs: list[Pair] = field(default_factory=list)
    """Pairs with text on both sides."""
    empty: int = 0
    long_lines: int = 0
    """Number of pairs with a line above `LONGEST_LINE`."""
    held_out: np.ndarray = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    """Numbers of these pairs in the training text, sorted; empty if validation text was given."""


def prepare(
    settings: PrepareSettings, report: Report, *, ranks: MpiRanks | None = None, show_progress: bool = False
) -> DataIndex:
    """Make a data folder.

    Collective: every rank must call it. All ranks must give the same settings; only rank 0 reports.

    After Ctrl-C, a kill or a TransientError, the same call resumes. After another error nothing is left.

    Args:
        report: called with lines about the text that was read, dropped and written.
        ranks: ranks of the launch; None: this process alone.

    Raises:
        UserError: bad text, files or settings; `out` exists or is being prepared. The error is the same on every rank.
    """
    started = time.monotonic()
    ranks = ranks or MpiRanks()
    show_progress &= ranks.is_main

    def say(line: str) -> None:
        if ranks.is_main:
            # It hides the progress bars meanwhile.
            with tqdm.external_write_mode():
                report(line)

    with tempfile.TemporaryDirectory() as scratch:
        settings = ranks.together(lambda: settings.with_toy(Path(scratch)))
        name = ranks.lead(lambda: _checked(settings, say))
        with _shared_work(settings.out, name, ranks, say) as work, WorkerPool(settings.workers or 1) as pool:
            if not ranks.lead(work.whole.exists):
                _make(TaskRunner(work=work, pool=pool, ranks=ranks, show=show_progress), settings, say)
            made = as_kind(DataIndex, ranks.lead(lambda: DataFolder.open(work.whole).index))
    _report_result(made, settings, time.monotonic() - started, say)
    return made


def _checked(settings: PrepareSettings, report: Report) -> str:
    """Make all checks that do not read the whole text, and return the fingerprint of the preparation."""
    refuse_content(settings.out)
    _ = settings.languages
    check_tokenizers(settings, report)
    if settings.segmentations > 1:
        drawn = ["segmentations"] * bool(settings.sampled_sides) + ["changes"] * bool(settings.augment)
        report(
            f"variants: {settings.segmentations} of each training pair, with {' and '.join(drawn)} of its own, so the "
            f"training shards need {settings.segmentations} times the disk of one"
        )
    for source in (*settings.training_sources, *settings.validation_sources):
        # A misspelt name or a wrong column should fail now, not after hours of reading.
        next(source.pairs(), None)
    return fingerprint(settings, CHUNK_PAIRS)


@contextlib.contextmanager
def _shared_work(out: Path, name: str, ranks: MpiRanks, report: Report) -> Iterator[Work]:
    """Yield the work folder, which rank 0 makes, locks and removes for all ranks."""
    with contextlib.ExitStack() as stack:
        work = Work(folder=Path(ranks.lead(lambda: str(stack.enter_context(work_folder(out, name, report)).folder))))
        try:
            yield work
        except (UserError, OSError):
            # Every rank has this error. Rank 0 removes the folder only when no process of another rank writes to it.
            ranks.gather(None)
            raise


def _make(runner: TaskRunner, settings: PrepareSettings, report: Report) -> None:
    """Run all stages, up to a complete data folder in the work folder."""
    work, ranks = runner.work, runner.ranks
    chunks = read_sources(runner, settings, CHUNK_PAIRS, report)
    pairs_read = sum(chunk.pairs for chunk in chunks)
    survey = survey_chunks(runner, settings, chunks, normalizations(settings))
    warn_of_folding(settings, survey, pairs_read, report)
    warn_of_traces(survey.traces, pairs_read, report)
    validation = ranks.together(
        lambda: _validation(work, settings, chunks, survey, report) if ranks.is_main else _Validation()
    )
    held_out = np.array(ranks.lead(validation.held_out.tolist), dtype=np.int64)
    ranks.lead(lambda: make_tokenizer(work, settings, chunks, held_out, report))
    ranks.lead(lambda: write_validation_keys(work, validation.pairs))
    found, tokens, several, changed = encode_chunks(runner, settings, chunks, held_out, report)
    overlap = found["in_validation"]
    dropped = Counter({**found, "in_validation": 0}) if settings.keep_overlap else found
    kept = pairs_read - len(held_out) - dropped.total()
    if kept == 0:
        reasons = ", ".join(f"{count:,} {reason}" for reason, count in dropped.items())
        names = ", ".join(source.name for source in settings.training_sources)
        raise UserError(
            f"no training pair is left of {names} ({reasons} dropped): "
            "check the files, or raise --max-tokens and --max-length-ratio, or pass --keep-overlap"
        )
    repeats = ranks.lead(lambda: count_repeats([chunk.keys(work) for chunk in chunks], kept))
    if settings.drop_repeats:
        several -= ranks.lead(lambda: count_repeats([chunk.several_keys(work) for chunk in chunks], several))
        dropped["repeats"], kept, repeats = repeats, kept - repeats, 0
    counts = {
        "pairs_read": pairs_read,
        "dropped": dict(dropped),
        "overlap": overlap,
        "repeats": repeats,
        "changed": changed,
        "several_sentences": several,
        "aligned": settings.is_aligned,
    }
    infos = write_shards(runner, chunks, kept, tokens, settings.pairs_per_shard, settings.segmentations)
    ranks.lead(lambda: _finish(work, settings, infos, validation, counts, report))


def _validation(
    work: Work, settings: PrepareSettings, chunks: Sequence[Chunk], survey: Survey, report: Report
) -> _Validation:
    if settings.validation_sources:
        return _given_validation(settings, report)
    held_out = survey.held_out()
    if len(held_out) == 0:
        raise UserError(
            "the text has fewer than two pairs with text on both sides, so none can be held out for validation: "
            "check the files, or pass --valid-src and --valid-tgt"
        )
    report(
        f"validation: {len(held_out):,} pairs held out from the training text "
        f"(seed {settings.seed}; at most {settings.valid_pairs:,} and a tenth)"
    )
    pairs: list[Pair] = []
    for chunk in chunks:
        rows = chunk.rows_of(held_out)
        if len(rows):
            pairs += zip(*chunk.texts(work, rows), strict=True)
    return _Validation(pairs=pairs, held_out=held_out)


def _given_validation(settings: PrepareSettings, report: Report) -> _Validation:
    read = [pair for source in settings.validation_sources for pair in source.pairs()]
    rules = normalizations(settings)
    given = [pair for pair in read if pair is not None]
    pairs = [pair for pair in given if not is_empty(*pair, rules)]
    names = ", ".join(source.name for source in settings.validation_sources)
    if not pairs:
        raise UserError(f"the validation text ({names}) has no pair with text on both sides: use other files")
    long_lines = len(read) - len(given)
    also = f" and {long_lines:,} with a line above {LONGEST_LINE:,} bytes" if long_lines else ""
    report(f"validation: {len(read):,} pairs from {names}, {len(given) - len(pairs):,} empty{also} left out")
    sources, targets = map(list, zip(*pairs, strict=True))
    warn_of_traces(count_traces(sources, targets), len(pairs), report, of="validation ")
    return _Validation(pairs=pairs, empty=len(given) - len(pairs), long_lines=long_lines)


def _finish(
    work: Work,
    settings: PrepareSettings,
    infos: Sequence[Sequence[ShardInfo]],
    validation: _Validation,
    counts: dict[str, Any],
    report: Report,
) -> None:
    """Complete the data folder. An interrupted preparation may have written some of its files.

    Args:
        counts: fields of the index that count training pairs.
    """
    tokenizer = load_vocabulary(tokenizer_path(work))
    train = shards.write_split(work.data, _move_shards(work, infos, settings), segmentations=settings.segmentations)
    valid, valid_text, too_long = _write_validation(validation.pairs, work.data, tokenizer, settings)
    if settings.keep_text is not None:
        _copy_text(settings.keep_text, work.data / "text")
    marks = _marks(work.data / train.shards[0].file, tokenizer)
    if settings.validation_sources:
        _warn_of_swapped(validation.pairs, marks, tokenizer, report)
    source_language, target_language = settings.languages
    vocab_size, target_vocab_size = tokenizer.sizes
    index = DataIndex(
        format_version=shards.FORMAT_VERSION,
        corpus=settings.corpus or (settings.training_sources[0].name if settings.text.toy is None else "toy grammar"),
        synthetic=settings.text.toy is not None,
        source_language=source_language,
        target_language=target_language,
        source_tags=settings.tags_with(tokenizer),
        lowercase=tokenizer.target.lowercase,
        tokenizer_sha256=tokenizer.sha256,
        vocab_size=vocab_size,
        target_vocab_size=target_vocab_size,
        sources=tuple(source.name for source in settings.training_sources),
        seed=settings.seed,
        max_tokens=settings.max_tokens,
        max_length_ratio=float(settings.max_length_ratio),
        pairs_per_shard=settings.pairs_per_shard,
        **counts,
        valid_held_out=not settings.validation_sources,
        valid_dropped={
            "empty": validation.empty,
            "too_long": too_long,
            **({LONG_LINE: validation.long_lines} if validation.long_lines else {}),
        },
        valid_text=valid_text,
        train=train,
        valid=valid,
        marks=marks,
    )
    shards.write_index(work.data, index)
    move(work.data, work.whole)


def _marks(shard: Path, vocabulary: Vocabulary) -> LanguageMarks:
    """Find the marks of both languages in one shard, which is a random sample of the pairs.

    They are entries of the sources: text on the wrong side is encoded with these.
    """
    source, target, *_ = shards.read_shard(shard)
    if vocabulary.sizes[1]:
        rows = target.take(np.arange(min(_MARKED_PAIRS, len(target.lengths))))
        ids = [part.tolist() for part in np.split(rows.values, rows.offsets[1:-1])]
        target = words_of(vocabulary, 0).encode([*map(vocabulary.target.decode, ids)])
    sides = (side.values[side.offsets[0] : side.offsets[-1]] for side in (source, target))
    return find_marks(*sides, first_piece=vocabulary.source.first_piece)


def _warn_of_swapped(pairs: Sequence[Pair], marks: LanguageMarks, vocabulary: Vocabulary, report: Report) -> None:
    for side, lines in zip(("source", "target"), zip(*pairs, strict=True), strict=True):
        found = marks.side_of(vocabulary.source.encode_batch(list(lines[:: 1 + len(lines) // _LOOKED_AT])))
        if found not in (side, None):
            report(
                f"warning: the validation {side} text looks like the {found} text of the training: check whether "
                "--valid-src and --valid-tgt, or --src and --tgt, are swapped"
            )


def _copy_text(source: Path, target: Path) -> None:
    """Copy the files of a folder with the rights of new files, because `source` may be a private folder."""
    make_folder(target)
    for file in source.iterdir():
        with whole_path(target / file.name) as copy:
            shutil.copyfile(file, copy)


def _move_shards(work: Work, infos: Sequence[Sequence[ShardInfo]], settings: PrepareSettings) -> list[ShardInfo]:
    """Move the shards to the data folder and number them, one segmentation after the other, without empty ones."""
    moved: list[ShardInfo] = []
    for segmentation in range(settings.segmentations):
        for number, info in enumerate(infos):
            if info:
                name = f"train-{len(moved):05}.arrow"
                if (path := shard_path(work, number, segmentation)).exists():
                    move(path, work.data / name)
                moved.append(dataclasses.replace(info[segmentation], file=name))
    return moved


def _write_validation(
    pairs: Sequence[Pair], folder: Path, tokenizer: Vocabulary, settings: PrepareSettings
) -> tuple[SplitInfo, TextInfo, int]:
    """Write `valid/`: all of the raw text, and shards of the pairs that fit; also return the number that do not."""
    valid = folder / shards.VALID_FOLDER
    make_folder(valid)
    columns: list[list[str]] = [list(side) for side in zip(*pairs, strict=True)] or [[], []]
    hashes = []
    for name, column in zip((shards.VALID_SOURCE_FILE, shards.VALID_TARGET_FILE), columns, strict=True):
        content = "".join(f"{text}\n" for text in column).encode("utf-8")
        write_file(valid / name, content)
        hashes.append(hashlib.sha256(content).hexdigest())
    text, target = (words_of(tokenizer, side).encode(column) for side, column in enumerate(columns))
    shorter, fronts = np.minimum(text.lengths, target.lengths), tokenizer.fronts(settings.tags_with(tokenizer))
    source, target = (side.prefixed(front) for side, front in zip((text, target), fronts, strict=True))
    longer = np.maximum(source.lengths, target.lengths)
    fitting = np.flatnonzero((shorter > 0) & (longer + 1 <= settings.max_tokens))
    if len(fitting) == 0:
        raise UserError(
            f"none of the {len(pairs):,} validation pairs has at most max_tokens {settings.max_tokens} tokens per "
            "side: raise --max-tokens or use other validation text"
        )
    written: list[ShardInfo] = []
    for start in range(0, len(fitting), settings.pairs_per_shard):
        rows = fitting[start : start + settings.pairs_per_shard]
        path = valid / f"valid-{len(written):05}.arrow"
        written.append(shards.write_shard(path, source.take(rows), target.take(rows)))
    split = shards.write_split(valid, written)
    info = TextInfo(pairs=len(pairs), source_sha256=hashes[0], target_sha256=hashes[1])
    return split, info, len(pairs) - len(fitting)


def _report_result(index: DataIndex, settings: PrepareSettings, seconds: float, report: Report) -> None:
    train, valid, out = index.train, index.valid, settings.out
    reasons = ", ".join(f"{count:,} {reason}" for reason, count in index.dropped.items())
    report(
        f"kept: {train.pairs:,} of {index.pairs_read:,} pairs; dropped {reasons} "
        f"(over {index.max_tokens} tokens; ratio over {index.max_length_ratio:g})"
    )
    if index.overlap:
        was = "kept" if index.overlap > index.dropped.get("in_validation", 0) else "left out of training"
        report(f"overlap: {index.overlap:,} training pairs are also validation pairs, {was}")
    if index.repeats:
        share = index.repeats / train.pairs
        report(
            f"duplicates: {index.repeats:,} of the kept pairs repeat another one exactly ({share:.1%}): --drop-repeats "
            "drops them"
        )
    if index.changed is not None:
        changes = ", ".join(f"{count:,} {name}" for name, count in index.changed.items())
        variants = f" in {settings.segmentations} variants" if settings.segmentations > 1 else ""
        before = ", before repeats were dropped" * settings.drop_repeats
        report(
            f"changed{variants}{before}: {changes} (nothing to change, nothing left, or over {index.max_tokens} tokens)"
        )
    for side, tokens in ((index.source_language, train.source_tokens), (index.target_language, train.target_tokens)):
        report(f"tokens: {tokens:,} {side}, {tokens / train.pairs:.1f} per sentence (the special token included)")
    if index.source_tags:
        report(f"tags of every pair: {' '.join(index.source_tags)}")
    report(f"validation shards: {valid.pairs:,} of {index.valid_text.pairs:,} pairs fit; the raw text is kept in full")
    report(f"wrote: {out}, {len(train.shards)} training shard{'s' * (len(train.shards) > 1)}, in {seconds:.1f} s")
    preset, why = preset_for(train.pairs, on_gpu=has_gpu())
    flags: list[object] = ["--preset", preset]
    if settings.tokenizer is not None and (settings.tokenizer.parent / _WEIGHTS_FILE).exists():
        flags = ["--preset", "finetune", "--init-from", settings.tokenizer.parent]
    else:
        report(f"preset: {preset} {why}")
    report(f"next: {as_typed(own_command('train', *flags, '--data', out, '--run-dir', run_folder_for(out)))}")


def run_folder_for(data: Path) -> Path:
    """Return the folder for a first run on a data folder: of the same name, but in `runs`."""
    folder = Path("runs", data.resolve().name)
    return folder.with_name(f"{folder.name}-run") if folder.resolve() == data.resolve() else folder
