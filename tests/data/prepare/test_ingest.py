"""Sources to chunks, and what is asked of all of them."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dist_transformer.base.errors import UserError
from dist_transformer.data.prepare import encode, ingest
from dist_transformer.data.prepare import pipeline as module
from dist_transformer.data.prepare.ingest import pair_hash
from dist_transformer.data.text.lines import LONGEST_LINE
from dist_transformer.data.text.pairs import TsvFile, line_files
from dist_transformer.data.text.toy_corpus import make_toy_corpus
from tests.data.prepare.preparing import corpus, files_of, run, with_validation, write_pairs


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
        # Neither the source side counts nor what both rules change; the most frequent character is the example.
        pairs = [(f"number {i}！", "x\u00a0e\u0301\u3000") for i in range(200 - full_width)]
        pairs += [(f"one more {i}", "好，" if i else "好！") for i in range(full_width)]
        _, report = run(tmp_path, pairs, f"{full_width}-{len(changes)}", **changes)
        return [line for line in report if "warning" in line]

    assert warnings(2) == []
    assert warnings(3) == [
        "warning: NFKC changes 1.5% of the target lines, for example '，' -> ',': --normalization clean-nfc keeps them"
    ]
    assert warnings(199, normalization="clean-nfc") == []


TRACES = [
    ("don &apos;t &quot; go", "source lines have escapes such as &apos;: unescape them first"),
    ("tr@@ ans@@ form", "source lines have pieces of BPE (@@): join them first (sed -E 's/@@( |$)//g')"),
    ("well @-@ known", "source lines are tokenised by Moses (@-@): detokenise them first (sacremoses detokenize)"),
    ("▁a ▁dog", "source lines have pieces of SentencePiece (▁): join them first (spm_decode)"),
]


@pytest.mark.parametrize(("text", "sentence"), TRACES)
def test_text_of_another_program_is_said_above_a_hundredth(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, sentence: str
) -> None:
    monkeypatch.setattr(module, "CHUNK_PAIRS", 70)

    def warnings(odd: int, valid: list[tuple[str, str]]) -> list[str]:
        pairs = corpus(200 - odd) + [(f"{text} {i}", "a & b; c@d.org @ 5 @@x") for i in range(odd)]
        _, report = run(tmp_path, pairs, f"{odd}-{len(valid)}", **with_validation(tmp_path, valid))
        return [line for line in report if "warning" in line]

    assert warnings(2, corpus(20)) == []
    assert warnings(3, corpus(20)) == [f"warning: 1.5% of the {sentence}"]
    assert warnings(0, [(text, "a"), ("b", text), ("c", "d")]) == [
        f"warning: 33.3% of the validation {sentence}",
        f"warning: 33.3% of the validation {sentence.replace('source', 'target', 1)}",
    ]


def test_swapped_validation_files_are_said(tmp_path: Path) -> None:
    texts = make_toy_corpus(train_pairs=1_000, valid_pairs=60, test_pairs=1)
    languages = {"source_language": "en", "target_language": "de"}
    swapped = [(target, source) for source, target in texts.valid]
    for valid, sides in ((texts.valid, []), (swapped, ["source", "target"])):
        _, report = run(tmp_path, texts.train, f"{sides}", **languages, **with_validation(tmp_path, valid))
        assert [line for line in report if "warning" in line] == [
            f"warning: the validation {side} text looks like the {other} text of the training: check whether "
            "--valid-src and --valid-tgt, or --src and --tgt, are swapped"
            for side, other in zip(sides, reversed(sides), strict=True)
        ]


@pytest.mark.parametrize("count", [0, 1])
def test_too_little_text(tmp_path: Path, count: int) -> None:
    with pytest.raises(UserError, match="fewer than two pairs"):
        run(tmp_path, corpus(count))
    with pytest.raises(UserError, match=r"validation text \(valid\.en \+ valid\.de\) has no pair"):
        run(tmp_path, corpus(20), **with_validation(tmp_path, [("", "x")] * count))


def test_chunks_end_by_their_text_too_and_do_not_show_in_the_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(tmp_path, corpus(200), "one")
    chunks: list[int] = []
    monkeypatch.setattr(ingest, "CHUNK_CHARACTERS", 1_000)
    write_batch = ingest.shards.write_batch
    monkeypatch.setattr(
        ingest.shards,
        "write_batch",
        lambda path, columns: (
            chunks.append(len(next(iter(columns.values())))) if path.name.startswith("text-") else None,
            write_batch(path, columns),
        )[1],
    )
    run(tmp_path, corpus(200), "two")
    assert sum(chunks) == 200
    assert max(chunks) < 30
    assert files_of(tmp_path / "one") == files_of(tmp_path / "two")


def test_pairs_with_a_long_line_are_dropped_and_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    long = "a" * (LONGEST_LINE + 1)
    pairs = [*corpus(30), (long, "x"), *corpus(40)[30:], ("y", long)]
    one, report = run(tmp_path, pairs, "one", **with_validation(tmp_path, [("v", "w"), (long, "w")]))
    assert one.pairs_read == 42
    assert one.dropped == {"empty": 0, "too_long": 0, "length_ratio": 0, "in_validation": 0, "long_line": 2}
    assert one.train.pairs == 40
    assert one.valid_dropped == {"empty": 0, "too_long": 0, "long_line": 1}
    assert "0 in_validation, 2 long_line" in "\n".join(report)
    monkeypatch.setattr(module, "CHUNK_PAIRS", 7)
    run(tmp_path, pairs, "two", **with_validation(tmp_path, [("v", "w"), (long, "w")]))
    assert files_of(tmp_path / "one") == files_of(tmp_path / "two")


def test_texts_are_encoded_in_blocks_of_few_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encode, "_ENCODE_ROWS", 3)
    monkeypatch.setattr(encode, "_ENCODE_BYTES", 100)
    blocks = [(block.start, block.stop) for block in encode._blocks(np.array([1, 1, 1, 1, 90, 90, -1, 500, 1]))]
    assert blocks[0] == (0, 3)
    assert [first for first, _ in blocks[1:]] == [stop for _, stop in blocks[:-1]]
    assert blocks[-1][1] == 9
    assert max(stop - first for first, stop in blocks) == 3
    assert [(block.start, block.stop) for block in encode._blocks(np.array([], dtype=np.int64))] == [(0, 0)]
