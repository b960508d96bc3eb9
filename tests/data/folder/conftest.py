"""A data folder of hand-written ids."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dist_transformer.base.files import sha256_of
from dist_transformer.data.folder import format as shards
from dist_transformer.data.folder.format import (
    FORMAT_VERSION,
    DataIndex,
    TextInfo,
    TokenLists,
    write_index,
    write_shard,
    write_split,
)
from dist_transformer.data.vocabulary.byte_bpe import learn_byte_bpe

# Two shards of hand-written ids; pair 1 has an empty target.
SOURCES = [[[10, 11], [12]], [[13, 14, 15], [16], [17, 18]]]
TARGETS = [[[20], []], [[21, 22], [23, 24, 25, 26], [27]]]


def make_split(folder: Path, name: str, dtype: Any = np.uint16) -> shards.SplitInfo:
    folder.mkdir(exist_ok=True)
    written = [
        write_shard(
            folder / f"{name}-{i:05}.arrow", TokenLists.from_lists(source, dtype), TokenLists.from_lists(target, dtype)
        )
        for i, (source, target) in enumerate(zip(SOURCES, TARGETS, strict=True))
    ]
    return write_split(folder, written)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "data"
    train = make_split(path, "train")
    valid = make_split(path / "valid", "valid")
    tokenizer = learn_byte_bpe(["a b"], vocab_size=300)
    tokenizer.save(path / "tokenizer.json")
    (path / "valid/source.txt").write_bytes("one\u2028\r\n two\n".encode())
    (path / "valid/target.txt").write_bytes(b"eins\nzwei\n")
    index = DataIndex(
        format_version=FORMAT_VERSION,
        corpus="hand-written",
        synthetic=True,
        source_language="en",
        target_language="de",
        lowercase=False,
        tokenizer_sha256=tokenizer.sha256,
        vocab_size=tokenizer.vocab_size,
        sources=("a",),
        seed=1,
        max_tokens=256,
        max_length_ratio=3.0,
        pairs_per_shard=3,
        pairs_read=5,
        dropped={"empty": 0},
        overlap=0,
        repeats=0,
        valid_held_out=False,
        valid_dropped={"empty": 0},
        valid_text=TextInfo(
            pairs=2,
            source_sha256=sha256_of(path / "valid/source.txt"),
            target_sha256=sha256_of(path / "valid/target.txt"),
        ),
        train=train,
        valid=valid,
    )
    write_index(path, index)
    return path
