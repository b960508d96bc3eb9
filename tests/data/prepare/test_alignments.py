"""Preparation with alignments: the links of tokens in the shards."""

from pathlib import Path
from typing import Any

import pytest

from dist_transformer.data.folder.format import read_shard
from dist_transformer.data.folder.reader import DataFolder
from dist_transformer.data.text.pairs import line_files
from tests.data.prepare.preparing import run, write_pairs

# A word is one letter, several times, and its translation is the same one; the order is reversed.
WORDS = ["aaaa", "bbbbb", "ccc", "dddd.", "eeeee", "fff,", "gggg", "hhh"]


def aligned(folder: Path, count: int = 60) -> Any:
    """Pairs of 4 words, of which the second one is linked to nothing."""
    chosen = [[WORDS[(i * step + i // 8) % 8] for step in (1, 3, 5, 7)] for i in range(count)]
    pairs = [(" ".join(words), " ".join(reversed(words))) for words in chosen]
    files = write_pairs(folder, "train", pairs)
    links = folder / "train.links"
    links.write_text("0-3 2-1 3-0\n" * count)
    return pairs, tuple(line_files(files[:1], files[1:], [links]))


def letters(text: str) -> set[str]:
    return {*filter(str.isalpha, text.lower())}


@pytest.mark.parametrize("vocabulary", ["byte-bpe", "sentencepiece-bpe"])
@pytest.mark.parametrize("tags", [(), ("<2de>",)])
def test_tokens_are_linked_in_every_variant(tmp_path: Path, vocabulary: str, tags: tuple[str, ...]) -> None:
    """The two texts of a link have the same letter, whatever the segmentation and the change of the texts."""
    pairs, sources = aligned(tmp_path)
    changes = ("upper:0.2", "title:0.1", "typos:0.2", "punctuation:0.1", "copy:0.3")
    index, _ = run(
        *(tmp_path, pairs),
        sources=sources,
        vocabulary=vocabulary,
        vocab_size=300,
        segmentations=3,
        segmentation_dropout=0.3,
        augment=changes,
        placeholders=2,
        tags=tags,
        source_tags=tags,
        valid_pairs=2,
        keep_overlap=True,
        pairs_per_shard=20,
    )
    data = DataFolder.open(tmp_path / "out")
    data.verify()
    tokenizer, unlinked, marks = data.tokenizer().source, 0, 0
    assert index.aligned
    for shard in index.train.shards:
        for source, target, links in zip(*(c.to_lists() for c in read_shard(data.path / shard.file)), strict=True):
            assert len(links) == len(target)
            for token, link in zip(target, links, strict=True):
                if tokenizer.tag_of(token) is not None:
                    assert source[link - 1] == token
                    marks += 1
                elif link:
                    one, other = (letters(tokenizer.piece_text(each)) for each in (source[link - 1], token))
                    # A piece may be a byte or a space.
                    assert one & other or not (one and other), (source, target, links)
                else:
                    unlinked += 1
    assert marks > 20
    assert 0.1 < unlinked / sum(shard.target_tokens for shard in index.train.shards) < 0.6


def test_without_alignments_nothing_changes(tmp_path: Path) -> None:
    pairs, sources = aligned(tmp_path)
    run(tmp_path, pairs, "plain")
    run(tmp_path, pairs, "aligned", sources=sources)
    assert '"aligned"' not in (tmp_path / "plain/index.json").read_text()
    (shard,), (other,) = (sorted((tmp_path / name).glob("*.arrow")) for name in ("plain", "aligned"))
    for one, same in zip(read_shard(shard), read_shard(other), strict=False):
        assert one.to_lists() == same.to_lists()
    assert len(read_shard(shard)) == 2
