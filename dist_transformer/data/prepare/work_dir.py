"""The work folder of a preparation: hidden next to the result, locked, and found again by the same command.

    .NAME.partial/lock            held by the only running preparation of NAME
    .NAME.partial/FINGERPRINT/    files of one preparation; other text or settings have another fingerprint
        results/                  result of each finished task, as JSON
        data/                     becomes NAME
    .NAME.partial/FINGERPRINT.data/    `data`, complete; the folder of its intermediate files is then removed

Files are written under another name and renamed, so every existing file is complete. The processes of a killed
preparation may live a moment longer. They write the same files as the next preparation, or into an unused
folder.
"""

import contextlib
import dataclasses
import hashlib
import itertools
import json
import os
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import sentencepiece
import tokenizers

from dist_transformer.base.errors import TransientError, UserError
from dist_transformer.base.files import (
    make_folder,
    move,
    refuse_content,
    remove_tree,
    remove_unfinished,
    sha256_of,
    write_file,
)
from dist_transformer.base.locks import exclusive
from dist_transformer.data.prepare.settings import PrepareSettings
from dist_transformer.data.text.pairs import PairSource
from dist_transformer.version import __version__

# To be increased when the files of the work folder change their meaning.
_LAYOUT = 7
# Settings that do not affect the result (where to write, how to work), and files, which are identified separately.
_TOKENIZERS = {"tokenizer", "source_tokenizer", "target_tokenizer"}
_NOT_IN_FINGERPRINT = {"out", "workers", "keep_text", "text", "sources", "validation", "terms", *_TOKENIZERS}


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """Folder of one preparation; a plain value, so that it can be sent to other processes."""

    folder: Path

    @property
    def data(self) -> Path:
        return self.folder / "data"

    @property
    def whole(self) -> Path:
        return self.folder.with_name(f"{self.folder.name}.data")

    def result(self, name: str) -> Any:
        """Return the result of the task of that name; None if it is not done."""
        try:
            return json.loads((self.folder / "results" / f"{name}.json").read_bytes())
        except (FileNotFoundError, ValueError):
            return None

    def keep_result(self, name: str, value: Any) -> None:
        """Record the result of a finished task; its files must be on disk already."""
        write_file(self.folder / "results" / f"{name}.json", json.dumps(value))


def fingerprint(settings: PrepareSettings, chunk_pairs: int) -> str:
    """Hash everything that determines the result: settings, versions, and name, size and time of each input file.

    The hub is not asked, so a dataset that changes there between two runs is not detected.
    """
    made = settings.keep_text

    def identity(path: Path) -> list[Any]:
        if made is not None and path.is_relative_to(made):
            # Generated text has another path and time in each run, so its content counts.
            return [path.name, sha256_of(path)]
        status = path.stat()
        return [os.path.abspath(path), status.st_size, status.st_mtime_ns]

    def described(source: PairSource) -> list[Any]:
        fields = {key: value for key, value in dataclasses.asdict(source).items() if not isinstance(value, Path)}
        return [type(source).__name__, fields, *map(identity, source.files())]

    facts = {
        "versions": [_LAYOUT, __version__, tokenizers.__version__, sentencepiece.__version__, chunk_pairs],
        "settings": {
            field.name: getattr(settings, field.name)
            for field in dataclasses.fields(settings)
            if field.name not in _NOT_IN_FINGERPRINT
        },
        "tokenizers": [identity(one.tokenizer) if one.tokenizer else None for one in settings.vocabularies],
        "terms": settings.terms and identity(settings.terms),
        "sources": [described(source) for source in settings.training_sources],
        "validation": [described(source) for source in settings.validation_sources],
    }
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode("utf-8")).hexdigest()[:16]


@contextlib.contextmanager
def work_folder(out: Path, name: str, report: Callable[[str], None]) -> Iterator[Work]:
    """Make or find the work folder of the preparation `name` (a fingerprint) of `out`, and lock it during the block.

    At the end of the block its `whole` becomes `out`. The folder is kept if the block is interrupted or raises a
    TransientError; it is removed on another UserError.

    Raises:
        UserError: `out` exists, is being prepared by another process, or cannot be written.
    """
    out = Path(os.path.abspath(out))
    root = out.parent / f".{out.name}.partial"
    refuse_content(out)
    new_parents = list(itertools.takewhile(lambda parent: not parent.exists(), out.parents))
    work = Work(folder=root / name)
    try:
        with _locked(root, out):
            # Another preparation may have made it since the first check.
            refuse_content(out)
            try:
                _discard_others(root, work, report)
                if work.folder.exists() or work.whole.exists():
                    report(f"resuming the interrupted preparation in {root}")
                if not work.whole.exists():
                    make_folder(work.folder / "results")
                    make_folder(work.data)
                    for folder in (work.data, *work.data.glob("*/")):
                        remove_unfinished(folder)
                yield work
                remove_tree(work.folder, as_far_as_possible=True)
                move(work.whole, out)
                remove_tree(root, as_far_as_possible=True)
            except TransientError:
                raise
            except UserError:
                remove_tree(root, as_far_as_possible=True)
                for parent in new_parents:
                    with contextlib.suppress(OSError):
                        parent.rmdir()
                raise
    except OSError as error:
        raise TransientError(
            f"{out} cannot be written ({error.strerror or error}): check the place, its rights and its free space; "
            "the same command then resumes"
        ) from error


@contextlib.contextmanager
def _locked(root: Path, out: Path) -> Iterator[None]:
    """Hold the lock of a work folder; the system releases it however the process ends."""
    while True:
        make_folder(root)
        with contextlib.ExitStack() as stack:
            try:
                file = stack.enter_context(exclusive(root / "lock", wait=False))
            except BlockingIOError:
                holder = (root / "lock").read_bytes().decode() or "just started"
                raise UserError(
                    f"{out} is being prepared by another command ({holder}): wait for its end, or choose another --out"
                ) from None
            if _is_at(file.fileno(), root / "lock"):
                file.truncate(0)
                file.write(f"process {os.getpid()} on {socket.gethostname()}")
                file.flush()
                yield
                return
        # Another preparation ended and removed the folder between open and lock.


def _is_at(handle: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(handle), path.stat())
    except FileNotFoundError:
        return False


def _discard_others(root: Path, work: Work, report: Callable[[str], None]) -> None:
    others = [path for path in root.iterdir() if path.name != "lock" and path not in (work.folder, work.whole)]
    for path in others:
        remove_tree(path)
    if others:
        report(f"discarded: an interrupted preparation in {root}, of other text or with other settings")
