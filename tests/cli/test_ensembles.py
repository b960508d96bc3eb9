"""Several folders after --model, in every command that takes them, on one rank and on two."""

import json
import shutil
from pathlib import Path

import pytest

import dist_transformer
from tests.conftest import run_python
from tests.small_model import restate

pytestmark = pytest.mark.system

Lines = tuple[list[str], list[str]]


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


@pytest.mark.parametrize("command", ["translate", "evaluate", "score", "serve"])
def test_another_vocabulary_is_refused(
    command: str, model_folder: Path, texts: tuple[Path, Path], tmp_path: Path
) -> None:
    other = Path(shutil.copytree(model_folder, tmp_path / "other"))
    restate(other, tokenizer_sha256="0" * 64)
    words = {
        "evaluate": ("--src", texts[0], "--ref", texts[1]),
        "score": ("--src", texts[0], "--tgt", texts[1]),
    }.get(command, ())
    done = run_python("-m", "dist_transformer", command, "--model", model_folder, other, *words)
    assert done.returncode == 1
    assert done.stderr == (
        f"error: {other} has another vocabulary than {model_folder}, and the models of an ensemble must share one: use "
        "models with the same tokenizer.json\n"
    )
