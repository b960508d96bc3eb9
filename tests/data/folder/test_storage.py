"""Data folders behind URLs: the same sentences, a bounded cache, and every way in which a store may fail."""

import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from dist_transformer.base.errors import UserError
from dist_transformer.data.folder import storage
from dist_transformer.data.folder.reader import DataFolder
from dist_transformer.data.folder.storage import CacheSettings, fetch

GIB = 2**30


@pytest.fixture
def remote(toy_data: DataFolder, monkeypatch: pytest.MonkeyPatch) -> Iterator[MemoryFileSystem]:
    """The toy corpus at memory://bucket/toy; attempts follow each other at once."""
    monkeypatch.setattr(storage, "_FIRST_PAUSE_SECONDS", 0.0)
    store = MemoryFileSystem()
    store.put(str(toy_data.path), "/bucket/toy", recursive=True)
    yield store
    store.rm("/bucket", recursive=True)


def open_remote(cache: Path, *, limit: int = GIB, url: str = "memory://bucket/toy") -> DataFolder:
    return DataFolder.open(url, CacheSettings(folder=cache, limit_bytes=limit))


def all_tokens(folder: DataFolder) -> list[list[int]]:
    return [part.tolist() for part in folder.train.tokens(np.arange(folder.train.info.pairs))]


def cached(folder: DataFolder) -> list[str]:
    return sorted(file.name for file in folder.path.glob("*.arrow"))


def test_the_sentences_are_those_of_the_local_folder(
    remote: MemoryFileSystem, toy_data: DataFolder, tmp_path: Path
) -> None:
    folder = open_remote(tmp_path / "a cache")
    assert cached(folder) == []
    assert folder.train.tokens(np.array([0]))[0].tolist() == toy_data.train.tokens(np.array([0]))[0].tolist()
    assert cached(folder) == ["train-00000.arrow"]
    assert all_tokens(folder) == all_tokens(toy_data)
    assert folder.valid_text() == toy_data.valid_text()
    assert folder.tokenizer().sha256 == toy_data.tokenizer().sha256
    assert not list(folder.path.glob("*.partial"))


def test_a_second_run_finds_them_in_the_cache(remote: MemoryFileSystem, tmp_path: Path) -> None:
    all_tokens(open_remote(tmp_path))
    for shard in remote.glob("/bucket/toy/train-*.arrow"):
        remote.rm(shard)
    assert len(all_tokens(open_remote(tmp_path))) == 4


def test_the_cache_is_bounded(remote: MemoryFileSystem, toy_data: DataFolder, tmp_path: Path) -> None:
    """Room for two of four shards: the least recently used go, and come again when they are asked for."""
    info = toy_data.train.info
    limit = 2 * max(shard.bytes for shard in info.shards)
    folder = open_remote(tmp_path, limit=limit)
    for first, kept in ((0, [0]), (500, [0, 1]), (1000, [1, 2]), (0, [0, 2])):
        folder.close()
        pair = toy_data.train.shard_starts[first // 500]
        assert folder.train.tokens(np.array([pair]))[0].tolist() == toy_data.train.tokens(np.array([pair]))[0].tolist()
        assert cached(folder) == [info.shards[number].file for number in kept]
    assert all_tokens(folder) == all_tokens(toy_data)


@pytest.mark.parametrize(("short", "fetched"), [(0, 2), (1, 1)])
def test_shards_that_half_of_the_cache_holds_are_fetched_ahead(
    remote: MemoryFileSystem, toy_data: DataFolder, tmp_path: Path, short: int, fetched: int
) -> None:
    folder = open_remote(tmp_path, limit=2 * sum(shard.bytes for shard in toy_data.train.info.shards[2:]) - short)
    folder.train.fetch_ahead([2, 3])
    fetcher = folder.train.files._fetcher  # type: ignore[attr-defined]
    fetcher.join(timeout=600)
    assert cached(folder) == ["train-00002.arrow", "train-00003.arrow"][:fetched]


def test_a_store_that_fails_for_a_while_is_asked_again(
    remote: MemoryFileSystem, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usual, failures = MemoryFileSystem._open, [4]

    def busy(self: MemoryFileSystem, *args: Any, **settings: Any) -> Any:
        failures[0] -= 1
        if failures[0] >= 0:
            raise ConnectionResetError("the store is busy")
        return usual(self, *args, **settings)

    monkeypatch.setattr(MemoryFileSystem, "_open", busy)
    fetch("memory://bucket/toy/index.json", tmp_path / "index.json", most=2**20)
    failures[0] = 99
    with pytest.raises(UserError, match=r"memory://bucket/toy/index\.json cannot be fetched after 5 attempts"):
        fetch("memory://bucket/toy/index.json", tmp_path / "again.json", most=2**20)
    monkeypatch.undo()
    assert (tmp_path / "index.json").read_bytes() == remote.cat("/bucket/toy/index.json")
    assert [file.name for file in tmp_path.iterdir()] == ["index.json"]


def test_a_shard_that_stays_bad_is_named(remote: MemoryFileSystem, tmp_path: Path) -> None:
    whole = remote.cat("/bucket/toy/train-00001.arrow")
    flipped = bytearray(whole)
    flipped[len(whole) // 2] ^= 1
    for content, reason in (
        (bytes(flipped), f"its {len(whole):,} bytes do not have the SHA-256"),
        (whole[:-9], f"its {len(whole) - 9:,} bytes do not have"),
        (whole + b"more", f"it has more than {len(whole):,} bytes"),
    ):
        remote.pipe("/bucket/toy/train-00001.arrow", content)
        folder = open_remote(tmp_path)
        with pytest.raises(UserError, match=rf"memory://bucket/toy/train-00001\.arrow cannot be fetched .*{reason}"):
            all_tokens(folder)
        assert cached(folder) == ["train-00000.arrow"]
    remote.rm("/bucket/toy/train-00001.arrow")
    assert open_remote(tmp_path).train.hold([0, 1]).keys() == {1}
    with pytest.raises(UserError, match=r"memory://bucket/toy/train-00001\.arrow is missing"):
        all_tokens(open_remote(tmp_path))


def test_a_damaged_cache_is_repaired(remote: MemoryFileSystem, toy_data: DataFolder, tmp_path: Path) -> None:
    folder = open_remote(tmp_path)
    all_tokens(folder)
    for name in ("train-00000.arrow", "tokenizer.json", "lengths.npy"):
        (folder.path / name).write_bytes(b"half")
    assert all_tokens(open_remote(tmp_path)) == all_tokens(toy_data)


def test_a_cache_that_is_gone_is_a_problem_in_words(remote: MemoryFileSystem, tmp_path: Path) -> None:
    """Not an error of one rank, for which the others would wait."""
    folder = open_remote(tmp_path)
    shutil.rmtree(folder.path)
    assert folder.train.hold([1]) == {
        1: f"train-00001.arrow in {folder.path} cannot be read (No such file or directory): check that folder, its "
        "rights and its free space"
    }


def test_what_is_no_data_folder_says_so(remote: MemoryFileSystem, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"memory://bucket/other/index\.json is missing: check the URL"):
        open_remote(tmp_path, url="memory://bucket/other")
    with pytest.raises(UserError, match=r"nosuchstore://x/index\.json cannot be fetched"):
        open_remote(tmp_path, url="nosuchstore://x")
    with pytest.raises(UserError, match="is a URL, and only training reads those"):
        DataFolder.open("memory://bucket/toy")


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("ftp://me:hunter2@host/data", "ftp://***@host/data"),
        ("https://host/data?bearer=hunter2", "https://host/data?***"),
    ],
)
def test_a_secret_is_refused_and_not_shown(url: str, shown: str) -> None:
    with pytest.raises(UserError) as refused:
        DataFolder.open(url)
    assert str(refused.value).startswith(f"{shown} holds a password, a query or a fragment, which may grant access")


@pytest.mark.parametrize("name", ["../train-00000.arrow", "/etc/hostname", "a/b.arrow"])
def test_names_that_lead_out_of_the_cache_are_refused(remote: MemoryFileSystem, tmp_path: Path, name: str) -> None:
    index = remote.cat("/bucket/toy/index.json").replace(b'"train-00001.arrow"', f'"{name}"'.encode())
    remote.pipe("/bucket/toy/index.json", index)
    with pytest.raises(UserError, match="is not a plain file name"):
        open_remote(tmp_path)


@pytest.mark.system
def test_processes_share_one_copy(toy_data: DataFolder, tmp_path: Path) -> None:
    """Four processes read all of a folder that has room for three shards; the first to need one fetches it."""
    served = tmp_path / "served"
    shutil.copytree(toy_data.path, served)
    limit = 3 * max(shard.bytes for shard in toy_data.train.info.shards)
    program = f"""
import numpy as np
from pathlib import Path
from dist_transformer.data.folder.reader import DataFolder
from dist_transformer.data.folder.storage import CacheSettings
for _ in range(3):
    cache = CacheSettings(folder=Path({str(tmp_path / "cache")!r}), limit_bytes={limit})
    folder = DataFolder.open("file://{served}", cache)
    for first in range(0, folder.train.info.pairs, 100):
        folder.train.tokens(np.arange(first, min(first + 100, folder.train.info.pairs)))
print(sum(folder.train.tokens(np.arange(folder.train.info.pairs))[2].tolist()))
"""
    processes = [
        subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for _ in range(4)
    ]
    outputs = [process.communicate(timeout=600)[0] for process in processes]
    assert outputs == [f"{sum(all_tokens(toy_data)[2])}\n"] * 4
    assert not list((tmp_path / "cache").rglob("*.partial"))
