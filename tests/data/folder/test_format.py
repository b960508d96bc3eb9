import json
import os
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest

from dist_transformer.base.errors import UserError
from dist_transformer.data.folder.format import (
    TokenLists,
    copy_rows,
    write_shard,
    write_split,
)
from dist_transformer.data.folder.reader import DataFolder
from dist_transformer.data.folder.split import Split
from tests.data.folder.conftest import SOURCES, TARGETS, make_split


def edit_index(folder: Path, **changes: Any) -> None:
    content = json.loads((folder / "index.json").read_text())
    (folder / "index.json").write_text(json.dumps(content | changes))


def test_index_counts_the_special_tokens(folder: Path) -> None:
    index = DataFolder.open(folder).index
    # 2 + 1 source ids in 2 pairs, 3 + 1 + 2 in 3 pairs, one special token a pair.
    assert [(s.pairs, s.source_tokens, s.target_tokens) for s in index.train.shards] == [(2, 5, 3), (3, 9, 10)]
    assert (index.train.pairs, index.train.source_tokens, index.train.target_tokens) == (5, 14, 13)
    assert (index.train.max_source_tokens, index.train.max_target_tokens) == (4, 5)


def test_lengths_are_in_shard_order(folder: Path) -> None:
    train = DataFolder.open(folder).train
    assert train.lengths.dtype == np.uint16
    assert train.lengths.tolist() == [[3, 2], [2, 1], [4, 3], [2, 5], [3, 2]]
    assert train.shard_starts.tolist() == [0, 2, 5]


@pytest.mark.parametrize("dtype", [np.uint16, np.uint32])
def test_datasets_opens_a_shard_as_it_is(tmp_path: Path, dtype: Any) -> None:
    make_split(tmp_path / "split", "train", dtype)
    dataset = datasets.Dataset.from_file(str(tmp_path / "split/train-00001.arrow"))
    assert dataset["src"][:] == SOURCES[1]
    assert dataset["tgt"][:] == TARGETS[1]
    assert dataset.features["src"].feature.dtype == np.dtype(dtype).name
    assert len(dataset.data.to_batches()) == 1


def test_tokens_come_in_the_order_asked_for_across_shards(folder: Path) -> None:
    train = DataFolder.open(folder).train
    source, source_lengths, target, target_lengths = train.tokens(np.array([4, 0, 3, 1, 2], dtype=np.uint32))
    assert source.tolist() == [17, 18, 10, 11, 16, 12, 13, 14, 15]
    assert source_lengths.tolist() == [2, 2, 1, 1, 3]
    assert target.tolist() == [27, 20, 23, 24, 25, 26, 21, 22]
    assert target_lengths.tolist() == [1, 1, 4, 0, 2]
    assert {array.dtype for array in (source, source_lengths, target, target_lengths)} == {np.dtype(np.int64)}
    assert [array.tolist() for array in train.tokens(np.array([1, 1]))] == [[12, 12], [1, 1], [], [0, 0]]
    assert [array.size for array in train.tokens(np.array([], dtype=np.int64))] == [0, 0, 0, 0]
    for wrong in (-1, 5):
        with pytest.raises(IndexError):
            train.tokens(np.array([0, wrong]))


def test_lengths_beyond_uint16_are_kept(tmp_path: Path) -> None:
    lists = TokenLists.from_lists([list(range(65_535)), [5]], np.uint32)
    info = write_split(tmp_path, [write_shard(tmp_path / "train-00000.arrow", lists, lists)])
    split = Split(tmp_path, info)
    assert split.lengths.dtype == np.uint32
    assert split.lengths.tolist() == [[65_536, 65_536], [2, 2]]
    assert split.tokens(np.array([1]))[0].tolist() == [5]


@pytest.mark.parametrize("side", ["source", "target"])
def test_validation_text_that_changed_after_opening_is_found(folder: Path, side: str) -> None:
    data = DataFolder.open(folder)
    text = (folder / f"valid/{side}.txt").read_bytes()
    (folder / f"valid/{side}.txt").write_bytes(text.swapcase())
    with pytest.raises(
        UserError, match=rf"{side}\.txt is damaged \(its SHA-256 is not what index\.json states\): copy"
    ):
        data.valid_text()


def test_valid_text_is_untouched(folder: Path) -> None:
    assert DataFolder.open(folder).valid_text() == (["one\u2028\r", " two"], ["eins", "zwei"])


def test_tokenizer_of_the_folder(folder: Path) -> None:
    data = DataFolder.open(folder)
    assert data.tokenizer().sha256 == data.index.tokenizer_sha256
    index = folder / "index.json"
    index.write_text(index.read_text().replace('"vocab_size": 2', '"vocab_size": 3'))
    with pytest.raises(UserError, match=r"index\.json is damaged \(it states other sizes of the vocabulary\)"):
        DataFolder.open(folder).tokenizer()


FILES = ["train-00001.arrow", "lengths.npy", "tokenizer.json", "valid/source.txt", "valid/target.txt"]
FILES += ["valid/valid-00000.arrow", "valid/lengths.npy"]


@pytest.mark.parametrize("name", FILES)
def test_one_flipped_bit_is_found_and_the_file_named(folder: Path, name: str) -> None:
    content = bytearray((folder / name).read_bytes())
    content[-1] ^= 1
    (folder / name).write_bytes(content)
    with pytest.raises(UserError, match=f"{name} is damaged.* prepare it again"):
        DataFolder.open(folder).verify()


@pytest.mark.parametrize("name", [*FILES, "index.json"])
def test_missing_file_is_named_at_opening(folder: Path, name: str) -> None:
    (folder / name).unlink()
    with pytest.raises(UserError, match=name):
        DataFolder.open(folder)


@pytest.mark.parametrize("name", ["train-00000.arrow", "lengths.npy", "valid/valid-00001.arrow"])
def test_truncated_file_is_named_at_opening(folder: Path, name: str) -> None:
    os.truncate(folder / name, (folder / name).stat().st_size - 1)
    with pytest.raises(UserError, match=name):
        DataFolder.open(folder)


def damage(shard: Path, kind: str) -> None:
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 8
    if kind == "flipped":
        shard.write_bytes(content)
    elif kind == "cut short":
        os.truncate(shard, len(content) - 1)
    elif kind == "missing":
        shard.unlink()


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("flipped", r"is damaged \(its SHA-256 is not what index\.json states\): copy the data folder"),
        ("cut short", r"is damaged .*: copy the data folder again"),
        ("missing", r"cannot be read \(No such file or directory\): copy the data folder again"),
    ],
)
def test_a_shard_that_went_bad_after_opening_is_found_at_its_first_use(folder: Path, kind: str, message: str) -> None:
    """And no other shard is. A run may continue without it."""
    train = DataFolder.open(folder).train
    damage(folder / "train-00001.arrow", kind)
    assert DataFolder.open(folder, shards_may_be_bad=True).train.hold([0, 1]).keys() == {1}
    assert train.tokens(np.array([0]))[0].tolist() == [10, 11]
    with pytest.raises(UserError, match=rf"train-00001\.arrow {message}"):
        train.tokens(np.array([4]))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_target_tokens": 1}, r"lengths\.npy does not hold the pairs that index\.json states"),
        ({"sha256": "0" * 64}, r"train-00000\.arrow is damaged"),
        ({"bytes": 7}, r"train-00000\.arrow has \d+ bytes, but the index states 7"),
    ],
)
def test_a_damaged_index_is_found_before_a_batch_is_made(folder: Path, changes: dict[str, Any], message: str) -> None:
    train = json.loads((folder / "index.json").read_text())["train"]
    (train if "max_target_tokens" in changes else train["shards"][0]).update(changes)
    edit_index(folder, train=train)
    with pytest.raises(UserError, match=rf"{message}.*: copy the data folder again"):
        DataFolder.open(folder).train.tokens(np.array([0]))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"format_version": 2}, "has format version 2, but this program reads 1: upgrade"),
        ({"vocab_size": "300"}, "vocab_size in INDEX must be int, not '300'"),
        ({"extra": 1}, "unknown setting 'extra'"),
    ],
)
def test_bad_index_names_the_field(folder: Path, changes: dict[str, Any], message: str) -> None:
    edit_index(folder, **changes)
    with pytest.raises(UserError) as caught:
        DataFolder.open(folder)
    assert message.replace("INDEX", str(folder / "index.json")) in str(caught.value)
    assert "index.json" in str(caught.value)


def test_folder_that_is_no_data_folder(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is not a data folder"):
        DataFolder.open(tmp_path)
    (tmp_path / "index.json").write_text("{")
    with pytest.raises(UserError, match=r"index\.json is not JSON"):
        DataFolder.open(tmp_path)


def test_rows_of_several_lists_are_copied_to_their_places() -> None:
    narrow = TokenLists.from_lists([[1, 2], [], [3]], np.uint16)
    wide = TokenLists.from_lists([[70_000, 5, 6]], np.uint32)
    parts = [(narrow, np.array([2, 1, 0])), (wide, np.array([0])), (narrow, np.array([], dtype=np.int64))]
    out = np.full(8, -1)
    copy_rows(parts, np.array([1, 0, 2, 3]), out, np.array([7, 0, 4, 0]))
    assert out.tolist() == [70_000, 5, 6, -1, 1, 2, -1, 3]
    assert narrow.take(np.array([2, 1, 0, 2])).lengths.tolist() == [1, 0, 2, 1]
    assert narrow.take(np.array([1, 1])).values.tolist() == []
