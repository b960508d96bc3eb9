"""The vocabulary, and which pairs stay."""

import dataclasses
import re
import unicodedata
from pathlib import Path

import numpy as np
import pytest

from dist_transformer.base.errors import UserError
from dist_transformer.config.settings import BatchConfig, DataConfig
from dist_transformer.data.folder.format import write_index
from dist_transformer.data.folder.reader import DataFolder
from dist_transformer.data.loading.loader import open_training_data
from dist_transformer.data.prepare import pipeline as module
from dist_transformer.data.prepare.ingest import pair_hash
from dist_transformer.data.vocabulary.byte_bpe import learn_byte_bpe
from tests.data.prepare.preparing import FULL_WIDTH, corpus, files_of, run, train_text, with_validation


def test_the_vocabulary_is_learned_from_a_seeded_sample(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pairs = corpus(1_000)
    valid = with_validation(tmp_path, corpus(5))
    # Of 1,000 pairs each is taken with probability 0.2 when 200 are asked for.
    chosen = pair_hash(np.arange(1_000), seed=1, purpose=3) < 2**64 // 5
    texts = [text for pair, taken in zip(pairs, chosen, strict=True) if taken for text in pair]
    expected = learn_byte_bpe(texts, vocab_size=400)
    _, report = run(tmp_path, pairs, "one", vocab_sample_pairs=200, **valid)
    monkeypatch.setattr(module, "CHUNK_PAIRS", 77)
    run(tmp_path, pairs, "two", vocab_sample_pairs=200, **valid)
    assert files_of(tmp_path / "one") == files_of(tmp_path / "two")
    assert (tmp_path / "one/tokenizer.json").read_bytes() == files_of(tmp_path / "two")["tokenizer.json"]
    assert DataFolder.open(tmp_path / "one").index.tokenizer_sha256 == expected.sha256
    assert f", learned from a sample of {chosen.sum()} of 1,000 pairs" in "\n".join(report)
    # No sample is drawn, and none spoken of, where there are no more pairs than that.
    _, report = run(tmp_path, pairs, "all", vocab_sample_pairs=1_000, **valid)
    everything = learn_byte_bpe([text for pair in pairs for text in pair], vocab_size=400)
    assert DataFolder.open(tmp_path / "all").index.tokenizer_sha256 == everything.sha256 != expected.sha256
    assert "sample" not in "\n".join(report)


def test_sources_of_several_sentences_are_counted_among_the_kept_pairs(tmp_path: Path) -> None:
    """A run over several folders takes their mean; of a folder that does not state it, the validation text counts."""
    two = [(f"It is w{i}. We stay.", f"Wort {i}") for i in range(30)]
    valid = with_validation(tmp_path, [*two[:1], *corpus(3)])
    index, _ = run(tmp_path, [*corpus(70), *two, ("A. B. C", ""), ("Is it? " * 99, "zu lang")], "new", **valid)
    # One pair is in the validation text.
    assert (index.several_sentences, index.train.pairs) == (29, 29 + 67)
    run(tmp_path, corpus(60), "old", tokenizer=tmp_path / "new/tokenizer.json", **valid)
    old = DataFolder.open(tmp_path / "old").index
    assert old.several_sentences == 0
    write_index(tmp_path / "old", dataclasses.replace(old, several_sentences=None))
    lines = [weight * one.train.pairs / one.train.target_tokens for weight, one in ((1, index), (3, old))]
    mean = (lines[0] * 29 / 96 + lines[1] * 0.25) / sum(lines)
    for names, weights, share in ((["new"], (), 29 / 96), (["old"], (), 0.25), (["new", "old"], (1.0, 3.0), mean)):
        corpora = DataConfig(data=tuple(str(tmp_path / name) for name in names), data_weights=weights)
        assert open_training_data(corpora, BatchConfig(), seed=1).several_sentences() == pytest.approx(share)


def test_smaller_vocabulary_is_reported(tmp_path: Path) -> None:
    index, report = run(tmp_path, corpus(20), vocab_size=5_000)
    assert index.vocab_size < 5_000
    assert f"vocabulary: {index.vocab_size:,} entries" in "\n".join(report)
    assert "fewer than the requested 5,000" in "\n".join(report)


def test_pairs_are_dropped_for_the_reason_stated(tmp_path: Path) -> None:
    # With a vocabulary of the 256 bytes alone, tokens are bytes.
    pairs = [
        ("a" * 15, "b" * 15),  # 16 tokens a side with the special one: kept
        ("a" * 16, "b" * 15),  # 17: too long
        ("a", "b" * 13),  # (13 + 5) / (1 + 5) = 3: kept
        ("a", "b" * 14),  # 19 / 6: ratio
        ("b" * 14, "a"),
        ("", "b"),
        ("a", " \t"),
        ("", ""),
    ]
    valid = [("a" * 200, "x"), ("y", "z"), ("", "z"), ("a" * 15, "c" * 15)]
    index, report = run(tmp_path, pairs, vocab_size=260, max_tokens=16, **with_validation(tmp_path, valid))
    assert index.dropped == {"empty": 3, "too_long": 1, "length_ratio": 2, "in_validation": 0}
    assert (index.pairs_read, index.train.pairs) == (8, 2)
    assert (index.train.source_tokens, index.train.target_tokens) == (16 + 2, 16 + 14)
    data = DataFolder.open(tmp_path / "out")
    assert sorted(train_text(data)) == [("a", "b" * 13), ("a" * 15, "b" * 15)]
    # Validation text is kept in full but for empty sides; its shards hold what fits, in order.
    assert data.valid_text() == (["a" * 200, "y", "a" * 15], ["x", "z", "c" * 15])
    assert data.valid.lengths.tolist() == [[2, 2], [16, 16]]
    assert index.valid_dropped == {"empty": 1, "too_long": 1}
    assert not index.valid_held_out
    assert "kept: 2 of 8 pairs; dropped 3 empty, 1 too_long, 2 length_ratio, 0 in_validation" in "\n".join(report)


def test_normalised_text_is_trained_on_and_raw_text_kept(tmp_path: Path) -> None:
    pairs = [("  ﬁne Ｘ </s>", "½ e\u0301\u2028x")] * 40
    run(tmp_path, pairs, keep_overlap=True)
    data = DataFolder.open(tmp_path / "out")
    expected = (unicodedata.normalize("NFKC", text.replace("\u2028", " ")) for text in pairs[0])
    assert set(train_text(data)) == {tuple(expected)}
    assert data.valid_text() == ([pairs[0][0]] * 4, [pairs[0][1]] * 4)


def test_lowercase_and_reuse_of_a_tokenizer(tmp_path: Path) -> None:
    index, _ = run(tmp_path, corpus(50), "first", lowercase=True)
    assert index.lowercase
    tokenizer = tmp_path / "first/tokenizer.json"
    again, report = run(tmp_path, corpus(30), "second", tokenizer=tokenizer, vocab_size=999)
    assert again.lowercase
    assert again.tokenizer_sha256 == index.tokenizer_sha256
    assert "lowercase, --vocab-size has no effect" in report[0]
    assert "tokenizer.json, clean text, NFKC, lowercase, " in report[0]
    assert {target[:4] for _, target in train_text(DataFolder.open(tmp_path / "second"))} == {"wort"}
    run(tmp_path, corpus(50), "cased")
    with pytest.raises(UserError, match="keeps case, which excludes lowercase"):
        run(tmp_path, corpus(50), "third", tokenizer=tmp_path / "cased/tokenizer.json", lowercase=True)


INVISIBLE = "\u200b\u00ad\u2060\u200e\ufe0f\x00"


def test_lines_of_invisible_characters_are_empty(tmp_path: Path) -> None:
    planted = [(INVISIBLE, "x"), ("x", f" {INVISIBLE}\t"), ("\u200c", "x"), ("x", "\ufeff")]
    hidden = [(f"\ufeffword {i}", f"Wo\u00adrt\u00a0{i}") for i in range(40)]
    changes = {**with_validation(tmp_path, [("a", "b"), *planted[:3]]), "max_length_ratio": 100.0}
    index, _ = run(tmp_path, [*planted, *hidden], **changes)
    assert (index.dropped["empty"], index.train.pairs) == (4, 40)
    assert index.valid_dropped["empty"] == 3
    assert set(train_text(DataFolder.open(tmp_path / "out"))) == {(f"word {i}", f"Wort {i}") for i in range(40)}
    # A stored vocabulary keeps its rule, and so do the pairs that it prepares.
    run(tmp_path, hidden, "stored", normalization="nfkc")
    changes["tokenizer"] = tmp_path / "stored/tokenizer.json"
    index, _ = run(tmp_path, [*planted, *hidden], "former", **changes)
    assert (index.dropped["empty"], index.valid_dropped["empty"]) == (0, 0)
    assert planted[-1] in train_text(DataFolder.open(tmp_path / "former"))


def test_held_out_pairs_have_text_that_is_seen(tmp_path: Path) -> None:
    index, _ = run(tmp_path, [(INVISIBLE, "x")] * 180 + corpus(20))
    assert (index.valid_text.pairs, index.dropped["empty"]) == (2, 180)
    assert index.valid.pairs == 2


def test_nfc_keeps_full_width_forms(tmp_path: Path) -> None:
    pairs = [FULL_WIDTH] * 40
    _, report = run(tmp_path, pairs, "folded", keep_overlap=True)
    assert set(train_text(DataFolder.open(tmp_path / "folded"))) == {("a dog, a cat", "一条狗,一只猫!")}
    assert any(re.fullmatch("vocabulary: .* entries, byte-level BPE, clean text, NFKC(;.*)?", line) for line in report)
    _, report = run(tmp_path, pairs, "kept", normalization="nfc", lowercase=True, keep_overlap=True)
    data = DataFolder.open(tmp_path / "kept")
    assert set(train_text(data)) == {FULL_WIDTH}
    assert (data.tokenizer().normalization, data.tokenizer().lowercase) == ("nfc", True)
    assert any(re.fullmatch("vocabulary: .* entries, byte-level BPE, NFC, lowercase(;.*)?", line) for line in report)


def test_a_given_tokenizer_decides_the_normalisation(tmp_path: Path) -> None:
    pairs = [FULL_WIDTH] * 40
    for name in ("nfkc", "nfc"):
        run(tmp_path, pairs, name, normalization=name, keep_overlap=True)
    run(tmp_path, pairs, "again", tokenizer=tmp_path / "nfc/tokenizer.json", keep_overlap=True)
    assert set(train_text(DataFolder.open(tmp_path / "again"))) == {FULL_WIDTH}
    for name, other in (("nfkc", "nfc"), ("nfc", "nfkc"), ("nfkc", "clean")):
        message = f"has the normalization {name}, which excludes {other}: leave out --normalization"
        with pytest.raises(UserError, match=message):
            run(
                tmp_path,
                pairs,
                "bad",
                tokenizer=tmp_path / name / "tokenizer.json",
                normalization=other,
                keep_overlap=True,
            )
    _, report = run(tmp_path, pairs, "warned", tokenizer=tmp_path / "nfkc/tokenizer.json", keep_overlap=True)
    (warning,) = [line for line in report if "warning" in line]
    assert warning.endswith(": --normalization clean-nfc keeps them, without --tokenizer")
