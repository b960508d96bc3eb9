"""Possible contents of a disk after a loss of power, derived from a record of a program's calls to the file system.

As ALICE does it (Pillai et al., OSDI 2014): names and data reach the disk apart from each other. What is flushed is
there. Data that was not flushed may be there, be missing, end anywhere, or be zeros where the file has its new length.
Creations, renames and removals that the flush of their folder did not follow are there in the order in which they were
asked for, up to any of them, in each folder apart.
"""

import os
import random
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_SECTOR = 512
_ROOT = 0
_EVENTS = {"os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.truncate", "os.link", "os.symlink"}
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC


@dataclass(frozen=True, slots=True)
class Names:
    """Changes of folders that come at once: folder, name, the file that had it before and the one that has it now."""

    changes: tuple[tuple[int, str, int | None, int | None], ...]


@dataclass(frozen=True, slots=True)
class Data:
    """A file's content from now on."""

    file: int
    content: bytes


@dataclass(frozen=True, slots=True)
class Flush:
    """A flush of a file, or of a folder's names."""

    file: int


@dataclass(frozen=True, slots=True)
class Promise:
    """The program has said that something is done: from now on it must survive."""

    what: Any


Operation = Names | Data | Flush | Promise
Tree = dict[str, bytes | None]
"""Content of files, None for folders, by their paths below the root."""


@dataclass(slots=True)
class Trace:
    """The actions of a program below a folder, in order. The first part is the earlier content, which is on disk."""

    operations: list[Operation] = field(default_factory=list)
    before: int = 0
    """Number of operations that describe the earlier content."""
    folders: set[int] = field(default_factory=lambda: {_ROOT})


class Recorder:
    """Looks at the folder whenever the program changes a name, opens a file to write, or flushes.

    Native code writes without a word; its files are found at the next look.
    """

    def __init__(self, root: Path) -> None:
        self.root, self.trace = root, Trace()
        self._ids: dict[int, int] = {root.stat().st_ino: _ROOT}
        self._count = _ROOT
        self._names: dict[tuple[int, str], int] = {}
        self._contents: dict[int, tuple[tuple[int, int], bytes]] = {}
        self._lock, self._looking = threading.RLock(), False

    def promise(self, what: Any) -> None:
        self.look()
        self.trace.operations.append(Promise(what))

    def flushed(self, handle: int) -> None:
        with self._lock:
            self.look()
            file = self._ids.get(os.fstat(handle).st_ino)
            if file is not None:
                self.trace.operations.append(Flush(file))

    def look(self) -> None:
        """Add what has changed since the last look."""
        with self._lock:
            if self._looking:
                return
            self._looking = True
            try:
                self._look()
            finally:
                self._looking = False

    def _look(self) -> None:
        names: dict[tuple[int, str], int] = {}
        inodes: set[int] = {self.root.stat().st_ino}
        changed: list[Data] = []
        self._walk(self.root, _ROOT, names, inodes, changed)
        gone = {key: file for key, file in self._names.items() if names.get(key) != file}
        new = {key: file for key, file in names.items() if self._names.get(key) != file}
        place_before = {file: key for key, file in gone.items()}
        # Parents come before what is in them: their numbers are lower.
        for key, file in sorted(new.items(), key=lambda item: item[1]):
            changes = [(*key, self._names.get(key), file)]
            if (source := place_before.get(file)) is not None and source not in new:
                changes.append((*source, file, None))
                gone.pop(source)
            gone.pop(key, None)
            self.trace.operations.append(Names(tuple(changes)))
        # And what is in a folder goes before it.
        for key, file in sorted(gone.items(), key=lambda item: -item[1]):
            if key not in new:
                self.trace.operations.append(Names(((*key, file, None),)))
        self.trace.operations.extend(changed)
        self._names = names
        self._ids = {inode: number for inode, number in self._ids.items() if inode in inodes}

    def _walk(
        self,
        folder: Path,
        number: int,
        names: dict[tuple[int, str], int],
        inodes: set[int],
        changed: list[Data],
    ) -> None:
        for entry in sorted(os.scandir(folder), key=lambda entry: entry.name):
            status = entry.stat(follow_symlinks=False)
            inodes.add(status.st_ino)
            if status.st_ino not in self._ids:
                self._count += 1
                self._ids[status.st_ino] = self._count
            file = self._ids[status.st_ino]
            names[number, entry.name] = file
            if entry.is_dir(follow_symlinks=False):
                self.trace.folders.add(file)
                self._walk(Path(entry.path), file, names, inodes, changed)
                continue
            stamp = (status.st_size, status.st_mtime_ns)
            known = self._contents.get(file)
            if known is None or known[0] != stamp:
                content = Path(entry.path).read_bytes()
                self._contents[file] = (stamp, content)
                if known is None or known[1] != content:
                    changed.append(Data(file, content))


_active: list[Recorder] = []


def _audit(event: str, arguments: tuple[Any, ...]) -> None:
    if not _active:
        return
    if event in _EVENTS or (event == "open" and isinstance(arguments[2], int) and arguments[2] & _WRITING):
        _active[0].look()


# It cannot be taken back: without an active recorder it does nothing.
sys.addaudithook(_audit)


@contextmanager
def recording(root: Path) -> Iterator[Recorder]:
    """Record what this process does below a folder. Nothing is really flushed meanwhile."""
    recorder = Recorder(root)
    recorder.look()
    recorder.trace.before = len(recorder.trace.operations)
    _active.append(recorder)
    try:
        with no_flushes(recorder.flushed):
            yield recorder
        recorder.look()
    finally:
        _active.clear()


@contextmanager
def no_flushes(instead: Callable[[int], None] = lambda _: None) -> Iterator[None]:
    """Flush nothing; call `instead`, with the handle."""
    fsync, os.fsync = os.fsync, instead  # type: ignore[assignment]
    try:
        yield
    finally:
        os.fsync = fsync


@dataclass(frozen=True, slots=True)
class State:
    """A possible content of a disk after a loss of power."""

    at: int
    """Number of operations before this state."""
    tree: Tree
    promises: tuple[Any, ...]

    def write_to(self, folder: Path) -> None:
        for name, content in self.tree.items():
            path = folder / name
            if content is None:
                path.mkdir(parents=True, exist_ok=True)
            else:
                path.write_bytes(content)


class _Moment:
    """The trace up to an operation: what is flushed, and what is not yet."""

    def __init__(self, trace: Trace, at: int) -> None:
        self.folders = trace.folders
        self.names: list[tuple[Names, bool]] = []
        """Changes of names, each with whether it is certainly on disk."""
        self.durable: dict[int, bytes] = {}
        self.current: dict[int, bytes] = {}
        self.promises: list[Any] = []
        flushed_after: dict[int, int] = {}
        for number, operation in enumerate(trace.operations[:at]):
            match operation:
                case Data(file, content):
                    self.current[file] = content
                    if number < trace.before:
                        self.durable[file] = content
                case Flush(file):
                    flushed_after[file] = number
                    if file in self.current:
                        self.durable[file] = self.current[file]
                case Promise(what):
                    self.promises.append(what)
        self.open: dict[int, int] = {}
        """Changes of each folder that may be lost."""
        for number, operation in enumerate(trace.operations[:at]):
            if isinstance(operation, Names):
                folders = {folder for folder, *_ in operation.changes}
                sure = number < trace.before or any(flushed_after.get(folder, -1) > number for folder in folders)
                self.names.append((operation, sure))
                for folder in folders if not sure else ():
                    self.open[folder] = self.open.get(folder, 0) + 1

    def tree(self, kept: dict[int, int], how: str, generator: random.Random) -> Tree:
        """The files, with the first `kept` of the open changes of each folder, and unflushed data as `how` says."""
        left, entries = dict(kept), dict[tuple[int, str], int]()
        for operation, sure in self.names:
            folders = {folder for folder, *_ in operation.changes}
            if not sure and any(left.get(folder, 0) <= 0 for folder in folders):
                # What comes later in one of them is missing, too.
                left.update(dict.fromkeys(folders, 0))
                continue
            for folder in folders if not sure else ():
                left[folder] -= 1
            for folder, name, _, new in sorted(operation.changes, key=lambda change: change[3] is not None):
                entries.pop((folder, name), None)
                if new is not None:
                    entries[folder, name] = new
        inside: dict[int, list[tuple[str, int]]] = {}
        for (folder, name), file in entries.items():
            inside.setdefault(folder, []).append((name, file))
        tree: Tree = {}
        contents: dict[int, bytes] = {}

        def add(folder: int, prefix: str) -> None:
            for name, file in sorted(inside.get(folder, ())):
                if file in self.folders:
                    tree[prefix + name] = None
                    add(file, f"{prefix}{name}/")
                else:
                    contents.setdefault(file, self._content(file, how, generator))
                    tree[prefix + name] = contents[file]

        add(_ROOT, "")
        return tree

    def _content(self, file: int, how: str, generator: random.Random) -> bytes:
        new, old = self.current.get(file, b""), self.durable.get(file, b"")
        if new == old:
            return new
        how = generator.choice(("kept", "lost", "torn", "zeros")) if how == "any" else how
        stays = old if new.startswith(old) else b""
        if how == "torn":
            cuts = range(len(stays) - len(stays) % _SECTOR + _SECTOR, len(new), _SECTOR)
            return new[: generator.choice(cuts)] if cuts else stays
        return {"kept": new, "lost": old, "zeros": stays + bytes(len(new) - len(stays))}[how]


def states_after(trace: Trace, generator: random.Random, *, at_random: int = 2) -> Iterator[State]:
    """Yield the possible contents of a disk at each moment of a trace, each state once for equal promises.

    Args:
        at_random: number of random states at each moment, besides those in which all or none of the names are kept.
    """
    seen: set[int] = set()
    for at in range(trace.before, len(trace.operations) + 1):
        moment = _Moment(trace, at)
        every, none = moment.open, dict[int, int]()
        ways = [(every, how) for how in ("kept", "lost", "torn", "zeros")] + [(none, how) for how in ("kept", "lost")]
        for folder, count in moment.open.items():
            ways += [({**every, folder: generator.randrange(count)}, "any"), ({folder: count}, "any")]
        for _ in range(at_random):
            ways.append(({folder: generator.randint(0, count) for folder, count in every.items()}, "any"))
        for kept, how in ways:
            tree = moment.tree(kept, how, generator)
            key = hash((tuple(sorted(tree.items(), key=lambda item: item[0])), tuple(map(repr, moment.promises))))
            if key not in seen:
                seen.add(key)
                yield State(at, tree, tuple(moment.promises))
