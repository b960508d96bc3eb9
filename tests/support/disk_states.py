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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_SECTOR = 512
_ROOT = 0
_EVENTS = {"os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.truncate", "os.link", "os.symlink"}
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC

Names = dict[str, int]
"""The entries of a folder: the number of a file or folder by its name."""
Version = tuple[int, Names]
"""A folder, and the entries that it has from some moment on."""
Tree = dict[str, bytes | None]
"""Content of files, None for folders, by their paths below the root."""


@dataclass(frozen=True, slots=True)
class State:
    """A possible content of a disk after a loss of power."""

    at: int
    """The moment of the record."""
    tree: Tree
    promises: tuple[Any, ...]

    def write_to(self, folder: Path) -> None:
        for name, content in self.tree.items():
            path = folder / name
            if content is None:
                path.mkdir(parents=True, exist_ok=True)
            else:
                path.write_bytes(content)


@dataclass(frozen=True, slots=True)
class Moment:
    """Content that is certainly on the disk, and content that may be."""

    names: dict[int, tuple[Names, ...]]
    """The entries that each folder has had since its last flush, the flushed ones first."""
    contents: dict[int, tuple[bytes, bytes]]
    """The content of each file at its last flush, and now."""
    moves: tuple[tuple[Version, Version], ...]
    """Moves from one folder to another: entries of the two that are there together or not at all."""
    promises: tuple[Any, ...]
    """All that the program has said to be done: it must survive."""

    def allows(self, kept: dict[int, int]) -> bool:
        """Decide whether the first `kept` of the open changes of each folder leave every file in one place."""
        return all(
            len({kept.get(folder, 0) >= _place(self.names[folder], names) for folder, names in move}) == 1
            for move in self.moves
        )

    def tree(self, kept: dict[int, int], how: str, generator: random.Random) -> Tree:
        """The files, with the first `kept` of the open changes of each folder, and unflushed data as `how` says."""
        tree: Tree = {}
        contents: dict[int, bytes] = {}

        def add(folder: int, prefix: str) -> None:
            for name, file in sorted(self.names[folder][kept.get(folder, 0)].items()):
                if file in self.names:
                    tree[prefix + name] = None
                    add(file, f"{prefix}{name}/")
                else:
                    contents.setdefault(file, self._content(file, how, generator))
                    tree[prefix + name] = contents[file]

        add(_ROOT, "")
        return tree

    def _content(self, file: int, how: str, generator: random.Random) -> bytes:
        old, new = self.contents[file]
        if new == old:
            return new
        how = generator.choice(("kept", "lost", "torn", "zeros")) if how == "any" else how
        stays = old if new.startswith(old) else b""
        if how == "torn":
            cuts = range(len(stays) - len(stays) % _SECTOR + _SECTOR, len(new), _SECTOR)
            return new[: generator.choice(cuts)] if cuts else stays
        return {"kept": new, "lost": old, "zeros": stays + bytes(len(new) - len(stays))}[how]


def _place(versions: tuple[Names, ...], names: Names) -> int:
    """Find some entries among those of their folder; 0 if a flush has gone past them."""
    return next((place for place, version in enumerate(versions) if version is names), 0)


class Recorder:
    """Looks at the folder whenever the program changes a name, opens a file to write, or flushes.

    Native code writes without a word; its files are found at the next look. What is there at first is on the disk.
    """

    def __init__(self, root: Path) -> None:
        self.root, self.moments = root, list[Moment]()
        self._ids: dict[int, int] = {}
        self._count = _ROOT - 1
        self._names: dict[int, tuple[Names, ...]] = {}
        self._contents: dict[int, tuple[bytes, bytes]] = {}
        self._stamps: dict[int, tuple[int, int]] = {}
        self._moves: tuple[tuple[Version, Version], ...] = ()
        self._promises: tuple[Any, ...] = ()
        self._lock, self._looking = threading.RLock(), False
        self.look()
        for file in [*self._names, *self._contents]:
            self._flush(file)
        self.moments = [self._moment()]

    def _moment(self) -> Moment:
        return Moment(dict(self._names), dict(self._contents), self._moves, self._promises)

    def promise(self, what: Any) -> None:
        self.look()
        self._promises += (what,)
        self.moments.append(self._moment())

    def flushed(self, handle: int) -> None:
        with self._lock:
            self.look()
            if (file := self._ids.get(os.fstat(handle).st_ino)) is not None:
                self._flush(file)
                self.moments.append(self._moment())

    def _flush(self, file: int) -> None:
        if file in self._names:
            self._names[file] = self._names[file][-1:]
            for folder, names in (side for move in self._moves if file in dict(move) for side in move):
                self._names[folder] = self._names[folder][_place(self._names[folder], names) :]
        else:
            self._contents[file] = (self._contents[file][1],) * 2

    def look(self) -> None:
        """Add what has changed since the last look."""
        with self._lock:
            if self._looking:
                return
            self._looking = True
            try:
                before, inodes = (dict(self._names), dict(self._contents)), set[int]()
                self._walk(self.root, self._number(self.root.stat().st_ino, inodes), inodes)
                self._find_moves(before[0])
                self._ids = {inode: number for inode, number in self._ids.items() if inode in inodes}
                if before != (self._names, self._contents):
                    self.moments.append(self._moment())
            finally:
                self._looking = False

    def _find_moves(self, before: dict[int, tuple[Names, ...]]) -> None:
        """Add the moves of the newest change."""
        changed = {folder: names[-1] for folder, names in self._names.items() if names is not before.get(folder)}
        old = {folder: before.get(folder, ({},))[-1].values() for folder in changed}
        left = {file: folder for folder, names in changed.items() for file in old[folder] if file not in names.values()}
        for folder, names in changed.items():
            for origin in (left[file] for file in names.values() if file in left and file not in old[folder]):
                self._moves += (((origin, changed[origin]), (folder, names)),)

    def _number(self, inode: int, inodes: set[int]) -> int:
        inodes.add(inode)
        if inode not in self._ids:
            self._count += 1
            self._ids[inode] = self._count
        return self._ids[inode]

    def _walk(self, folder: Path, number: int, inodes: set[int]) -> None:
        names: Names = {}
        for entry in sorted(os.scandir(folder), key=lambda entry: entry.name):
            status = entry.stat(follow_symlinks=False)
            names[entry.name] = file = self._number(status.st_ino, inodes)
            stamp = (status.st_size, status.st_mtime_ns)
            if entry.is_dir(follow_symlinks=False):
                self._walk(Path(entry.path), file, inodes)
            elif self._stamps.get(file) != stamp:
                self._stamps[file] = stamp
                self._contents[file] = (self._contents.get(file, (b"", b""))[0], Path(entry.path).read_bytes())
        versions = self._names.setdefault(number, ({},))
        if versions[-1] != names:
            self._names[number] = (*versions, names)


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


def states_after(recorder: Recorder, generator: random.Random, *, at_random: int = 2) -> Iterator[State]:
    """Yield the possible contents of a disk at each moment of a record, each state once for equal promises.

    Args:
        at_random: number of random states at each moment, besides those in which all or none of the names are kept.
    """
    seen: set[int] = set()
    for at, moment in enumerate(recorder.moments):
        every = {folder: len(versions) - 1 for folder, versions in moment.names.items() if len(versions) > 1}
        ways = [(every, how) for how in ("kept", "lost", "torn", "zeros")]
        ways += [({}, how) for how in ("kept", "lost")]
        for folder, count in every.items():
            ways += [({**every, folder: generator.randrange(count)}, "any"), ({folder: count}, "any")]
        for _ in range(at_random):
            ways.append(({folder: generator.randint(0, count) for folder, count in every.items()}, "any"))
        for kept, how in (way for way in ways if moment.allows(way[0])):
            tree = moment.tree(kept, how, generator)
            key = hash((tuple(tree.items()), repr(moment.promises)))
            if key not in seen:
                seen.add(key)
                yield State(at, tree, moment.promises)
