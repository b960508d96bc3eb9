"""Swapped files: one warning on standard error, and the result as before."""

import io
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from dist_transformer.cli import evaluate, score, translate
from dist_transformer.config.plain import to_plain
from dist_transformer.data.vocabulary.tokenizer import Tokenizer
from tests.evaluation.test_languages import marks_of
from tests.small_model import restate

Lines = tuple[list[str], list[str]]
Screen = pytest.CaptureFixture[str]


@pytest.fixture
def model(model_folder: Path, toy_tokenizer: Tokenizer, toy_lines: Lines, tmp_path: Path) -> Path:
    """A model folder that states the marks of its languages, beside `a.txt` in English and `b.txt` in German."""
    folder = tmp_path / "model"
    shutil.copytree(model_folder, folder)
    restate(folder, marks=[to_plain(marks_of(toy_tokenizer, toy_lines))])
    for name, lines in zip(("a.txt", "b.txt"), toy_lines, strict=True):
        (tmp_path / name).write_text("".join(f"{line}\n" for line in lines[:12]), encoding="utf-8")
    return folder


def warnings(main: Callable[[], None], monkeypatch: pytest.MonkeyPatch, capsys: Screen, *words: object) -> list[str]:
    monkeypatch.setattr(sys, "argv", ["x", *map(str, words), "--device", "cpu"])
    main()
    screen = capsys.readouterr()
    assert screen.out or "--output" in words
    return [line for line in screen.err.splitlines() if line.startswith("warning")]


def test_each_command_warns_once_of_swapped_text(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Screen
) -> None:
    english, german = tmp_path / "a.txt", tmp_path / "b.txt"
    search = ("--beam", 1, "--max-extra-tokens", 2)
    for source, target, is_wrong in ((english, german, False), (german, english, True)):
        both = (
            f"warning: {source} looks like de, the model's target language and {target} looks like en, the model's "
            "source language (direction en-de): check whether --src and "
        )
        for main, words in (
            (evaluate.main, ("--src", source, "--ref", target, *search)),
            (score.main, ("--src", source, "--tgt", target)),
        ):
            found = warnings(main, monkeypatch, capsys, "--model", model, *words)
            assert [line[: len(both)] for line in found] == [both] * is_wrong
        out = tmp_path / f"{source.stem}.out"
        words = ("--model", model, *search, "--input", source, "--output", out)
        found = warnings(translate.main, monkeypatch, capsys, *words)
        alone = f"warning: {source} looks like de, the model's target language (direction en-de): check the text, and"
        assert [line[: len(alone)] for line in found] == [alone] * is_wrong
        assert out.exists()
        with source.open(encoding="utf-8") as piped:
            monkeypatch.setattr(sys, "stdin", piped)
            monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO()))
            monkeypatch.setattr(sys, "argv", ["translate", "--model", str(model), *map(str, search), "--device", "cpu"])
            translate.main()
            monkeypatch.undo()
        assert capsys.readouterr().err.count("the source text looks like de") == is_wrong
