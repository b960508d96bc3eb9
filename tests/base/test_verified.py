import hashlib
import json
import mmap
import os
import re
from pathlib import Path

import pytest

from dist_transformer.base import verified
from dist_transformer.base.errors import UserError
from dist_transformer.base.verified import (
    Sealed,
    Stated,
    VerifiedFile,
    has_own_hash,
    hold_verified,
    read_verified,
    with_own_hash,
)

CONTENT = bytes(range(256)) * 40


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "content"
    path.write_bytes(CONTENT)
    return path


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verified, "_BLOCK", 1000)


def stated(content: bytes = CONTENT) -> Stated:
    return Stated(hashlib.sha256(content).hexdigest(), "SUMS", "restore it")


def overwrite(path: Path, place: int, content: bytes) -> None:
    """In place: the file is the same one."""
    with path.open("r+b") as file:
        file.seek(place)
        file.write(content)


def test_any_part_of_a_file_is_read(file: Path) -> None:
    opened = VerifiedFile(file, stated())
    assert opened.size == len(CONTENT) == 10_240
    for start, end in ((0, 0), (0, 1), (0, 1000), (999, 1001), (10_239, 10_240), (500, 9_500), (0, 10_240), (10, 20)):
        assert bytes(opened.read(start, end)) == CONTENT[start:end]


def test_a_part_that_changed_after_the_hash_was_compared_is_not_given_out(file: Path) -> None:
    opened = VerifiedFile(file, stated())
    overwrite(file, 4_321, b"\x00")
    assert CONTENT[4_321] != 0
    assert bytes(opened.read(0, 4_000)) == CONTENT[:4_000]
    for start, end in ((4_321, 4_322), (4_000, 4_001), (0, 10_240)):
        with pytest.raises(UserError, match=re.escape(f"{file} changed while it was read: restore it")):
            opened.read(start, end)
    overwrite(file, 4_321, CONTENT[4_321:4_322])
    assert bytes(opened.read(0, 10_240)) == CONTENT


def test_a_file_that_was_cut_replaced_or_removed_is_not_given_out(file: Path) -> None:
    opened = VerifiedFile(file, stated())
    os.truncate(file, 9_999)
    assert bytes(opened.read(0, 9_000)) == CONTENT[:9_000]
    with pytest.raises(UserError, match="changed while it was read"):
        opened.read(9_500, 9_600)
    file.unlink()
    with pytest.raises(UserError, match=r"cannot be read \(No such file or directory\): restore it"):
        opened.read(0, 10)
    file.write_bytes(CONTENT[::-1])
    with pytest.raises(UserError, match="changed while it was read"):
        opened.read(0, 10)


@pytest.mark.parametrize("read", [read_verified, hold_verified, VerifiedFile])
def test_one_flipped_bit_is_found(read: object, file: Path) -> None:
    assert callable(read)
    read(file, stated())
    for place in (0, 5_000, 10_239):
        overwrite(file, place, bytes([CONTENT[place] ^ 1]))
        with pytest.raises(UserError) as caught:
            read(file, stated())
        assert str(caught.value) == f"{file} is damaged (its SHA-256 is not what SUMS states): restore it"
        overwrite(file, place, CONTENT[place : place + 1])
    file.unlink()
    with pytest.raises(UserError, match=re.escape(f"{file} cannot be read (No such file or directory): restore it")):
        read(file, stated())


def test_held_content_stays_whatever_becomes_of_the_file(file: Path) -> None:
    held = hold_verified(file, stated())
    overwrite(file, 0, bytes(len(CONTENT)))
    os.truncate(file, 5)
    file.unlink()
    assert bytes(held.content) == CONTENT


def test_nobody_can_change_held_content(file: Path) -> None:
    """Neither by its descriptor, nor by opening it again as /proc shows it; another map of it is the same."""
    held = hold_verified(file, stated())
    assert held.descriptor is not None
    again = os.open(f"/proc/self/fd/{held.descriptor}", os.O_RDWR)
    for descriptor in (held.descriptor, again):
        with pytest.raises(PermissionError):
            os.pwrite(descriptor, b"x", 0)
        with pytest.raises(PermissionError):
            os.ftruncate(descriptor, 5)
        with pytest.raises(PermissionError):
            os.ftruncate(descriptor, 2 * len(CONTENT))
        with pytest.raises(PermissionError):
            mmap.mmap(descriptor, len(CONTENT))
    assert bytes(Sealed.of(again).content) == bytes(held.content) == CONTENT


def test_a_descriptor_is_closed_with_its_content(file: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    content = hold_verified(file, stated()).content
    assert len(os.listdir("/proc/self/fd")) == before + isinstance(content, mmap.mmap)
    assert bytes(content) == CONTENT


def test_without_sealed_memory_content_is_held_all_the_same(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "memfd_create")
    held = hold_verified(file, stated())
    assert (bytes(held.content), held.descriptor) == (CONTENT, None)


def test_a_file_may_state_its_own_hash() -> None:
    content = with_own_hash({"a": 1, "b": "ü"})
    values = json.loads(content)
    assert values == {"a": 1, "b": "ü", "sha256": values["sha256"]}
    assert has_own_hash(content, values["sha256"])
    for place in range(len(content)):
        changed = bytearray(content)
        changed[place] ^= 1
        assert not has_own_hash(bytes(changed), values["sha256"])
