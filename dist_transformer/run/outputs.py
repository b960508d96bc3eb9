"""Check of every path that a command writes, before any work.

An output never replaces an input of the same command. Nothing is written into a data or model folder, whose files are
recorded with their hashes, or over the files of a run; a run folder may hold other files, such as scores.
"""

import os
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path

from dist_transformer.base.errors import UserError
from dist_transformer.base.files import require_writable
from dist_transformer.base.paths import require_usable
from dist_transformer.data.folder.format import INDEX_FILE, TOKENIZER_FILE
from dist_transformer.model_folder import CONFIG_FILE, WEIGHTS_FILE
from dist_transformer.run.layout import (
    CHECKPOINTS,
    ENVIRONMENT_FILE,
    LEDGER_FILE,
    METRICS_FILE,
    SETTINGS_FILE,
    WRITTEN_IN_PLACE,
)

# Bytes that are added to a name for files beside it, such as a temporary one.
_ROOM = 50
_LONGEST_NAME = 255 - _ROOM
_OF_A_RUN = (*WRITTEN_IN_PLACE, SETTINGS_FILE, ENVIRONMENT_FILE, TOKENIZER_FILE)

Input = Path | str | None
"""A file, a folder or a URL; None: not given."""


def claim_file(out: Path | None, flag: str, inputs: Iterable[Input], *, beside: Iterable[Path] = ()) -> None:
    """Check that a command may write a file.

    Args:
        out: None: the flag was not given.
        inputs: everything that the command reads.
        beside: files that are written together with it.

    Raises:
        UserError: it may not, or the file cannot be written; the message names `flag` and the path.
    """
    if out is None:
        return
    claim_folder(out, flag, inputs, beside=beside)
    require_writable(out)


def claim_folder(out: Path | None, flag: str, inputs: Iterable[Input], *, beside: Iterable[Path] = ()) -> None:
    """Check that a command may make a folder, as `claim_file` does for a file."""
    if out is None:
        return
    read = [Path(each) for each in inputs if each is not None]
    for path in (out, *beside):
        require_usable(path)
        if len(os.fsencode(path.name)) > _LONGEST_NAME:
            raise UserError(
                f"the name {path.name[:40]}… of {flag} has more than {_LONGEST_NAME} bytes, and files next to it need "
                "longer names: shorten it"
            )
        if any(_is_same(path, each) for each in read):
            raise UserError(f"{flag} {path} is also an input of this command: choose another name")
        _refuse_inside(path, flag)


def _is_same(out: Path, read: Path) -> bool:
    """Return whether two paths lead to one file, or `out` to a file of the folder `read`."""
    try:
        found = out.stat()
    except OSError:
        return os.path.realpath(out) == os.path.realpath(read)
    if not (stat.S_ISREG(found.st_mode) or stat.S_ISDIR(found.st_mode)):
        # A pipe or a device, such as /dev/null, is not replaced.
        return False
    # Only another name of a file in a folder needs a look at all of them.
    files = read.rglob("*") if stat.S_ISREG(found.st_mode) and found.st_nlink > 1 and read.is_dir() else ()
    return any(each.exists() and os.path.samestat(found, each.stat()) for each in (read, *files))


def _refuse_inside(out: Path, flag: str) -> None:
    # The link is replaced, not its target; but who gives it may expect otherwise.
    for place in {Path(os.path.realpath(out.parent)) / out.name, Path(os.path.realpath(out))}:
        for folder in place.parents:
            if (kind := _kind(folder)) is None:
                continue
            if kind == "run" and place.relative_to(folder).parts[0] not in _OF_A_RUN:
                break
            raise UserError(
                f"{flag} {out} would be written "
                + (f"over files of the run {folder}" if kind == "run" else f"into the {kind} folder {folder}")
                + ": choose another place"
            )


def _kind(folder: Path) -> str | None:
    """Recognise a folder of this project by its files."""

    def has(*names: str) -> Iterator[bool]:
        return (os.path.lexists(folder / name) for name in names)

    if all(has(INDEX_FILE, TOKENIZER_FILE)):
        return "data"
    if all(has(CONFIG_FILE, WEIGHTS_FILE)):
        return "model"
    return "run" if any(has(CHECKPOINTS, LEDGER_FILE, METRICS_FILE)) else None
