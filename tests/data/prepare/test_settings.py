"""Settings that a preparation accepts."""

from pathlib import Path
from typing import Any

import pytest

from dist_transformer.base.errors import UserError
from dist_transformer.data.prepare.pipeline import run_folder_for
from dist_transformer.data.text.files import TsvFile, line_files
from tests.data.prepare.preparing import corpus, run


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
        ({"max_tokens": 2}, "no training pair is left of train.en + train.de (0 empty, 18 too_long"),
    ],
)
def test_bad_settings_are_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as caught:
        run(tmp_path, corpus(20), **changes)
    assert message in str(caught.value)
    assert not (tmp_path / "out").exists()


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
