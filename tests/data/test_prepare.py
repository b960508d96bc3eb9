import json
import os
import re
import subprocess
import sys
import unicodedata
from collections import Counter
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import sacrebleu

from dist_transformer.data import encoding, shards
from dist_transformer.data import prepare as module
from dist_transformer.data.folder import DataFolder
from dist_transformer.data.prepare import prepare
from dist_transformer.data.prepare_settings import PrepareSettings
from dist_transformer.data.reading import pair_hash
from dist_transformer.data.shards import DataIndex
from dist_transformer.data.sources import TsvFile, line_files
from dist_transformer.data.tokenizer import train_tokenizer
from dist_transformer.errors import UserError

ROOT = Path(__file__).parents[2]


def corpus(count: int) -> list[tuple[str, str]]:
    """Pairs that are all different and of about equal length."""
    return [(f"word number {i} is here", f"Wort Nummer {i} ist da") for i in range(count)]


def write_pairs(folder: Path, name: str, pairs: list[tuple[str, str]]) -> tuple[Path, Path]:
    paths = folder / f"{name}.en", folder / f"{name}.de"
    for side, path in enumerate(paths):
        path.write_text("".join(f"{pair[side]}\n" for pair in pairs), encoding="utf-8", newline="\n")
    return paths


def run(folder: Path, pairs: list[tuple[str, str]], out: str = "out", **changes: Any) -> tuple[DataIndex, list[str]]:
    source, target = write_pairs(folder, "train", pairs)
    settings = {"sources": tuple(line_files([source], [target])), "vocab_size": 400, **changes}
    report: list[str] = []
    index = prepare(PrepareSettings(out=folder / out, **settings), report.append)
    return index, report


def with_validation(folder: Path, pairs: list[tuple[str, str]]) -> dict[str, Any]:
    source, target = write_pairs(folder, "valid", pairs)
    return {"validation": tuple(line_files([source], [target]))}


def train_text(data: DataFolder) -> list[tuple[str, str]]:
    tokenizer = data.tokenizer()
    pairs = []
    for shard in data.index.train.shards:
        dataset = datasets.Dataset.from_file(str(data.path / shard.file))
        pairs += [(tokenizer.decode(row["src"]), tokenizer.decode(row["tgt"])) for row in dataset]
    return pairs


def files_of(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_each_pair_is_in_exactly_one_shard_or_held_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CHUNK_PAIRS", 70)
    pairs = corpus(1_000)
    index, report = run(tmp_path, pairs, pairs_per_shard=200)
    data = DataFolder.open(tmp_path / "out")
    data.verify()
    held_out = list(zip(*data.valid_text(), strict=True))
    assert len(held_out) == 100
    assert Counter(train_text(data) + held_out) == Counter(pairs)
    assert index == data.index
    assert index.valid_held_out
    # 900 pairs in 5 shards of 180 on average; a hash deals them within 5 standard deviations of 12.
    assert [120 < shard.pairs < 240 for shard in index.train.shards] == [True] * 5
    assert "100 pairs held out" in "\n".join(report)
    assert report[-1].endswith(f"--data {tmp_path / 'out'} --run-dir runs/first")


def test_a_sorted_corpus_is_well_mixed(tmp_path: Path) -> None:
    run(tmp_path, corpus(1_000), pairs_per_shard=250)
    data = DataFolder.open(tmp_path / "out")
    numbers = np.array([int(source.split()[2]) for source, _ in train_text(data)])
    for start, stop in zip(data.train.shard_starts[:-1], data.train.shard_starts[1:], strict=True):
        assert 400 < numbers[start:stop].mean() < 600
    assert abs(np.corrcoef(numbers, np.arange(len(numbers)))[0, 1]) < 0.15


def test_result_depends_on_text_and_settings_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pairs = corpus(300)
    run(tmp_path, pairs, "one", pairs_per_shard=64)
    monkeypatch.setattr(module, "CHUNK_PAIRS", 17)
    run(tmp_path, pairs, "two", pairs_per_shard=64)
    (tmp_path / "elsewhere").mkdir()
    run(tmp_path / "elsewhere", pairs, "three", pairs_per_shard=64)
    assert files_of(tmp_path / "one") == files_of(tmp_path / "two") == files_of(tmp_path / "elsewhere/three")
    run(tmp_path, pairs, "other-seed", pairs_per_shard=64, seed=2)
    assert files_of(tmp_path / "one")["lengths.npy"] != files_of(tmp_path / "other-seed")["lengths.npy"]
    assert files_of(tmp_path / "one")["valid/source.txt"] != files_of(tmp_path / "other-seed")["valid/source.txt"]


def test_the_vocabulary_is_learned_from_a_seeded_sample(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pairs = corpus(1_000)
    valid = with_validation(tmp_path, corpus(5))
    # Of 1,000 pairs each is taken with probability 0.2 when 200 are asked for.
    chosen = pair_hash(np.arange(1_000), seed=1, purpose=3) < 2**64 // 5
    texts = [text for pair, taken in zip(pairs, chosen, strict=True) if taken for text in pair]
    expected = train_tokenizer(texts, vocab_size=400)
    _, report = run(tmp_path, pairs, "one", vocab_sample_pairs=200, **valid)
    monkeypatch.setattr(module, "CHUNK_PAIRS", 77)
    run(tmp_path, pairs, "two", vocab_sample_pairs=200, **valid)
    assert files_of(tmp_path / "one") == files_of(tmp_path / "two")
    assert (tmp_path / "one/tokenizer.json").read_bytes() == files_of(tmp_path / "two")["tokenizer.json"]
    assert DataFolder.open(tmp_path / "one").index.tokenizer_sha256 == expected.sha256
    assert f", learned from a sample of {chosen.sum()} of 1,000 pairs" in "\n".join(report)
    # No sample is drawn, and none spoken of, where there are no more pairs than that.
    _, report = run(tmp_path, pairs, "all", vocab_sample_pairs=1_000, **valid)
    everything = train_tokenizer([text for pair in pairs for text in pair], vocab_size=400)
    assert DataFolder.open(tmp_path / "all").index.tokenizer_sha256 == everything.sha256 != expected.sha256
    assert "sample" not in "\n".join(report)


def test_chunks_are_opened_once_for_several_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CHUNK_PAIRS", 100)
    opened: list[str] = []
    mapped: list[int] = []
    read_batch, write_shard = shards.read_batch, shards.write_shard

    def count(path: Path) -> Any:
        opened.append(path.name)
        return read_batch(path)

    def look(*arguments: Any) -> Any:
        mapped.append(sum("/ids-" in line for line in Path("/proc/self/maps").read_text().splitlines()))
        return write_shard(*arguments)

    monkeypatch.setattr(shards, "read_batch", count)
    monkeypatch.setattr(shards, "write_shard", look)
    index, _ = run(tmp_path, corpus(1_000), pairs_per_shard=2)
    # 900 pairs in 450 shards; 64 tasks at least, so 7 shards each: 65 tasks open each of the 10 chunks once.
    assert 350 < len(index.train.shards) < 450
    assert sum(name.startswith("ids-") for name in opened) == 65 * 10
    assert set(mapped) == {0}


@pytest.mark.slow
def test_processes_make_the_same_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pairs = [*corpus(300), ("", "x"), *corpus(300)]
    one, _ = run(tmp_path, pairs, "one", pairs_per_shard=50)
    monkeypatch.setattr(module, "CHUNK_PAIRS", 64)
    two, _ = run(tmp_path, pairs, "two", pairs_per_shard=50, workers=2)
    assert files_of(tmp_path / "one") == files_of(tmp_path / "two")
    assert one == two
    assert two.dropped == {"empty": 1, "too_long": 0, "length_ratio": 0}


def test_pair_hash_is_splitmix64() -> None:
    # First outputs of the reference SplitMix64 started from 0 (java.util.SplittableRandom's generator).
    assert [hex(h) for h in pair_hash(np.arange(3), seed=0, purpose=0).tolist()] == [
        "0xe220a8397b1dcdaf",
        "0x6e789e6aa1b965f4",
        "0x6c45d188009454f",
    ]
    hashes = [pair_hash(np.arange(1_000), seed, purpose) for seed in (0, 1) for purpose in (1, 2)]
    assert len(np.unique(np.concatenate(hashes))) == 4_000


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
    valid = [("a" * 200, "x"), ("y", "z"), ("", "z"), ("a" * 15, "b" * 15)]
    index, report = run(tmp_path, pairs, vocab_size=260, max_tokens=16, **with_validation(tmp_path, valid))
    assert index.dropped == {"empty": 3, "too_long": 1, "length_ratio": 2}
    assert (index.pairs_read, index.train.pairs) == (8, 2)
    assert (index.train.source_tokens, index.train.target_tokens) == (16 + 2, 16 + 14)
    data = DataFolder.open(tmp_path / "out")
    assert sorted(train_text(data)) == [("a", "b" * 13), ("a" * 15, "b" * 15)]
    # Validation text is kept in full but for empty sides; its shards hold what fits, in order.
    assert data.valid_text() == (["a" * 200, "y", "a" * 15], ["x", "z", "b" * 15])
    assert data.valid.lengths.tolist() == [[2, 2], [16, 16]]
    assert index.valid_dropped == {"empty": 1, "too_long": 1}
    assert not index.valid_held_out
    assert "kept: 2 of 8 pairs; dropped 3 empty, 1 too_long, 2 length_ratio" in "\n".join(report)


def test_normalised_text_is_trained_on_and_raw_text_kept(tmp_path: Path) -> None:
    pairs = [("  ﬁne Ｘ </s>", "½ e\u0301\u2028x")] * 40
    run(tmp_path, pairs)
    data = DataFolder.open(tmp_path / "out")
    assert set(train_text(data)) == {tuple(unicodedata.normalize("NFKC", text) for text in pairs[0])}
    assert data.valid_text() == ([pairs[0][0]] * 4, [pairs[0][1]] * 4)


def test_lowercase_and_reuse_of_a_tokenizer(tmp_path: Path) -> None:
    index, _ = run(tmp_path, corpus(50), "first", lowercase=True)
    assert index.lowercase
    tokenizer = tmp_path / "first/tokenizer.json"
    again, report = run(tmp_path, corpus(30), "second", tokenizer=tokenizer, vocab_size=999)
    assert again.lowercase
    assert again.tokenizer_sha256 == index.tokenizer_sha256
    assert "lowercase, --vocab-size has no effect" in report[0]
    assert "tokenizer.json, NFKC, lowercase, " in report[0]
    assert {target[:4] for _, target in train_text(DataFolder.open(tmp_path / "second"))} == {"wort"}
    run(tmp_path, corpus(50), "cased")
    with pytest.raises(UserError, match="keeps case, so lowercase does not go with it"):
        run(tmp_path, corpus(50), "third", tokenizer=tmp_path / "cased/tokenizer.json", lowercase=True)


FULL_WIDTH = ("a dog, a cat", "一条狗，一只猫！")


def test_nfc_keeps_full_width_forms(tmp_path: Path) -> None:
    pairs = [FULL_WIDTH] * 40
    _, report = run(tmp_path, pairs, "folded")
    assert set(train_text(DataFolder.open(tmp_path / "folded"))) == {("a dog, a cat", "一条狗,一只猫!")}
    assert any(re.fullmatch("vocabulary: .* entries, joint byte-level BPE, NFKC(;.*)?", line) for line in report)
    _, report = run(tmp_path, pairs, "kept", normalization="nfc", lowercase=True)
    data = DataFolder.open(tmp_path / "kept")
    assert set(train_text(data)) == {FULL_WIDTH}
    assert (data.tokenizer().normalization, data.tokenizer().lowercase) == ("nfc", True)
    assert any(
        re.fullmatch("vocabulary: .* entries, joint byte-level BPE, NFC, lowercase(;.*)?", line) for line in report
    )


def test_a_given_tokenizer_decides_the_normalisation(tmp_path: Path) -> None:
    pairs = [FULL_WIDTH] * 40
    for name in ("nfkc", "nfc"):
        run(tmp_path, pairs, name, normalization=name)
    run(tmp_path, pairs, "again", tokenizer=tmp_path / "nfc/tokenizer.json")
    assert set(train_text(DataFolder.open(tmp_path / "again"))) == {FULL_WIDTH}
    for name, other in (("nfkc", "nfc"), ("nfc", "nfkc")):
        message = f"normalises by {name.upper()}, so {other} does not go with it: leave out --normalization"
        with pytest.raises(UserError, match=message):
            run(tmp_path, pairs, "bad", tokenizer=tmp_path / name / "tokenizer.json", normalization=other)
    _, report = run(tmp_path, pairs, "warned", tokenizer=tmp_path / "nfkc/tokenizer.json")
    (warning,) = [line for line in report if "warning" in line]
    assert warning.endswith(": --normalization nfc keeps them, without --tokenizer")


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


def test_smaller_vocabulary_is_reported(tmp_path: Path) -> None:
    index, report = run(tmp_path, corpus(20), vocab_size=5_000)
    assert index.vocab_size < 5_000
    assert f"vocabulary: {index.vocab_size:,} entries" in "\n".join(report)
    assert "no more than that of the 5,000 asked for" in "\n".join(report)


def test_several_sources_are_joined(tmp_path: Path) -> None:
    (tmp_path / "more.tsv").write_text("".join(f"{source}\t{target}\n" for source, target in corpus(40)[20:]))
    source, target = write_pairs(tmp_path, "train", corpus(20))
    index, _ = run(tmp_path, corpus(20), sources=(*line_files([source], [target]), TsvFile(path=tmp_path / "more.tsv")))
    assert index.sources == ("train.en + train.de", "more.tsv")
    assert index.pairs_read == 40
    assert (index.source_language, index.target_language) == ("en", "de")


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


@pytest.mark.parametrize("existing", ["file", "full folder", "link"])
def test_existing_out_is_refused_and_kept(tmp_path: Path, existing: str) -> None:
    out = tmp_path / "out"
    if existing == "file":
        out.write_text("mine")
    elif existing == "link":
        out.symlink_to(tmp_path / "nowhere")
    else:
        out.mkdir()
        (out / "mine").write_text("mine")
    before = names(tmp_path)
    with pytest.raises(UserError, match="out exists already: choose another --out, or remove it"):
        run(tmp_path, corpus(20))
    assert names(tmp_path) == before | {"train.en", "train.de"}


def test_empty_out_and_missing_parents_are_made(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    run(tmp_path, corpus(20), "empty")
    run(tmp_path, corpus(20), "a/b/c")
    assert files_of(tmp_path / "empty") == files_of(tmp_path / "a/b/c")
    assert names(tmp_path / "empty") == {"index.json", "tokenizer.json", "lengths.npy", "train-00000.arrow", "valid"}


@pytest.mark.parametrize("failure", [KeyboardInterrupt(), SystemExit(143), OSError(28, "No space left on device")])
def test_the_same_call_goes_on_after_an_interruption(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failure: BaseException
) -> None:
    def fail(*_: Any) -> None:
        raise failure

    index, _ = run(tmp_path, corpus(20), "straight")
    with monkeypatch.context() as broken:
        broken.setattr(module.shards, "write_index", fail)
        expected = UserError if isinstance(failure, OSError) else type(failure)
        with pytest.raises(expected, match="No space left .* goes on" if expected is UserError else None):
            run(tmp_path, corpus(20), "new/out")
    assert names(tmp_path / "new") == {".out.partial"}
    # Tokens are not made again: without the tokenizer no stage but the last could be done.
    monkeypatch.setattr(encoding, "encode", lambda *_: pytest.fail("encoded again"))
    # The files keep their times: run would write them anew.
    settings = {"sources": tuple(line_files([tmp_path / "train.en"], [tmp_path / "train.de"])), "vocab_size": 400}
    report: list[str] = []
    assert prepare(PrepareSettings(out=tmp_path / "new/out", **settings), report.append) == index
    assert report[0] == f"going on with the interrupted preparation in {tmp_path / 'new/.out.partial'}"
    assert files_of(tmp_path / "new/out") == files_of(tmp_path / "straight")
    assert names(tmp_path / "new") == {"out"}


def test_nothing_is_left_after_an_error_of_the_text(tmp_path: Path) -> None:
    pairs = [("a b c d e f", "x y z")] * 20
    with pytest.raises(UserError, match="no training pair is left"):
        run(tmp_path, pairs, "new/out", max_tokens=2)
    assert names(tmp_path) == {"train.en", "train.de"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sources": ()}, "there is no text to prepare"),
        ({"vocab_size": None}, "vocab_size is missing"),
        ({"vocab_size": 259}, "vocab_size 259 is too small"),
        ({"max_tokens": 1}, "max_tokens 1 is too small"),
        ({"pairs_per_shard": 0}, "pairs_per_shard 0 is too small"),
        ({"valid_pairs": 0}, "valid_pairs 0 is too small"),
        ({"vocab_sample_pairs": 0}, "vocab_sample_pairs 0 is too small"),
        ({"workers": 0}, "workers 0 is too small"),
        ({"seed": -1}, "seed -1 is too small"),
        ({"max_length_ratio": 0.5}, "max_length_ratio 0.5 is too small"),
        ({"max_length_ratio": float("nan")}, "max_length_ratio nan is too small"),
        ({"pairs_per_shard": 2**27}, "exceeds what one Arrow batch holds"),
        ({"max_tokens": 2}, "no training pair is left of train.en + train.de (0 empty, 18 too_long"),
    ],
)
def test_bad_settings_are_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as caught:
        run(tmp_path, corpus(20), **changes)
    assert message in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_languages_that_cannot_be_told_are_asked_for(tmp_path: Path) -> None:
    (tmp_path / "t.tsv").write_text("a\tb\n" * 20)
    sources = (TsvFile(path=tmp_path / "t.tsv"),)
    with pytest.raises(UserError, match=r"source language cannot be told .* --src-lang"):
        run(tmp_path, [], sources=sources)
    with pytest.raises(UserError, match=r"target language cannot be told .* --tgt-lang"):
        run(tmp_path, [], sources=sources, source_language="en")
    with pytest.raises(UserError, match=r"target files seem to be in several languages \(de, fr\)"):
        run(tmp_path, [], sources=tuple(line_files([Path("a.en"), Path("b.en")], [Path("a.de"), Path("b.fr")])))
    index, _ = run(tmp_path, [], sources=sources, source_language="en", target_language="x-klingon")
    assert index.target_language == "x-klingon"


@pytest.mark.parametrize("count", [0, 1])
def test_too_little_text(tmp_path: Path, count: int) -> None:
    with pytest.raises(UserError, match="fewer than two pairs"):
        run(tmp_path, corpus(count))
    with pytest.raises(UserError, match=r"validation text \(valid\.en \+ valid\.de\) has no pair"):
        run(tmp_path, corpus(20), **with_validation(tmp_path, [("", "x")] * count))


def test_bad_late_file_is_found_before_the_long_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "read_sources", lambda *_: pytest.fail("the text was read first"))
    validation = tuple(line_files([tmp_path / "missing.en"], [tmp_path / "missing.de"]))
    with pytest.raises(UserError, match=r"missing\.en does not exist"):
        run(tmp_path, corpus(20), validation=validation)


def test_command_takes_the_normalisation(tmp_path: Path) -> None:
    source, target = write_pairs(tmp_path, "train", [FULL_WIDTH] * 40)
    common = ("--src", source, "--tgt", target, "--tgt-lang", "zh", "--vocab-size", "400")
    result = command(*common, "--normalization", "nfc", "--out", tmp_path / "nfc")
    assert (result.returncode, result.stderr) == (0, "")
    assert "warning" not in result.stdout
    assert set(train_text(DataFolder.open(tmp_path / "nfc"))) == {FULL_WIDTH}
    result = command(*common, "--out", tmp_path / "nfkc")
    assert "warning: NFKC changes 100.0% of the target lines, for example '，' -> ','" in result.stdout


def command(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, ROOT / "tools/prepare_data.py", *arguments],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )


def test_command_prepares_the_toy_corpus(tmp_path: Path) -> None:
    result = command("--toy", "200", "--vocab-size", "500", "--out", tmp_path / "toy")
    assert (result.returncode, result.stderr) == (0, "")
    assert "--preset tiny" in result.stdout
    data = DataFolder.open(tmp_path / "toy")
    assert (data.index.corpus, data.index.synthetic) == ("toy grammar", True)
    assert (data.index.pairs_read, data.index.valid_text.pairs) == (200, 20)
    texts = {f"{split}.{language}" for split in ("train", "valid", "test") for language in ("en", "de")}
    assert names(tmp_path / "toy/text") == texts
    assert (tmp_path / "toy/text/valid.de").read_text().splitlines() == data.valid_text()[1]


def test_command_prints_one_sentence_on_bad_input(tmp_path: Path) -> None:
    source, target = write_pairs(tmp_path, "train", corpus(20))
    result = command("--src", source, "--tgt", target, "--vocab-size", "99", "--out", tmp_path / "out")
    assert result.returncode == 1
    assert result.stdout == ""
    assert result.stderr.startswith("error: vocab_size 99 is too small")
    assert result.stderr.count("\n") == 1


def test_command_reads_jsonl_and_datasets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    (tmp_path / "set").mkdir()
    for name, rows in (("train", corpus(30)), ("validation", corpus(5))):
        lines = [json.dumps({"en": source, "de": target}) for source, target in rows]
        (tmp_path / f"set/{name}.jsonl").write_text("\n".join(lines))
    common = ("--src-lang", "en", "--tgt-lang", "de", "--vocab-size", "400", "--out")
    result = command("--dataset", tmp_path / "set", "--dataset-valid-split", "validation", *common, tmp_path / "hub")
    assert result.returncode == 0, result.stderr
    fields = ("--src-field", "en", "--tgt-field", "de")
    result = command("--jsonl", tmp_path / "set/train.jsonl", *fields, *common, tmp_path / "jsonl")
    assert result.returncode == 0, result.stderr
    hub, jsonl = DataFolder.open(tmp_path / "hub"), DataFolder.open(tmp_path / "jsonl")
    assert (hub.index.pairs_read, hub.index.train.pairs, hub.index.valid_text.pairs) == (30, 30, 5)
    assert (jsonl.index.pairs_read, jsonl.index.train.pairs, jsonl.index.valid_text.pairs) == (30, 27, 3)


def test_command_reads_parquet_streams_and_patterns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    (tmp_path / "set").mkdir()
    rows = [{"translation": {"en": source, "de": target}} for source, target in corpus(30)]
    for part in (0, 1):
        datasets.Dataset.from_list(rows[part * 15 : part * 15 + 15]).to_parquet(tmp_path / f"set/train-{part}.parquet")
    common = ("--vocab-size", "400", "--out")
    fields = ("--src-field", "en", "--tgt-field", "de")
    result = command("--parquet", tmp_path / "set/*.parquet", *fields, *common, tmp_path / "files")
    assert (result.returncode, result.stderr) == (0, "")
    languages = ("--src-lang", "en", "--tgt-lang", "de")
    result = command("--dataset", tmp_path / "set", "--streaming", *languages, *common, tmp_path / "stream")
    assert result.returncode == 0, result.stderr
    files, stream = DataFolder.open(tmp_path / "files"), DataFolder.open(tmp_path / "stream")
    assert (files.index.sources, stream.index.sources) == (("train-0.parquet", "train-1.parquet"), ("set/train",))
    assert files.index.train == stream.index.train
    assert files.index.pairs_read == 30
    # Nothing of a stream is stored.
    assert not list((tmp_path / "cache").rglob("*.arrow"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--src", "*.none", "--tgt", "b"), 'error: --src "*.none" matches no file'),
        (("--parquet", "a"), "error: --parquet needs the names of its two text fields: give --src-field"),
        (("--streaming", "--src", "a", "--tgt", "b"), "error: --streaming is for --dataset"),
    ],
)
def test_command_refuses_in_one_sentence(tmp_path: Path, arguments: tuple[str, ...], message: str) -> None:
    result = command(*arguments, "--vocab-size", "400", "--out", tmp_path / "out")
    assert (result.returncode, result.stdout, result.stderr.count("\n")) == (1, "", 1)
    assert result.stderr.startswith(message)


def test_real_corpus(tmp_path: Path) -> None:
    data = Path(os.environ.get("DIST_TRANSFORMER_DATA", ROOT.parent / "shared/data")) / "multi30k"
    if not data.exists():
        pytest.skip(f"{data} is absent: set DIST_TRANSFORMER_DATA to the folder of corpora")
    sources = tuple(line_files([data / "val.en"], [data / "val.de"]))
    index = prepare(PrepareSettings(out=tmp_path / "out", sources=sources, vocab_size=2_000), lambda _: None)
    assert (index.pairs_read, index.valid_text.pairs) == (1_014, 101)
    assert index.train.pairs + sum(index.dropped.values()) == 913
    prepared = DataFolder.open(tmp_path / "out")
    lines = set((data / "val.de").read_text(encoding="utf-8").split("\n"))
    assert {target for _, target in train_text(prepared)} <= {unicodedata.normalize("NFKC", line) for line in lines}


def test_real_chinese_has_no_ceiling_under_nfc(tmp_path: Path) -> None:
    """The references, as a perfect model would write them: NFKC takes about 7 BLEU from it, NFC nothing."""
    folder = Path(os.environ.get("DIST_TRANSFORMER_DATA", ROOT.parent / "shared/data")) / "captions_en_zh"
    if not folder.exists():
        pytest.skip(f"{folder} is absent: set DIST_TRANSFORMER_DATA to the folder of corpora")
    sources = tuple(line_files([folder / "valid.en"], [folder / "valid.zh"]))
    references = (folder / "test.zh").read_text(encoding="utf-8").split("\n")[:-1]
    best = {}
    for form in ("nfkc", "nfc"):
        report: list[str] = []
        settings = PrepareSettings(out=tmp_path / form, sources=sources, vocab_size=1_000, normalization=form)
        prepare(settings, report.append)
        tokenizer = DataFolder.open(tmp_path / form).tokenizer()
        written = [tokenizer.decode(ids) for ids in tokenizer.encode_batch(references)]
        best[form] = sacrebleu.corpus_bleu(written, [references], tokenize="zh").score
        assert any(line.startswith("warning: NFKC changes 34.1%") for line in report) == (form == "nfkc")
    assert best["nfkc"] < 95
    assert best["nfc"] == pytest.approx(100)
