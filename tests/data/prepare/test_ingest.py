"""Sources to chunks, and what is asked of all of them."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dist_transformer.data.prepare import pipeline as module
from dist_transformer.data.prepare.ingest import pair_hash
from dist_transformer.data.text.files import TsvFile, line_files
from dist_transformer.errors import UserError
from tests.data.prepare.preparing import corpus, run, with_validation, write_pairs


def test_pair_hash_is_splitmix64() -> None:
    # First outputs of the reference SplitMix64 started from 0 (java.util.SplittableRandom's generator).
    assert [hex(h) for h in pair_hash(np.arange(3), seed=0, purpose=0).tolist()] == [
        "0xe220a8397b1dcdaf",
        "0x6e789e6aa1b965f4",
        "0x6c45d188009454f",
    ]
    hashes = [pair_hash(np.arange(1_000), seed, purpose) for seed in (0, 1) for purpose in (1, 2)]
    assert len(np.unique(np.concatenate(hashes))) == 4_000


def test_several_sources_are_joined(tmp_path: Path) -> None:
    (tmp_path / "more.tsv").write_text("".join(f"{source}\t{target}\n" for source, target in corpus(40)[20:]))
    source, target = write_pairs(tmp_path, "train", corpus(20))
    index, _ = run(tmp_path, corpus(20), sources=(*line_files([source], [target]), TsvFile(path=tmp_path / "more.tsv")))
    assert index.sources == ("train.en + train.de", "more.tsv")
    assert index.pairs_read == 40
    assert (index.source_language, index.target_language) == ("en", "de")


def test_folding_of_more_than_a_hundredth_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CHUNK_PAIRS", 70)

    def warnings(full_width: int, **changes: Any) -> list[str]:
        # Neither the source side counts nor what both forms compose; the most frequent character is the example.
        pairs = [(f"number {i}！", "x e\u0301") for i in range(200 - full_width)]
        pairs += [(f"one more {i}", "好，" if i else "好！") for i in range(full_width)]
        _, report = run(tmp_path, pairs, f"{full_width}-{len(changes)}", **changes)
        return [line for line in report if "warning" in line]

    assert warnings(2) == []
    assert warnings(3) == [
        "warning: NFKC changes 1.5% of the target lines, for example '，' -> ',': --normalization nfc keeps them"
    ]
    assert warnings(199, normalization="nfc") == []


@pytest.mark.parametrize("count", [0, 1])
def test_too_little_text(tmp_path: Path, count: int) -> None:
    with pytest.raises(UserError, match="fewer than two pairs"):
        run(tmp_path, corpus(count))
    with pytest.raises(UserError, match=r"validation text \(valid\.en \+ valid\.de\) has no pair"):
        run(tmp_path, corpus(20), **with_validation(tmp_path, [("", "x")] * count))
