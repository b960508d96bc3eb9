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
    TextInfo,
    TokenLists,
    write_index,
    write_shard,
    write_split,
)
from dist_transformer.data.folder.reader import DataFolder


def write_subset(folder: DataFolder, pair_ids: np.ndarray, out: Path) -> None:
    """Write the given training pairs to the data folder `out`; its validation set has the same pairs."""
    values_and_lengths = folder.train.tokens(pair_ids)
    sides = [
        TokenLists(values.astype(np.uint32), np.concatenate([[0], np.cumsum(lengths)]))
        for values, lengths in zip(values_and_lengths[::2], values_and_lengths[1::2], strict=True)
    ]
    vocabulary, texts = folder.tokenizer(), sides[:2]
    if folder.index.aligned:
        links, starts = np.zeros(len(sides[1].values), dtype=np.uint32), sides[1].offsets
        folder.train.copy_links(pair_ids, links, starts[:-1])
        sides.append(TokenLists(links, starts))
    splits = []
    for place in (out, out / VALID_FOLDER):
        make_folder(place)
        splits.append(write_split(place, [write_shard(place / "train-00000.arrow", *sides)]))
    vocabulary.save(out / TOKENIZER_FILE)
    files = [out / VALID_FOLDER / name for name in (VALID_SOURCE_FILE, VALID_TARGET_FILE)]
    for file, side, tokenizer in zip(files, texts, (vocabulary.source, vocabulary.target), strict=True):
        rows = np.split(side.values, side.offsets[1:-1])
        write_file(file, "".join(" ".join(tokenizer.decode(row.tolist()).splitlines()) + "\n" for row in rows))
    train, valid = splits
    hashes = map(sha256_of, files)
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
        valid_text=TextInfo(pairs=valid.pairs, source_sha256=next(hashes), target_sha256=next(hashes)),
        train=train,
        valid=valid,
    )
    write_index(out, index)
