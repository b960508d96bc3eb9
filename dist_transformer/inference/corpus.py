"""Translation of files of any size into one file, on any number of ranks; a killed translation resumes.

    OUT.parts/manifest.json    inputs, model and settings of the translation
    OUT.parts/000000 …         translations of each chunk, a fixed number of input lines
    OUT.parts/lock             held by rank 0 while it runs
    OUT.parts/failed           a rank has failed, so the others stop
    OUT.parts/whole            all chunks in one file, which is renamed to OUT
    OUT.parts/complete         `whole` is complete, under this name or as OUT

The chunks do not depend on the number of ranks, and batches are formed within a chunk, so the output does not depend on
it either. Every rank reads the inputs and translates its own chunks. Ranks exchange no text, and each of them holds one
chunk in memory.
"""

import contextlib
import itertools
import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dist_transformer.base.errors import UserError
from dist_transformer.base.files import (
    make_folder,
    move,
    open_regular,
    remove,
    remove_tree,
    remove_unfinished,
    sha256_of,
    whole_path,
    write_file,
)
from dist_transformer.base.locks import exclusive
from dist_transformer.config.plain import read_json
from dist_transformer.data.text.files import read_lines
from dist_transformer.inference.translator import Translation
from dist_transformer.model_folder import CONFIG_FILE, TOKENIZER_FILE, WEIGHTS_FILE
from dist_transformer.runtime.distributed import broadcast_object, on_all_ranks, rank, world_size
from dist_transformer.version import __version__

_MANIFEST, _LOCK, _FAILED, _WHOLE, _COMPLETE = "manifest.json", "lock", "failed", "whole", "complete"
_COMPRESSED = (".gz", ".xz", ".bz2")
_SECONDS_BETWEEN_REPORTS = 30.0


@dataclass(frozen=True, kw_only=True, slots=True)
class CorpusJob:
    """Inputs, output and settings of a translation."""

    model: Path
    inputs: Sequence[Path]
    """Text files, plain or compressed, one after the other."""
    output: Path
    chunk_lines: int
    """Input lines that a rank translates and keeps at a time."""
    settings: dict[str, Any]
    """Settings that may change the output: JSON values by flag."""

    def __post_init__(self) -> None:
        if self.output.suffix in _COMPRESSED:
            raise UserError(f"{self.output} would hold plain text: give a name without {self.output.suffix}")

    @property
    def parts(self) -> Path:
        return self.output.with_name(f"{self.output.name}.parts")

    def part(self, chunk: int) -> Path:
        return self.parts / f"{chunk:06d}"


@dataclass(frozen=True, kw_only=True, slots=True)
class _Start:
    """State at the start, equal on all ranks."""

    lines: int
    """Lines of all inputs."""
    sizes: tuple[int, ...]
    """Lines of each chunk."""
    finished: frozenset[int]
    """Chunks that an earlier start translated."""


def translate_corpus(
    job: CorpusJob,
    translate: Callable[[list[str], int], Sequence[Translation]],
    text_of: Callable[[int, Translation], str],
) -> None:
    """Translate the inputs into the output.

    Collective: every rank must call it.

    Args:
        job: the same on every rank.
        translate: returns the translations of lines; its second argument is the number of the first line, from 0.
        text_of: formats the translation of a line; its first argument is the number of the line, from 0.

    Raises:
        UserError: the output exists, was started with other inputs or settings, or is being written; an input is
            unfit; a rank cannot translate or write. The error is the same on every rank.
    """
    with contextlib.ExitStack() as held:
        start = broadcast_object(on_all_ranks(lambda: _begin(job, held) if rank() == 0 else None))
        if start is None:
            return
        began = time.monotonic()
        on_all_ranks(lambda: _translate_share(job, start, translate, text_of))
        on_all_ranks(lambda: _finish(job, start) if rank() == 0 else None)
        if rank() == 0:
            left = start.lines - sum(start.sizes[chunk] for chunk in start.finished)
            speed = left / max(time.monotonic() - began, 1e-9)
            _report(f"{job.output}: {start.lines:,} lines, {left:,} of them in this start, {speed:,.1f} lines/s")


def _begin(job: CorpusJob, held: contextlib.ExitStack) -> _Start | None:
    """Lock the folder of parts and find the finished chunks. Return None if the output is complete.

    Args:
        held: receives the lock of the folder.
    """
    if not job.parts.exists():
        _refuse_existing(job)
    # All lines are read before anything is written and before hours of work, because the last one may not be UTF-8.
    lines = sum(1 for _ in _lines(job))
    with _explained(job):
        _lock(job, held)
        if (job.parts / _COMPLETE).exists() and job.output.exists() and not (job.parts / _WHOLE).exists():
            # An earlier start was killed between its last two steps.
            remove_tree(job.parts)
            _report(f"{job.output} is complete")
            return None
        # Another command may have written the output since the first check.
        _refuse_existing(job)
        identity = _identity(job, lines)
        if (job.parts / _MANIFEST).exists():
            _require_same(job, read_json(job.parts / _MANIFEST), identity)
        remove_unfinished(job.parts)
        remove(job.parts / _FAILED)
        write_file(job.parts / _MANIFEST, json.dumps(identity, indent=1, ensure_ascii=False) + "\n")
        sizes = [min(job.chunk_lines, lines - first) for first in range(0, lines, job.chunk_lines)]
        finished = _finished(job)
    if finished:
        _report(f"resumes {job.output}: {sum(sizes[chunk] for chunk in finished):,} of {lines:,} lines are done")
    return _Start(lines=lines, sizes=tuple(sizes), finished=finished)


def _lock(job: CorpusJob, held: contextlib.ExitStack) -> None:
    if job.parts.is_symlink():
        raise UserError(f"{job.parts} is a link: choose another --output, or remove it")
    make_folder(job.parts)
    names = {path.name for path in job.parts.iterdir()}
    if _MANIFEST not in names and names - {_LOCK} and not all(name.startswith(".") for name in names - {_LOCK}):
        raise UserError(f"{job.parts} holds files that are not of a translation: choose another --output, or remove it")
    try:
        held.enter_context(exclusive(job.parts / _LOCK, wait=False))
    except BlockingIOError:
        raise UserError(
            f"{job.output} is being written by another command: wait for its end, or choose another --output"
        ) from None


def _refuse_existing(job: CorpusJob) -> None:
    if os.path.lexists(job.output):
        raise UserError(f"{job.output} exists already: choose another --output, or remove it first")


def _identity(job: CorpusJob, lines: int) -> dict[str, Any]:
    """Describe everything that determines the output, as JSON values."""
    status = [(os.path.abspath(path), path.stat()) for path in job.inputs]
    return {
        "version": __version__,
        "model": {name: sha256_of(job.model / name) for name in (CONFIG_FILE, TOKENIZER_FILE, WEIGHTS_FILE)},
        "inputs": [[path, found.st_size, found.st_mtime_ns] for path, found in status],
        "lines": lines,
        "settings": {**job.settings, "--chunk-lines": job.chunk_lines},
    }


def _require_same(job: CorpusJob, before: dict[str, Any], now: dict[str, Any]) -> None:
    """Compare the manifest with the job.

    Raises:
        UserError: they differ; the message names each difference.
    """
    other = []
    if before["version"] != now["version"]:
        other.append(f"by version {before['version']}, not {now['version']}")
    if before["model"] != now["model"]:
        other.append("with another model")
    if before["inputs"] != now["inputs"] or before["lines"] != now["lines"]:
        other.append("with other inputs, or with these before they changed")
    flags = [*before["settings"], *(flag for flag in now["settings"] if flag not in before["settings"])]
    for flag in flags:
        was, is_now = before["settings"].get(flag), now["settings"].get(flag)
        if was != is_now:
            other.append(_difference(flag, was, is_now))
    if other:
        raise UserError(
            f"{job.parts} was started {' and '.join(other)}: give what it was started with to resume it, or remove "
            "that folder to start again"
        )


def _difference(flag: str, was: Any, is_now: Any) -> str:
    if was is None or was is False:
        return f"without {flag}"
    value = "" if was is True else f" {was}"
    return f"with {flag}{value}" + ("" if is_now is None or is_now is False else f", not {is_now}")


def _translate_share(
    job: CorpusJob,
    start: _Start,
    translate: Callable[[list[str], int], Sequence[Translation]],
    text_of: Callable[[int, Translation], str],
) -> None:
    """Translate and write this rank's share of the missing chunks: every n-th of them on n ranks."""
    try:
        with _explained(job):
            for chunk, lines in _share(job, start):
                if (job.parts / _FAILED).exists():
                    # The failed rank reports the error.
                    return
                first = chunk * job.chunk_lines
                translations = translate(lines, first)
                text = "".join(text_of(number, one) for number, one in enumerate(translations, first))
                write_file(job.part(chunk), text)
    except UserError:
        with contextlib.suppress(OSError):
            write_file(job.parts / _FAILED, "")
        raise


def _share(job: CorpusJob, start: _Start) -> Iterator[tuple[int, list[str]]]:
    """Yield the number and lines of each chunk of this rank. Report the progress of all ranks in between."""
    lines, left, began = _lines(job), itertools.count(), time.monotonic()
    reported = began
    for chunk, size in enumerate(start.sizes):
        held = list(itertools.islice(lines, size))
        if len(held) < size:
            raise UserError(f"the inputs of {job.output} have changed meanwhile: remove {job.parts} and start again")
        if chunk in start.finished or next(left) % world_size() != rank():
            continue
        yield chunk, held
        if rank() == 0 and time.monotonic() - reported > _SECONDS_BETWEEN_REPORTS:
            reported = time.monotonic()
            there = _finished(job)
            new = sum(start.sizes[one] for one in there - start.finished)
            _report(
                f"{sum(start.sizes[one] for one in there):,} of {start.lines:,} lines, "
                f"{new / (reported - began):,.1f} lines/s"
            )


def _finish(job: CorpusJob, start: _Start) -> None:
    with _explained(job):
        with whole_path(job.parts / _WHOLE) as beside, beside.open("wb") as whole:
            for chunk in range(len(start.sizes)):
                with open_regular(job.part(chunk)) as part:
                    shutil.copyfileobj(part, whole)
        write_file(job.parts / _COMPLETE, "")
        _refuse_existing(job)
        move(job.parts / _WHOLE, job.output)
        remove_tree(job.parts)


def _lines(job: CorpusJob) -> Iterable[str]:
    return itertools.chain.from_iterable(map(read_lines, job.inputs))


def _finished(job: CorpusJob) -> frozenset[int]:
    return frozenset(int(path.name) for path in job.parts.iterdir() if path.name.isdecimal())


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
    print(text, file=sys.stderr, flush=True)
