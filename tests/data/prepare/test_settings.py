"""Settings that a preparation accepts."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from dist_transformer import api
from dist_transformer.base.errors import UserError
from dist_transformer.cli.prepare import parse_arguments
from dist_transformer.config.command_line import read_keywords
from dist_transformer.config.plain import to_plain
from dist_transformer.config.schema import settings_of
from dist_transformer.config.settings_file import write_settings
from dist_transformer.data.prepare.pipeline import run_folder_for
from dist_transformer.data.prepare.settings import PrepareSettings
from dist_transformer.data.prepare.vocabularies import _STRENGTH
from dist_transformer.data.text.pairs import TsvFile, line_files
from dist_transformer.data.vocabulary.kinds import DEFAULT_COVERAGE
from tests.data.prepare.preparing import corpus, run, write_pairs


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sources": ()}, "there is no text to prepare"),
        ({"vocab_size": None}, "vocab_size is missing"),
        ({"vocab_size": 259}, "vocab_size 259 is too small"),
        ({"max_tokens": 1}, "max_tokens is 1: it must be at least"),
        ({"valid_pairs": 0}, "valid_pairs is 0: it must be at least"),
        ({"workers": 0}, "workers is 0: it must be at least"),
        ({"max_length_ratio": 0.5}, "max_length_ratio is 0.5: it must be at least 1"),
        ({"max_length_ratio": float("nan")}, "max_length_ratio is nan: it must be at least 1"),
        ({"vocab_size": 10**18}, "is too large: use at most 16,777,216"),
        ({"pairs_per_shard": 2**27}, "exceeds what one Arrow batch holds"),
        ({"segmentations": 0}, "segmentations is 0: it must be at least 1"),
        ({"segmentation_dropout": 0.1}, "segmentation_dropout is for several segmentations: set --segmentations"),
        ({"segmented_side": "source"}, "segmented_side is for several segmentations"),
        ({"segmentations": 2, "segmentation_dropout": 1.5}, "segmentation_dropout is 1.5: it must be above 0"),
        ({"segmentations": 2, "segmentation_alpha": 0.2}, "a byte-level BPE vocabulary: set --segmentation-dropout"),
        (
            {"segmentations": 2, "segmentation_dropout": 0.1, "vocabulary": "sentencepiece", "vocab_size": 400},
            "is not for a SentencePiece unigram with byte fallback vocabulary: set --segmentation-alpha",
        ),
        ({"source_vocab_size": 300}, "leave out one kind"),
        ({"vocab_size": None, "source_vocab_size": 300}, "set --tgt-vocab-size or --tgt-tokenizer, too"),
        ({"source_tags": ("<2de>",)}, "source_tags <2de> is not in the vocabulary to be learned"),
        (
            {"vocab_size": None, "source_tokenizer": Path("t"), "target_vocab_size": 300, "tags": ("<2de>",)},
            "tags is for a new vocabulary, but --src-tokenizer names an existing one",
        ),
        (
            {"vocab_size": None, "source_tokenizer": Path("t"), "target_tokenizer": Path("t"), "byte_fallback": True},
            "byte_fallback is for a new vocabulary, but --src-tokenizer names an existing one",
        ),
        ({"max_tokens": 2}, "no training pair is left of train.en + train.de (0 empty, 18 too_long"),
    ],
)
def test_bad_settings_are_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as caught:
        run(tmp_path, corpus(20), **changes)
    assert message in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_flags_files_and_keywords_say_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    source, target = map(str, write_pairs(tmp_path, "train", corpus(20)))
    (tmp_path / "pairs.tsv").touch()
    words = (
        f"--src {tmp_path}/*.en --tgt {target} --tsv {tmp_path}/pairs.tsv --tsv-columns 1 0 --out out --workers 2 "
        "--vocabulary sentencepiece --src-vocab-size 300 --tgt-vocab-size 270 --no-byte-fallback --lowercase "
        "--tag <2de> <bt> --src-tag <2de> --max-length-ratio 2.5 --src-lang en --tgt-lang de"
    )
    values = {
        **{"src": [source], "tgt": [target], "tsv": [f"{tmp_path}/pairs.tsv"], "tsv_columns": [1, 0], "out": "out"},
        **{"workers": 2, "vocabulary": "sentencepiece", "src_vocab_size": 300, "target_vocab_size": 270},
        **{"byte_fallback": False, "lowercase": True, "tag": ["<2de>", "<bt>"], "source_tags": ["<2de>"]},
        **{"max_length_ratio": 2.5, "src_lang": "en", "target_language": "de"},
    }

    def printed(*flags: str) -> str:
        monkeypatch.setattr("sys.argv", ["prepare", *flags, "--print-config"])
        with pytest.raises(SystemExit) as ended:
            parse_arguments()
        assert not ended.value.code
        return capsys.readouterr().out

    by_flags = printed(*words.split())
    (tmp_path / "a.json").write_text(json.dumps(values))
    (tmp_path / "a.yaml").write_text("".join(f"{name}: {json.dumps(value)}\n" for name, value in values.items()))
    (tmp_path / "b.yaml").write_text(by_flags)
    by_files = [printed("--config", str(tmp_path / name)) for name in ("a.json", "a.yaml", "b.yaml")]
    assert by_files == [by_flags] * 3
    # From Python, one value stands for a list, a path is no text, and lists are sequences.
    keywords = {**values, "src": f"{tmp_path}/*.en", "out": Path("out"), "tsv_columns": (1, 0), "source_tags": "<2de>"}
    built = read_keywords(PrepareSettings, keywords, "prepare").build(PrepareSettings)
    assert write_settings(to_plain(built)) == by_flags


def test_a_keyword_without_effect_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"^src_field needs jsonl or parquet: add one of them"):
        api.prepare(out=tmp_path / "out", src="a.en", tgt="a.de", vocab_size=300, src_field="en")


def test_keywords_make_the_synthetic_text(tmp_path: Path) -> None:
    index = api.prepare(out=tmp_path / "out", toy=30, vocab_size=300, report=lambda _: None)
    assert (index.corpus, index.synthetic, index.pairs_read, index.valid_text.pairs) == ("toy grammar", True, 30, 3)
    assert len((tmp_path / "out/text/test.de").read_text().splitlines()) == 3


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"src": ("none-*.en",)}, 'src "none-*.en" matches no file: check the pattern'),
        ({"jsonl": ("a",)}, "jsonl needs the names of its two text fields: pass --src-field and --tgt-field"),
        ({"dataset": "a"}, "dataset needs its two languages: pass --src-lang and --tgt-lang"),
        ({"dataset": ""}, "a path is empty"),
        ({"tsv": ("a",), "tsv_columns": (1,)}, "tsv_columns is (1,): it must be the numbers of two columns"),
        ({"toy": 0}, "toy is 0: ask for 1 to 1,000,000 pairs"),
    ],
)
def test_bad_text_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=f"^{re.escape(message)}"):
        read_keywords(PrepareSettings, {"out": "out", "vocab_size": 300, **changes}, "prepare").build(PrepareSettings)


def test_defaults_in_texts_are_those_of_the_code() -> None:
    """A default that is None is stated by the text alone."""
    texts = {each.name: each.text for each in settings_of(PrepareSettings)}
    assert f"default: {DEFAULT_COVERAGE}" in texts["character_coverage"]
    for name in ("segmentation_dropout", "segmentation_alpha"):
        assert f"default: {_STRENGTH}" in texts[name]


def test_languages_that_cannot_be_told_are_asked_for(tmp_path: Path) -> None:
    (tmp_path / "t.tsv").write_text("".join(f"a{i}\tb\n" for i in range(20)))
    sources = (TsvFile(path=tmp_path / "t.tsv"),)
    with pytest.raises(UserError, match=r"source language is not in the file names.* --src-lang"):
        run(tmp_path, [], sources=sources)
    with pytest.raises(UserError, match=r"target language is not in the file names.* --tgt-lang"):
        run(tmp_path, [], sources=sources, source_language="en")
    with pytest.raises(UserError, match=r"target files seem to be in several languages \(de, fr\)"):
        run(tmp_path, [], sources=tuple(line_files([Path("a.en"), Path("b.en")], [Path("a.de"), Path("b.fr")])))
    index, _ = run(tmp_path, [], sources=sources, source_language="en", target_language="x-klingon")
    assert index.target_language == "x-klingon"


@pytest.mark.parametrize(
    ("data", "run"), [("data/mine", "runs/mine"), ("mine", "runs/mine"), ("runs/mine", "runs/mine-run")]
)
def test_a_first_run_has_the_name_of_its_data(
    data: str, run: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run_folder_for(Path(data)) == Path(run)
    assert run_folder_for(tmp_path / data) == Path(run)


def test_a_data_folder_here_has_the_name_of_this_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine").mkdir()
    monkeypatch.chdir(tmp_path / "mine")
    assert run_folder_for(Path()) == Path("runs/mine")
