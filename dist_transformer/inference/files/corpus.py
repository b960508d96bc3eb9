"""Translation of files of any size into one file, on any number of ranks; a killed translation resumes.

    OUT.parts/manifest.json    SHA-256 of model and inputs, and settings of the translation
    OUT.parts/000000 …         sealed translations of each chunk, a fixed number of input lines (see parts.py)
    OUT.parts/lock             held by rank 0 while it runs
    OUT.parts/failed           a rank has failed, so the others stop
    OUT.parts/complete         SHA-256 of the translation and of OUT, which is complete

The chunks do not depend on the number of ranks, and batches are formed within a chunk, so the output does not depend on
it either. Every rank reads the inputs and translates its own chunks. Ranks exchange no text, and each of them holds one
chunk in memory.

A part is used only with its seal, and inputs that change before they are translated end the translation without an
output. The other ranks write no file but parts, so a rank of a translation that has lost the folder does no harm.
"""

import contextlib
import hashlib
import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

from dist_transformer.base.errors import UserError, logger
from dist_transformer.base.files import (
    make_folder,
    remove,
    remove_tree,
    remove_unfinished,
    sha256_of,
    whole_path,
    write_file,
)
from dist_transformer.base.messages import as_kind
from dist_transformer.base.sole_writer import LOCK_FILE, PATIENCE_SECONDS, Fence, Words, sole_writer, unfenced
from dist_transformer.data.text.lines import read_lines
from dist_transformer.inference.files.parts import (
    MANIFEST_FILE,
    Part,
    Source,
    describe_chunk,
    in_chunks,
    manifest_of,
    parts_of,
    read_source,
    refuse_existing,
    require_free,
    require_same,
)
from dist_transformer.inference.translation import Translation
from dist_transformer.runtime.distributed import broadcast_object, by_main, on_all_ranks, rank, world_size

_FAILED, _COMPLETE = "failed", "complete"
_SECONDS_BETWEEN_REPORTS = 30.0
Translate = Callable[[Sequence[Sequence[str]], int], Sequence[Translation]]


@dataclass(frozen=True, kw_only=True, slots=True)
class CorpusJob:
    """Inputs, output and settings of a translation."""

    models: Sequence[Path]
    """Model folder, or those of an ensemble."""
    inputs: Sequence[Path]
    """Text files, plain or compressed, one after the other."""
    output: Path
    chunk_lines: int
    """Input lines that a rank translates and keeps at a time."""
    settings: dict[str, Any]
    """Settings that may change the output: JSON values by flag."""
    beside: Mapping[str, Path] = field(default_factory=dict)
    """Text files with a line for each input line, by the flags that name them."""

    @property
    def parts(self) -> Path:
        return parts_of(self.output)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Start:
    """State at the start, equal on all ranks."""

    folder: Path
    source: Source
    translation: str
    """SHA-256 of everything that determines the output."""
    finished: frozenset[int] = frozenset()
    """Chunks that an earlier start translated."""

    def part(self, chunk: int) -> Part:
        return Part(
            path=self.folder / f"{chunk:06d}",
            translation=self.translation,
            number=chunk,
            source_sha256=self.source.chunks[chunk][1],
        )

    def lines_of(self, chunks: Iterable[int]) -> int:
        return sum(self.source.chunks[chunk][0] for chunk in chunks)

    def present(self) -> frozenset[int]:
        """Find the chunks that have a part, sound or not."""
        names = {path.name for path in self.folder.iterdir()}
        return frozenset(chunk for chunk in range(len(self.source.chunks)) if self.part(chunk).path.name in names)


def translate_corpus(
    job: CorpusJob,
    translate: Translate,
    text_of: Callable[[int, Translation], str],
) -> None:
    """Translate the inputs into the output.

    Collective: every rank must call it.

    Args:
        job: the same on every rank.
        translate: returns the translations of rows: a line, and those of the files beside the inputs; its second
            argument is the number of the first line, from 0.
        text_of: formats the translation of a line; its first argument is the number of the line, from 0.

    Raises:
        UserError: the output exists, was started with other inputs or settings, or is being written; an input is
            unfit or has changed; a rank cannot translate or write. The error is the same on every rank.
    """
    with contextlib.ExitStack() as held:
        begun, fence = by_main(lambda: _begin(job, held)) or (None, unfenced)
        plain = broadcast_object(begun)
        if plain is None:
            return
        start = as_kind(_Start, plain)
        began = time.monotonic()
        on_all_ranks(lambda: _translate_share(job, start, translate, text_of, fence))
        by_main(lambda: _finish(job, start, fence))
        if rank() == 0:
            left = start.source.lines - start.lines_of(start.finished)
            speed = left / max(time.monotonic() - began, 1e-9)
            _report(f"{job.output}: {start.source.lines:,} lines, {left:,} of them in this start, {speed:,.1f} lines/s")


def _begin(job: CorpusJob, held: contextlib.ExitStack) -> tuple[_Start | None, Fence]:
    """Lock the folder of parts and find the finished chunks; None instead of a start if the output is complete.

    Args:
        held: receives the lock of the folder.
    """
    require_free(job.output)
    # All lines are read before anything is written and before hours of work, because the last one may not be UTF-8.
    source = read_source(_lines(job), job.chunk_lines)
    with _explained(job):
        fence = _lock(job, held)
        manifest = manifest_of(job.models, source, {**job.settings, "--chunk-lines": job.chunk_lines})
        require_same(job.parts, manifest)
        start = _Start(folder=job.parts, source=source, translation=hashlib.sha256(manifest).hexdigest())
        if _is_complete(job, start):
            # An earlier start was killed between its last two steps.
            _remove_parts(job, fence)
            _report(f"{job.output} is complete")
            return None, fence
        # Another command may have written the output since the first check.
        refuse_existing(job.output)
        remove_unfinished(job.parts)
        remove_unfinished(job.output.parent, job.output.name)
        remove(job.parts / _FAILED)
        fence()
        write_file(job.parts / MANIFEST_FILE, manifest)
        start = _with_finished(start)
    if start.finished:
        _report(f"resumes {job.output}: {start.lines_of(start.finished):,} of {source.lines:,} lines are done")
    return start, fence


def _lock(job: CorpusJob, held: contextlib.ExitStack) -> Fence:
    make_folder(job.parts)
    names = {path.name for path in job.parts.iterdir()} - {LOCK_FILE, _COMPLETE}
    if MANIFEST_FILE not in names and not all(name.startswith(".") for name in names):
        raise UserError(f"{job.parts} holds files that are not of a translation: choose another --output, or remove it")
    words = Words(
        in_use=lambda holder: (
            f"{job.output} is being written by {holder}: wait for its end, or choose another --output"
        ),
        lost=(
            f"lost the lock on {job.parts}, whose lock file was removed or replaced; another translation may use the "
            f"folder, so nothing more is written: rerun this command when no other one writes {job.output}"
        ),
        unlocked=f"make sure that no other command writes {job.output}",
    )
    return held.enter_context(sole_writer(job.parts, words, logger.warning, patience=PATIENCE_SECONDS))


def _with_finished(start: _Start) -> _Start:
    """Find the parts that are sound, and report those that are not."""
    present = start.present()
    finished = frozenset(chunk for chunk in present if start.part(chunk).copy())
    if damaged := sorted(present - finished):
        names = ", ".join(start.part(chunk).path.name for chunk in damaged[:3]) + (", …" if damaged[3:] else "")
        logger.warning(f"{len(damaged)} parts in {start.folder} are damaged and are translated again: {names}")
    return replace(start, finished=finished)


def _is_complete(job: CorpusJob, start: _Start) -> bool:
    """Decide whether the output is what a start of this translation has written."""
    file = job.parts / _COMPLETE
    return file.exists() and job.output.is_file() and file.read_bytes() == _completion(start, job.output)


def _completion(start: _Start, whole: Path) -> bytes:
    return f"{start.translation} {sha256_of(whole)}\n".encode()


def _remove_parts(job: CorpusJob, fence: Fence) -> None:
    """Remove the folder of parts. Until its end, it states that the output is complete."""
    fence()
    for path in job.parts.iterdir():
        if path.name != _COMPLETE:
            remove_tree(path)
    remove_tree(job.parts)


def _translate_share(
    job: CorpusJob,
    start: _Start,
    translate: Translate,
    text_of: Callable[[int, Translation], str],
    fence: Fence,
) -> None:
    """Translate and write this rank's share of the missing chunks: every n-th of them on n ranks."""
    try:
        with _explained(job):
            for chunk, lines in _share(job, start):
                if (job.parts / _FAILED).exists():
                    # The failed rank reports the error.
                    return
                first = chunk * job.chunk_lines
                found = translate([line.split("\n") for line in lines], first)
                numbered = zip(range(first, first + len(lines)), found, strict=True)
                start.part(chunk).write((text_of(number, one) for number, one in numbered), fence)
    except Exception:
        with contextlib.suppress(OSError, UserError):
            fence()
            write_file(job.parts / _FAILED, "")
        raise


def _share(job: CorpusJob, start: _Start) -> Iterator[tuple[int, list[str]]]:
    """Yield the number and lines of each chunk of this rank. Report the progress of all ranks in between."""
    left, began = itertools.count(), time.monotonic()
    reported = began
    chunks = itertools.zip_longest(start.source.chunks, in_chunks(_lines(job), job.chunk_lines), fillvalue=None)
    for chunk, (stated, lines) in enumerate(chunks):
        if stated is None or lines is None:
            raise _changed(job)
        if chunk in start.finished or next(left) % world_size() != rank():
            continue
        if stated != describe_chunk(lines):
            raise _changed(job)
        yield chunk, lines
        if rank() == 0 and time.monotonic() - reported > _SECONDS_BETWEEN_REPORTS:
            reported = time.monotonic()
            there = start.present()
            new = start.lines_of(there - start.finished)
            _report(
                f"{start.lines_of(there):,} of {start.source.lines:,} lines, {new / (reported - began):,.1f} lines/s"
            )


def _changed(job: CorpusJob) -> UserError:
    return UserError(
        f"the inputs of {job.output} have changed while they were translated: restore them and rerun the same command, "
        f"or remove {job.parts} to translate them as they are now"
    )


def _finish(job: CorpusJob, start: _Start, fence: Fence) -> None:
    """Join the parts to the output, if they are what they must be."""
    with _explained(job):
        with whole_path(job.output) as beside:
            with beside.open("wb") as whole:
                for chunk in range(len(start.source.chunks)):
                    if not start.part(chunk).copy(whole):
                        raise UserError(
                            f"{start.part(chunk).path} was changed or removed by another program: rerun the same "
                            "command to translate it again"
                        )
            fence()
            write_file(job.parts / _COMPLETE, _completion(start, beside))
            refuse_existing(job.output)
        _remove_parts(job, fence)


def _lines(job: CorpusJob) -> Iterable[str]:
    """Read the lines of all inputs, each with its lines of other files after line ends."""
    lines = itertools.chain.from_iterable(map(read_lines, job.inputs))
    return map("\n".join, aligned(lines, job.beside)) if job.beside else lines


def aligned(lines: Iterable[str], files: Mapping[str, Path]) -> Iterator[tuple[str, ...]]:
    """Yield each line with that of every file.

    Args:
        files: text files by the flags that name them.

    Raises:
        UserError: a file has fewer or more lines.
    """
    absent = object()
    sides = (lines, *map(read_lines, files.values()))
    for number, row in enumerate(itertools.zip_longest(*sides, fillvalue=absent)):
        for (flag, file), side in zip(files.items(), row[1:], strict=True):
            if (side is absent) != (row[0] is absent):
                shorter, longer = ("the input", file) if row[0] is absent else (file, "the input")
                raise UserError(
                    f"{flag} must have one line for each input line, which may be empty; {shorter} ends after "
                    f"{number:,} lines, and {longer} has more"
                )
        yield cast(tuple[str, ...], row)


@contextlib.contextmanager
def _explained(job: CorpusJob) -> Iterator[None]:
    """Turn an OSError into a UserError with a remedy."""
    try:
        yield
    except OSError as error:
        raise UserError(
            f"{job.output} cannot be written ({error.strerror or error}): check the place, its rights, its free space, "
            "and that all nodes see it; the same command then resumes"
        ) from None


def _report(text: str) -> None:
    # `translate` keeps standard output for translations.
    logger.info(text, extra={"stream": "stderr"})
