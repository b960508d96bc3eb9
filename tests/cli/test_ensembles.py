"""Several folders after --model, on one rank and on two, and swapped texts, in every command that takes them."""

import json
import shutil
import sys
from pathlib import Path

import pytest

import dist_transformer
from dist_transformer.config.plain import to_plain
from dist_transformer.data.vocabulary.tokenizer import Tokenizer
from tests.cli.conftest import Call, Lines
from tests.conftest import run_python
from tests.evaluation.test_languages import marks_of
from tests.small_model import restate

pytestmark = pytest.mark.system


@pytest.fixture(scope="module")
def texts(toy_lines: Lines, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("texts")
    files = folder / "test.en", folder / "test.de"
    for file, lines in zip(files, toy_lines, strict=True):
        file.write_text("".join(f"{line}\n" for line in lines[:6]), encoding="utf-8")
    return files


def run(command: str, *words: object, ranks: int = 1) -> str:
    done = run_python("-m", "dist_transformer", command, *words, ranks=ranks)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_every_command_computes_with_the_mean(
    model_folder: Path, other_folder: Path, texts: tuple[Path, Path], toy_lines: Lines, tmp_path: Path
) -> None:
    models, (source, target) = ("--model", model_folder, other_folder), texts
    joint = dist_transformer.load([model_folder, other_folder], device="cpu")
    expected = joint.translate(toy_lines[0][:6], max_extra_tokens=5, split_over="no")
    short = ("--max-extra-tokens", 5, "--split-over", "no", "--precision", "fp32")
    out = tmp_path / "out.txt"
    run("translate", *models, "--input", source, "--output", out, "--chunk-lines", 2, *short, ranks=2)
    assert out.read_text("utf-8").splitlines() == expected

    result = tmp_path / "result.json"
    run("evaluate", *models, "--src", source, "--ref", target, "--json", result, *short)
    report = json.loads(result.read_text("utf-8"))
    assert (report["model"], report["steps"]) == (f"{model_folder} + {other_folder}", [])
    assert Path(report["hypotheses"]).read_text("utf-8").splitlines() == expected

    scores = run("score", *models, "--src", source, "--tgt", target, ranks=2)
    found = joint.score(toy_lines[0][:6], toy_lines[1][:6])
    assert [float(line) for line in scores.split()] == pytest.approx([one.log_probability for one in found], abs=1e-4)


@pytest.fixture
def model(model_folder: Path, toy_tokenizer: Tokenizer, toy_lines: Lines, tmp_path: Path) -> Path:
    """A model folder that states the marks of its languages, beside `a.txt` in English and `b.txt` in German."""
    folder = tmp_path / "model"
    shutil.copytree(model_folder, folder)
    restate(folder, marks=[to_plain(marks_of(toy_tokenizer, toy_lines))])
    for name, lines in zip(("a.txt", "b.txt"), toy_lines, strict=True):
        (tmp_path / name).write_text("".join(f"{line}\n" for line in lines[:12]), encoding="utf-8")
    return folder


def test_each_command_warns_once_of_swapped_text(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: Call
) -> None:
    english, german = tmp_path / "a.txt", tmp_path / "b.txt"
    search = ("--beam", 1, "--max-extra-tokens", 2)

    def warnings(command: str, *words: object) -> list[str]:
        out, errors = call(command, "--model", model, "--device", "cpu", *words)
        assert out or "--output" in words
        return [line for line in errors.splitlines() if line.startswith("warning")]

    for source, target, is_wrong in ((english, german, False), (german, english, True)):
        both = (
            f"warning: {source} looks like de, the model's target language and {target} looks like en, the model's "
            "source language (direction en-de): check whether --src and "
        )
        for words in (
            ("evaluate", "--src", source, "--ref", target, *search),
            ("score", "--src", source, "--tgt", target),
        ):
            found = warnings(*words)
            assert [line[: len(both)] for line in found] == [both] * is_wrong
        out = tmp_path / f"{source.stem}.out"
        found = warnings("translate", *search, "--input", source, "--output", out)
        alone = f"warning: {source} looks like de, the model's target language (direction en-de): check the text, and"
        assert [line[: len(alone)] for line in found] == [alone] * is_wrong
        assert out.exists()
        with source.open(encoding="utf-8") as piped:
            monkeypatch.setattr(sys, "stdin", piped)
            found = warnings("translate", *search)
            assert ["the source text looks like de" in line for line in found] == [True] * is_wrong
