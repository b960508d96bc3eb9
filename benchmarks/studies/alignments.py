"""Measure alignments: the error rate (AER, Och and Ney 2003) of a model's alignments of given translations.

python tools/alignments.py --model MODEL --src F --tgt F --links GOLD [--out FILE]

GOLD has the right pairs of words of each line, in Pharaoh's format, and all of them count as sure. Prints JSON with
`aer`, 1 - 2 |found and right| / (|found| + |right|), `precision`, `recall`, and how many lines and pairs were found.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.measure import read_flags
from dist_transformer import load
from dist_transformer.base.files import write_file
from dist_transformer.data.text.lines import read_lines


@dataclass(frozen=True, kw_only=True, slots=True)
class Flags:
    """Model and text."""

    model: tuple[Path, ...]
    """Model folder, or those of an ensemble."""
    src: Path
    """Sources."""
    tgt: Path
    """Their translations."""
    links: Path
    """Right alignments."""
    out: Path | None = None
    """File for those that are found."""


def error_rate(found: Sequence[str], right: Sequence[str]) -> dict[str, float]:
    """Compare alignments line by line."""
    sides = [[{*line.split()} for line in lines] for lines in (found, right)]
    sizes = [sum(map(len, side)) for side in sides]
    both = sum(len(one & other) for one, other in zip(*sides, strict=True))
    aer = 1 - 2 * both / sum(sizes)
    return {"aer": aer, "precision": both / sizes[0], "recall": both / sizes[1], "lines": len(found), "pairs": sizes[0]}


def main() -> None:
    flags = read_flags(Flags)
    src, tgt, right = (list(read_lines(path)) for path in (flags.src, flags.tgt, flags.links))
    found = [each.words for each in load(flags.model).align(src, tgt)]
    if flags.out is not None:
        write_file(flags.out, "".join(f"{line}\n" for line in found))
    print(json.dumps({name: round(value, 4) for name, value in error_rate(found, right).items()}))
