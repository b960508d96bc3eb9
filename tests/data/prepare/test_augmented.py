"""Preparation with pairs that are changed: which they are, and what becomes of them."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dist_transformer.base.errors import UserError
from dist_transformer.data.folder.reader import DataFolder
from dist_transformer.data.prepare import pipeline
from dist_transformer.data.vocabulary.placeholders import decode_marked, marks
from tests.data.prepare.preparing import corpus, files_of, run
from tests.data.prepare.test_segmentations import rows_of

PAIRS = corpus(200)
CHANGED: dict[str, Any] = {
    "augment": ("upper:0.3", "copy:0.3"),
    "placeholders": 4,
    "segmentations": 3,
    "segmented_side": "none",
    "pairs_per_shard": 50,
}


def variants_of(folder: Path, count: int) -> list[list[tuple[str, ...]]]:
    """Texts of all pairs, with marks, of each variant."""
    data = DataFolder.open(folder)
    pairs, tokenizer = data.train.info.pairs, data.tokenizer().source
    rows = [rows_of(data, np.arange(pairs) + pairs * number) for number in range(count)]
    return [[*zip(*([decode_marked(tokenizer, ids) for ids in side] for side in sides), strict=True)] for sides in rows]


def plain(text: str) -> str:
    for mark in marks(4):
        text = text.replace(mark, " ")
    return " ".join(text.split())


def test_shares_of_pairs_are_changed_otherwise_in_each_variant(tmp_path: Path) -> None:
    run(tmp_path, PAIRS, **CHANGED)
    variants = variants_of(tmp_path / "out", 3)
    assert len({tuple(rows) for rows in variants}) == 3
    count = len(variants[0])
    upper, copied = np.zeros(3, int), np.zeros(3, int)
    for pairs in zip(*variants, strict=True):
        known = {(plain(source).lower(), plain(target).lower()) for source, target in pairs}
        assert len(known) == 1
        for number, (source, target) in enumerate(pairs):
            assert source.isupper() == target.isupper()
            upper[number] += source.isupper()
            copied[number] += source != plain(source)
            assert sorted(set(source) & {*marks(4)}) == sorted(set(target) & {*marks(4)})
    # Three standard deviations of 0.3 are 0.1.
    assert (abs(upper / count - 0.3) < 0.1).all()
    assert (abs(copied / count - 0.3) < 0.1).all()


def test_the_result_does_not_depend_on_chunks_and_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run(tmp_path, PAIRS, "first", **CHANGED)
    monkeypatch.setattr(pipeline, "CHUNK_PAIRS", 7)
    run(tmp_path, PAIRS, "second", workers=2, **CHANGED)
    assert files_of(tmp_path / "first") == files_of(tmp_path / "second")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"augment": ("copy:0.1",)}, "augment copy needs placeholders in the vocabulary: set --placeholders"),
        ({"segmentations": 2, "segmented_side": "none"}, "segmented_side none leaves nothing to draw"),
        ({"placeholders": 33}, "placeholders .* 0 to 32"),
    ],
)
def test_settings_that_do_not_fit(tmp_path: Path, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        run(tmp_path, PAIRS, **settings)
