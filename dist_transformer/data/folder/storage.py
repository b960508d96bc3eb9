"""Read shards: from a folder of this machine, or from a URL through a bounded cache on local disk.

Any `fsspec` URL works (`s3://`, `gs://`, `hf://`, `https://`, `memory://`, …). A shard is read whole, and exactly the
bytes that are used are verified against its SHA-256, so later changes of the file do not matter. The processes of a
node share one cache. One lock per shard, which ends with its holder, lets one of them fetch while the others wait.
"""

import contextlib
import hashlib
import os
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from dist_transformer.base.errors import UserError
from dist_transformer.base.files import remove, remove_unfinished, whole_path
from dist_transformer.base.locks import exclusive
from dist_transformer.base.verified import Held, hold_verified
from dist_transformer.data.folder.format import ShardInfo, index_states

_ATTEMPTS = 5
_FIRST_PAUSE_SECONDS = 0.5
_BLOCK_BYTES = 2**22
# Bytes of the largest file besides shards. The lengths of two billion pairs fit.
_MOST_BYTES = 2**34


@dataclass(frozen=True, kw_only=True, slots=True)
class CacheSettings:
    """Folder and size limit of the cache of remote shards."""

    folder: Path
    limit_bytes: int


class LocalFiles:
    """Shards of a split in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def read(self, shard: ShardInfo) -> Held:
        """Copy a shard to memory and verify it there. Waits until it is on local disk.

        Raises:
            UserError: it cannot be read, or does not have the recorded hash.
        """
        return hold_verified(self.folder / shard.file, index_states(shard.sha256))

    def fetch_ahead(self, shards: Iterable[ShardInfo]) -> None:
        """Fetch the shards that are needed next in the background; local ones need no fetching."""


class CachedFiles(LocalFiles):
    """Shards behind a URL. The folder `cache` keeps at most `limit_bytes` of them."""

    def __init__(self, url: str, cache: Path, limit_bytes: int) -> None:
        super().__init__(cache)
        self.url, self.limit_bytes = url, limit_bytes
        self._fetcher: threading.Thread | None = None

    def read(self, shard: ShardInfo) -> Held:
        with exclusive(self.folder / f"{shard.file}.lock"):
            try:
                content = super().read(shard)
            except UserError:
                self._fetch(shard)
                content = super().read(shard)
            # `_make_room` removes the least recently used shard first.
            os.utime(self.folder / shard.file)
            return content

    def fetch_ahead(self, shards: Iterable[ShardInfo]) -> None:
        """Fetch as many of the shards as half of the limit holds. A failure is reported when the shard is needed."""
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
            path = self.folder / shard.file
            with contextlib.suppress(UserError, OSError), exclusive(self.folder / f"{shard.file}.lock"):
                if not path.exists():
                    self._fetch(shard)
                os.utime(path)

    def _fetch(self, shard: ShardInfo) -> None:
        self._make_room(shard)
        fetch(f"{self.url}/{shard.file}", self.folder / shard.file, most=shard.bytes, sha256=shard.sha256)

    def _make_room(self, shard: ShardInfo) -> None:
        """Remove the least recently used shards, except those that a process is opening."""
        with exclusive(self.folder / "room.lock"):
            files = sorted(self.folder.glob("*.arrow"), key=lambda file: file.stat().st_mtime)
            total = shard.bytes + sum(file.stat().st_size for file in files)
            for file in files:
                if total <= self.limit_bytes:
                    break
                with contextlib.suppress(BlockingIOError), exclusive(self.folder / f"{file.name}.lock", wait=False):
                    total -= file.stat().st_size
                    remove(file)


def fetch(url: str, path: Path, *, most: int = _MOST_BYTES, sha256: str | None = None) -> None:
    """Copy a remote file to `path`, whole or not at all. Retry with growing pauses, as busy servers need.

    Args:
        most: bytes of the largest file that is copied.
        sha256: hash that it must have; None: any.

    Raises:
        UserError: all attempts failed; the error gives the last reason.
    """
    # One process at a time fetches a file, because it holds the lock.
    remove_unfinished(path.parent, path.name)
    for attempt in range(_ATTEMPTS):
        if attempt:
            time.sleep(_FIRST_PAUSE_SECONDS * 2 ** (attempt - 1))
        try:
            _copy(url, path, most=most, sha256=sha256)
            return
        except FileNotFoundError:
            raise UserError(f"{url} is missing: check the URL, or copy the data folder there again") from None
        except ImportError as error:
            raise UserError(f"{url} needs another package: {error}") from None
        except Exception as error:  # every kind of store has its own errors
            problem = str(error).strip().split("\n")[0] or type(error).__name__
    raise UserError(
        f"{url} cannot be fetched after {_ATTEMPTS} attempts ({problem}): check the network and rights, or copy the "
        "data folder there again"
    )


def _copy(url: str, path: Path, *, most: int, sha256: str | None) -> None:
    """Copy a remote file.

    Raises:
        OSError: the copy is not what the index states.
    """
    import fsspec

    digest, copied = hashlib.sha256(), 0
    with fsspec.open(url, "rb") as remote:
        # A store may fail for a long time before the first bytes arrive. A process that ends until then leaves nothing.
        block = remote.read(_BLOCK_BYTES)
        with whole_path(path) as partial, partial.open("wb") as file:
            while block:
                file.write(block)
                digest.update(block)
                copied += len(block)
                if copied > most:
                    raise OSError(f"it has more than {most:,} bytes")
                block = remote.read(_BLOCK_BYTES)
            if sha256 is not None and digest.hexdigest() != sha256:
                raise OSError(f"its {copied:,} bytes do not have the SHA-256 that the index states")
