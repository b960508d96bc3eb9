"""Large text files are cut at line ends, so that several processes read one file at the same time.

A first pass counts the line ends of each block. It shows where any line begins, and whether two files have the same
number of lines. Compressed files and Parquet are read by one process each.
"""

import dataclasses
import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from dist_transformer.base.errors import UserError
from dist_transformer.data.prepare.tasks import TaskRunner
from dist_transformer.data.prepare.worker_pool import Progress
from dist_transformer.data.text.compressed import is_compressed
from dist_transformer.data.text.lines import Span
from dist_transformer.data.text.pairs import JsonlFile, LineFiles, PairSource, TsvFile, unequal_lines

# Bytes of a part, which a process reads in seconds.
PART_BYTES = 2**27
# Bytes of a block, of which a part skips at most one.
BLOCK_BYTES = 2**22


@dataclass(frozen=True, kw_only=True, slots=True)
class _Lines:
    """Line ends of a file."""

    before_B: np.ndarray
    """Number of line ends before each block."""
    count: int
    """Number of lines; the last one need not end."""

    def span(self, first: int, stop: int) -> Span:
        """Find the lines from `first` up to `stop`."""
        # Line `first` begins behind a line end in this block, or at the start of the file.
        block = max(0, int(np.searchsorted(self.before_B, first)) - 1)
        skipped = first - int(self.before_B[block])
        return Span(first=first, count=stop - first, place=block * BLOCK_BYTES, skipped=skipped)


def split_sources(runner: TaskRunner, sources: Sequence[PairSource]) -> list[tuple[int, PairSource]]:
    """Cut each source whose files are larger than a part; return all parts in order, with their source's number.

    Collective: every rank must call it.

    Raises:
        UserError: two files differ in their number of lines.
    """
    sizes = {number: found for number, source in enumerate(sources) if (found := _sizes(source))}
    lines = _count(runner, sources, sizes)
    parts: list[tuple[int, PairSource]] = []
    for number, source in enumerate(sources):
        if number not in sizes:
            parts.append((number, source))
            continue
        files = source.files()
        first, *others = (lines[number, side] for side in range(len(files)))
        for file, other in zip(files[1:], others, strict=True):
            if other.count != first.count:
                raise unequal_lines(files[0], first.count, file, other.count)
        pieces = -(-max(sizes[number]) // PART_BYTES)
        for start, stop in itertools.pairwise(first.count * piece // pieces for piece in range(pieces + 1)):
            spans = tuple(side.span(start, stop) for side in (first, *others))
            assert isinstance(source, LineFiles | TsvFile | JsonlFile)
            parts.append((number, dataclasses.replace(source, spans=spans)))
    return parts


def _sizes(source: PairSource) -> tuple[int, ...] | None:
    """Return the sizes of a source's files if it is to be cut."""
    if not isinstance(source, LineFiles | TsvFile | JsonlFile) or any(map(is_compressed, source.files())):
        return None
    sizes = tuple(file.stat().st_size if file.is_file() else 0 for file in source.files())
    return sizes if max(sizes) > PART_BYTES else None


def _count(
    runner: TaskRunner, sources: Sequence[PairSource], sizes: dict[int, tuple[int, ...]]
) -> dict[tuple[int, int], _Lines]:
    """Count the lines of each file of the sources to be cut: {(source, side): lines}."""
    # A task ends where a block ends.
    step = max(1, PART_BYTES // BLOCK_BYTES) * BLOCK_BYTES
    tasks, keys, work_sizes = {}, [], []
    for number, found in sizes.items():
        for side, (path, size) in enumerate(zip(sources[number].files(), found, strict=True)):
            for start in range(0, size, step):
                span = range(start, min(start + step, size), BLOCK_BYTES)
                tasks[f"count-{number:05}-{side}-{start // step:05}"] = functools.partial(_count_line_ends, path, span)
                keys.append((number, side))
                work_sizes.append(span.stop - start)
    blocks: dict[tuple[int, int], list[int]] = {
        (number, side): [] for number, found in sizes.items() for side in range(len(found))
    }
    for key, counts in zip(keys, runner.results("count", tasks, unit="byte", sizes=work_sizes), strict=True):
        blocks[key] += counts
    return {(number, side): _lines(sources[number].files()[side], found) for (number, side), found in blocks.items()}


def _count_line_ends(path: Path, span: range, progress: Progress) -> list[int]:
    """Count the line ends of each block between two bytes of a file."""
    counts = []
    try:
        with path.open("rb") as file:
            file.seek(span.start)
            for place in span:
                block = file.read(min(span.step, span.stop - place))
                counts.append(block.count(b"\n"))
                progress(len(block))
    except OSError as error:
        reason = error.strerror or error
        raise UserError(f"{path} cannot be read ({reason}): check the file and its rights") from None
    return counts


def _lines(path: Path, counts: list[int]) -> _Lines:
    ends = np.cumsum([0, *counts])
    return _Lines(before_B=ends[:-1], count=int(ends[-1]) + _has_open_end(path))


def _has_open_end(path: Path) -> bool:
    """Return whether the last line lacks its line end."""
    with path.open("rb") as file:
        if file.seek(0, 2) == 0:
            return False
        file.seek(-1, 2)
        return file.read(1) != b"\n"
