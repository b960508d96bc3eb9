"""Shards where they lie: in a folder of this machine, or behind a URL with a bounded cache on local disk.

Any `fsspec` URL will do (`s3://`, `gs://`, `hf://`, `https://`, `memory://`, …). Every shard is verified against its
SHA-256 before its first use. The processes of a node share one cache: one lock a shard, which ends with its holder,
lets one of them fetch while the others wait.
"""

import contextlib
import hashlib
import os
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from dist_transformer.data.shards import REMEDY, ShardInfo, TokenLists, read_shard
from dist_transformer.errors import UserError
from dist_transformer.files import exclusive, sha256_of

Columns = tuple[TokenLists, TokenLists]

_ATTEMPTS = 5
_FIRST_PAUSE_SECONDS = 0.5
_BLOCK_BYTES = 2**22


@dataclass(frozen=True, kw_only=True, slots=True)
class CacheSettings:
    """Where copies of remote shards are kept, and how much of them."""

    folder: Path
    limit_bytes: int


class ShardFiles(Protocol):
    """Where the shards of a split are."""

    def open(self, shard: ShardInfo) -> Columns:
        """Source and target ids of a verified shard, memory-mapped; waits until it is on local disk.

        Raises:
            UserError: it cannot be had, or is not what the index states.
        """

    def fetch_ahead(self, shards: Iterable[ShardInfo]) -> None:
        """Bring these, which are needed next, in the background."""


def is_url(place: str) -> bool:
    return "://" in place


class LocalFiles:
    """Shards in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._verified: set[str] = set()

    def open(self, shard: ShardInfo) -> Columns:
        path = self.folder / shard.file
        if shard.file not in self._verified:
            check_file(path, size=shard.bytes, sha256=shard.sha256)
            self._verified.add(shard.file)
        return read_shard(path)

    def fetch_ahead(self, shards: Iterable[ShardInfo]) -> None:
        """They are here."""


class CachedFiles:
    """Shards behind a URL. At most `limit_bytes` of them are kept in `cache`; what a process has open may add to it."""

    def __init__(self, url: str, cache: Path, limit_bytes: int) -> None:
        self.url, self.cache, self.limit_bytes = url, cache, limit_bytes
        self._verified: set[str] = set()
        self._fetcher: threading.Thread | None = None

    def open(self, shard: ShardInfo) -> Columns:
        path = self.cache / shard.file
        with exclusive(self.cache / f"{shard.file}.lock"):
            if not self._is_whole(path, shard):
                self._make_room(shard)
                fetch(f"{self.url}/{shard.file}", path, size=shard.bytes, sha256=shard.sha256)
                self._verified.add(shard.file)
            # When room is made, the least recently used shard goes.
            os.utime(path)
            return read_shard(path)

    def fetch_ahead(self, shards: Iterable[ShardInfo]) -> None:
        """As many as half of the limit holds. What cannot be had is told when it is needed."""
        if self._fetcher is not None and self._fetcher.is_alive():
            return
        chosen, total = [], 0
        for shard in shards:
            total += shard.bytes
            if total > self.limit_bytes // 2:
                break
            chosen.append(shard)
        self._fetcher = threading.Thread(target=self._fetch_all, args=(chosen,), daemon=True)
        self._fetcher.start()

    def _fetch_all(self, shards: list[ShardInfo]) -> None:
        for shard in shards:
            with contextlib.suppress(UserError, OSError):
                self.open(shard)

    def _is_whole(self, path: Path, shard: ShardInfo) -> bool:
        if shard.file in self._verified:
            return path.exists()
        try:
            check_file(path, size=shard.bytes, sha256=shard.sha256)
        except UserError:
            return False
        self._verified.add(shard.file)
        return True

    def _make_room(self, shard: ShardInfo) -> None:
        """Remove the least recently used shards, without those that a process is opening."""
        with exclusive(self.cache / "room.lock"):
            files = sorted(self.cache.glob("*.arrow"), key=lambda file: file.stat().st_mtime)
            total = shard.bytes + sum(file.stat().st_size for file in files)
            for file in files:
                if total <= self.limit_bytes:
                    break
                with contextlib.suppress(BlockingIOError), exclusive(self.cache / f"{file.name}.lock", wait=False):
                    total -= file.stat().st_size
                    file.unlink()


def fetch(url: str, path: Path, *, size: int | None = None, sha256: str | None = None) -> None:
    """Copy a remote file to `path`, whole or not at all; with pauses that grow, as a busy server wants it.

    Raises:
        UserError: all attempts failed; the last reason is given.
    """
    partial = path.with_name(f"{path.name}.partial")
    for attempt in range(_ATTEMPTS):
        if attempt:
            time.sleep(_FIRST_PAUSE_SECONDS * 2 ** (attempt - 1))
        try:
            problem = _copy(url, partial, size=size, sha256=sha256)
        except FileNotFoundError:
            partial.unlink(missing_ok=True)
            raise UserError(f"{url} is missing: check the URL, or copy the data folder there again") from None
        except ImportError as error:
            raise UserError(f"{url} needs another package: {error}") from None
        except Exception as error:  # every kind of store has its own
            problem = str(error).strip().split("\n")[0] or type(error).__name__
        if problem is None:
            partial.replace(path)
            return
    partial.unlink(missing_ok=True)
    raise UserError(
        f"{url} cannot be had after {_ATTEMPTS} attempts ({problem}): check the network and rights, or copy the data "
        "folder there again"
    )


def _copy(url: str, partial: Path, *, size: int | None, sha256: str | None) -> str | None:
    """What is wrong with the copy, None when it is sound."""
    import fsspec

    digest, copied = hashlib.sha256(), 0
    with fsspec.open(url, "rb") as remote, partial.open("wb") as file:
        while block := remote.read(_BLOCK_BYTES):
            file.write(block)
            digest.update(block)
            copied += len(block)
    if size is not None and copied != size:
        return f"it has {copied:,} bytes where the index states {size:,}"
    if sha256 is not None and digest.hexdigest() != sha256:
        return "its SHA-256 is not the index's"
    return None


def check_file(path: Path, *, sha256: str, size: int | None = None) -> None:
    """
    Raises:
        UserError: the file is of another size or content than the index states, or cannot be read.
    """
    try:
        if size is not None and (found := path.stat().st_size) != size:
            raise UserError(f"{path} has {found:,} bytes where the index states {size:,}: {REMEDY}")
        if sha256_of(path) != sha256:
            raise UserError(f"{path} is damaged or from another folder, for its SHA-256 is not the index's: {REMEDY}")
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}): {REMEDY}") from None
