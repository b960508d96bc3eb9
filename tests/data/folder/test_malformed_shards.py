"""Shards that are not what Arrow believes, whose hashes are nevertheless those of the index.

Each is read in a child process, since Arrow may end the one that trusts it.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from dist_transformer.data.folder.format import TokenLists, write_shard, write_split
from tests.conftest import run_python

ROWS = [[10, 11], [12], [13, 14, 15], [16, 17, 18, 19]]
VOCAB_SIZE = 20

# Reads each shard as training does, and prints the error.
READ = """
import sys
from pathlib import Path
import numpy as np
from dist_transformer.data.folder.format import ShardInfo, SplitInfo
from dist_transformer.data.folder.split import Split
from dist_transformer.base.errors import UserError
from dist_transformer.base.files import sha256_of

lengths, *shards = map(Path, sys.argv[1:])
for path in shards:
    shard = ShardInfo(
        file=path.name, pairs=4, source_tokens=14, target_tokens=14, bytes=path.stat().st_size, sha256=sha256_of(path)
    )
    info = SplitInfo(
        shards=(shard,),
        lengths_file=lengths.name,
        lengths_sha256=sha256_of(lengths),
        max_source_tokens=5,
        max_target_tokens=5,
    )
    try:
        found = Split(path.parent, info, vocab_sizes=(20, 0)).tokens(np.arange(4))
        print(path.name, "read", [array.tolist() for array in found], flush=True)
    except UserError as error:
        print(path.name, "refused", error, flush=True)
"""


@pytest.fixture
def sound(tmp_path: Path) -> Path:
    rows = TokenLists.from_lists(ROWS, np.uint16)
    write_split(tmp_path, [write_shard(tmp_path / "sound.arrow", rows, rows)])
    return tmp_path / "sound.arrow"


def read_in_child(shards: list[Path]) -> list[str]:
    """Read shards in a child process; return its message about each."""
    done = run_python("-c", READ, shards[0].parent / "lengths.npy", *shards)
    assert done.returncode == 0, (done.returncode, done.stdout[-300:], done.stderr[-2000:])
    lines = done.stdout.splitlines()
    assert len(lines) == len(shards), done.stderr[-2000:]
    return [line.partition(" ")[2] for line in lines]


def write(path: Path, *batches: dict[str, pa.Array], compression: str | None = None) -> None:
    first = pa.record_batch(batches[0])
    options = pa.ipc.IpcWriteOptions(compression=compression)
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, first.schema, options=options) as stream:
        for batch in batches:
            stream.write_batch(pa.record_batch(batch))


def lists(offsets: list[int], values: Any = None) -> pa.Array:
    numbers = pa.array(np.arange(10, 20, dtype=np.uint16) if values is None else values)
    return pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), numbers)


GOOD = lists([0, 2, 3, 6, 10])
COLUMNS: dict[str, dict[str, pa.Array]] = {
    "float ids": {"src": lists([0, 2, 3, 6, 10], np.arange(10, 20, dtype=np.float32)), "tgt": GOOD},
    "half ids": {"src": GOOD, "tgt": lists([0, 2, 3, 6, 10], np.arange(10, 20, dtype=np.float16))},
    "signed ids": {"src": lists([0, 2, 3, 6, 10], np.arange(-5, 5, dtype=np.int16)), "tgt": GOOD},
    "wide ids": {"src": lists([0, 2, 3, 6, 10], np.arange(10, 20, dtype=np.uint64)), "tgt": GOOD},
    "text": {"src": pa.array(["a", "b", "c", "d"]), "tgt": GOOD},
    "large lists": {"src": GOOD.cast(pa.large_list(pa.uint16())), "tgt": GOOD},
    "dictionary": {"src": pa.array(["a", "b", "a", "b"]).dictionary_encode(), "tgt": GOOD},
    "a column too many": {"src": GOOD, "tgt": GOOD, "more": GOOD},
    "a column too few": {"src": GOOD},
    "the other order": {"tgt": GOOD, "src": GOOD},
    "rows that are missing": {"src": pa.array([[10, 11], [12], None, [1]], pa.list_(pa.uint16())), "tgt": GOOD},
    "ids that are missing": {"src": pa.array([[10, None], [12], [3] * 3, [1] * 4], pa.list_(pa.uint16())), "tgt": GOOD},
    "an id beyond the vocabulary": {
        "src": GOOD,
        "tgt": lists([0, 2, 3, 6, 10], np.arange(11, 21, dtype=np.uint16)),
    },
}


# In place of those of the source, then of the target.
OFFSETS: dict[str, list[int]] = {
    "far beyond the values": [0, 2, 3, 6, 2**31 - 1],
    "one beyond the values": [0, 2, 3, 6, 11],
    "falling": [0, 2, 1, 6, 10],
    "negative": [-1000, 2, 3, 6, 10],
    "all elsewhere": [2**30, 2**30 + 2, 2**30 + 3, 2**30 + 6, 2**30 + 10],
    "shifted, of the stated lengths": [1, 3, 4, 7, 11],
    "negative, of the stated lengths": [-1, 1, 2, 5, 9],
}


def test_false_offsets_are_refused(sound: Path) -> None:
    """Without this check, training used other ids where offsets were clipped; elsewhere the process ended."""
    content, stated = sound.read_bytes(), np.array([0, 2, 3, 6, 10], dtype=np.int32).tobytes()
    assert content.count(stated) == 2
    shards = []
    for name, offsets in OFFSETS.items():
        for place in (content.index(stated), content.rindex(stated)):
            shards.append(sound.with_name(f"{name.replace(' ', '-')}-{place}.arrow"))
            false = np.array(offsets, dtype=np.int32).tobytes()
            shards[-1].write_bytes(content[:place] + false + content[place + len(stated) :])
    for shard, line in zip(shards, read_in_child(shards), strict=True):
        assert line.startswith("refused"), (shard, line)
        assert f"{shard} cannot be read as Arrow (" in line


def test_columns_that_are_not_those_of_a_shard_are_refused(sound: Path) -> None:
    shards = [sound]
    for number, columns in enumerate(COLUMNS.values()):
        shards.append(sound.with_name(f"{number}.arrow"))
        write(shards[-1], columns)
    shards.append(sound.with_name("two.arrow"))
    write(shards[-1], {"src": GOOD, "tgt": GOOD}, {"src": GOOD, "tgt": GOOD})
    shards.append(sound.with_name("none.arrow"))
    with pa.OSFile(str(shards[-1]), "wb") as sink, pa.ipc.new_stream(sink, pa.record_batch({"src": GOOD}).schema):
        pass
    first, *said = read_in_child(shards)
    values, lengths = list(range(10, 20)), [2, 1, 3, 4]
    assert first == f"read {[values, lengths, values, lengths]}"
    for name, line in zip([*COLUMNS, "two batches", "no batch"], said, strict=True):
        assert line.startswith("refused"), (name, line)
        assert "copy the data folder again" in line, (name, line)


def flip(content: bytes, place: int, bit: int) -> bytes:
    changed = bytearray(content)
    changed[place] ^= 1 << bit
    return bytes(changed)


def test_a_flipped_bit_in_the_numbers_of_the_metadata_ends_no_process(sound: Path) -> None:
    """Lengths, offsets and counts that Arrow's header states: each bit of each byte of it in turn, one in four."""
    content = sound.read_bytes()
    places = [(place, bit) for place in range(len(content)) for bit in range(8)]
    shards = []
    for number, (place, bit) in enumerate(places[1::4]):
        shards.append(sound.with_name(f"{number}.arrow"))
        shards[-1].write_bytes(flip(content, place, bit))
    said = [line for start in range(0, len(shards), 1000) for line in read_in_child(shards[start : start + 1000])]
    assert len(said) > 1000
    # What is read is within the vocabulary, and as long as the lengths say.
    refused = sum(line.startswith("refused") for line in said)
    assert refused > len(said) / 10
    assert all("[2, 1, 3, 4]" in line for line in said if line.startswith("read"))
