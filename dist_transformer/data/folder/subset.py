"""Write a small data folder with some training pairs of another one, on which `--test-mode` trains."""

import dataclasses
from pathlib import Path

import numpy as np

from dist_transformer.base.files import make_folder, sha256_of, write_file
from dist_transformer.data.folder.format import (
    TOKENIZER_FILE,
    VALID_FOLDER,
    VALID_SOURCE_FILE,
    VALID_TARGET_FILE,
    SplitInfo,
    TextInfo,
    TokenLists,
    write_index,
    write_shard,
    write_split,
)
from dist_transformer.data.folder.reader import DataFolder


def write_subset(folder: DataFolder, pair_ids: np.ndarray, out: Path) -> None:
    """Write the given training pairs to the data folder `out`; its validation set has the same pairs."""
    source_values, source_lengths, target_values, target_lengths = folder.train.tokens(pair_ids)
    sides = [_token_lists(source_values, source_lengths), _token_lists(target_values, target_lengths)]
    splits = []
    for place in (out, out / VALID_FOLDER):
        make_folder(place)
        splits.append(write_split(place, [write_shard(place / "train-00000.arrow", *sides)]))
    vocabulary = folder.tokenizer()
    vocabulary.save(out / TOKENIZER_FILE)
    files = [out / VALID_FOLDER / name for name in (VALID_SOURCE_FILE, VALID_TARGET_FILE)]
    for file, side, tokenizer in zip(files, sides, (vocabulary.source, vocabulary.target), strict=True):
        rows = (side.values[start:stop] for start, stop in zip(side.offsets[:-1], side.offsets[1:], strict=True))
        lines = (" ".join(tokenizer.decode(row.tolist()).splitlines()) for row in rows)
        write_file(file, "".join(f"{line}\n" for line in lines))
    _write_index(folder, out, train=splits[0], valid=splits[1], text_hashes=[sha256_of(file) for file in files])


def _token_lists(values: np.ndarray, lengths: np.ndarray) -> TokenLists:
    return TokenLists(values.astype(np.uint32), np.concatenate([[0], np.cumsum(lengths)]))


def _write_index(folder: DataFolder, out: Path, *, train: SplitInfo, valid: SplitInfo, text_hashes: list[str]) -> None:
    text = TextInfo(pairs=valid.pairs, source_sha256=text_hashes[0], target_sha256=text_hashes[1])
    index = dataclasses.replace(
        folder.index,
        corpus=f"{train.pairs:,} pairs of {folder.index.corpus}",
        pairs_read=train.pairs,
        dropped={},
        overlap=0,
        repeats=0,
        several_sentences=None,
        valid_dropped={},
        valid_held_out=False,
        valid_text=text,
        train=train,
        valid=valid,
    )
    write_index(out, index)
