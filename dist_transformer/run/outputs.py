"""Check of every path that a command writes, before any work.

An output never replaces an input of the same command. Nothing is written into a data or model folder, whose files are
recorded with their hashes, or over the files of a run; a run folder may hold other files, such as scores.
"""

from collections.abc import Iterable
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

_OF_A_RUN = (*WRITTEN_IN_PLACE, SETTINGS_FILE, ENVIRONMENT_FILE, TOKENIZER_FILE)

_RECOGNISED = (INDEX_FILE, TOKENIZER_FILE, CONFIG_FILE, WEIGHTS_FILE, CHECKPOINTS, LEDGER_FILE, METRICS_FILE)

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
        if any(_is_same(path, each) for each in read):
            raise UserError(f"{flag} {path} is also an input of this command: choose another name")
        _refuse_inside(path, flag)


def _is_same(out: Path, read: Path) -> bool:
    # A pipe or a device, such as /dev/null, is not replaced.
    return (out.is_file() or out.is_dir()) and read.exists() and out.samefile(read)


def _refuse_inside(out: Path, flag: str) -> None:
    place = out.parent.resolve() / out.name
    for folder in place.parents:
        if (kind := _kind(folder)) is None:
            continue
        if kind == "run" and place.relative_to(folder).parts[0] not in _OF_A_RUN:
            return
        raise UserError(
            f"{flag} {out} would be written "
            + (f"over files of the run {folder}" if kind == "run" else f"into the {kind} folder {folder}")
            + ": choose another place"
        )


def _kind(folder: Path) -> str | None:
    """Recognise a folder of this project by its files."""
    names = {name for name in _RECOGNISED if (folder / name).exists()}
    if {INDEX_FILE, TOKENIZER_FILE} <= names:
        return "data"
    if {CONFIG_FILE, WEIGHTS_FILE} <= names:
        return "model"
    return "run" if names & {CHECKPOINTS, LEDGER_FILE, METRICS_FILE} else None
