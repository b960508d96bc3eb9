import hashlib
import json
import mmap
import os
import re
from pathlib import Path

import pytest

from dist_transformer.base.errors import UserError
from dist_transformer.base.verified import (
    Held,
    Stated,
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


def stated(content: bytes = CONTENT) -> Stated:
    return Stated(hashlib.sha256(content).hexdigest(), "SUMS", "restore it")


def overwrite(path: Path, place: int, content: bytes) -> None:
    """In place: the file is the same one."""
    with path.open("r+b") as file:
        file.seek(place)
        file.write(content)


@pytest.mark.parametrize("read", [read_verified, hold_verified, lambda file, stated: stated.check(file)])
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


def test_another_process_maps_the_same_content(file: Path) -> None:
    held = hold_verified(file, stated())
    assert held.descriptor is not None
    assert bytes(Held.of(os.dup(held.descriptor)).content) == bytes(held.content) == CONTENT


def test_a_descriptor_is_closed_with_its_content(file: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    content = hold_verified(file, stated()).content
    assert len(os.listdir("/proc/self/fd")) == before + isinstance(content, mmap.mmap)
    assert bytes(content) == CONTENT


def test_without_memory_files_content_is_held_all_the_same(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
