"""`dist-transformer score` alone and on two ranks."""

import json
import os
import re
import resource
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from dist_transformer.data.vocabulary.tokenizer import Tokenizer
from dist_transformer.inference import scoring
from dist_transformer.inference.scoring import PairScore, score_pairs
from dist_transformer.model.transformer import Transformer
from tests.cli.conftest import Call, Lines
from tests.conftest import begin_ranks, run_python

COMMAND = ["-m", "dist_transformer", "score"]


@pytest.fixture
def lines(toy_lines: Lines) -> Lines:
    # U+2028 is no end of line.
    return [*toy_lines[0][:30], "", "a\u2028b"], [*toy_lines[1][:30], "leer", ""]


@pytest.fixture
def flags(model_folder: Path, lines: Lines, tmp_path: Path) -> list[str]:
    source, target = tmp_path / "test.en", tmp_path / "test.de"
    for file, text in zip((source, target), lines, strict=True):
        file.write_text("".join(f"{line}\n" for line in text), encoding="utf-8")
    return ["--model", str(model_folder), "--src", str(source), "--tgt", str(target)]


@pytest.fixture
def expected(random_model: Transformer, toy_tokenizer: Tokenizer, lines: Lines) -> list[PairScore]:
    return score_pairs(random_model, toy_tokenizer, *lines, device=torch.device("cpu"))


def test_one_number_for_each_pair(flags: list[str], expected: list[PairScore], call: Call) -> None:
    out, err = call("score", *flags)
    assert err == ""
    assert re.fullmatch(r"(-\d+\.\d{6}\n){32}", out)
    sums = [score.log_probability for score in expected]
    assert [float(line) for line in out.split()] == pytest.approx(sums, abs=1e-4)
    assert len(set(sums)) == 32


@pytest.mark.system
def test_the_same_bytes_on_one_rank_and_on_two(
    flags: list[str], expected: list[PairScore], toy_tokenizer: Tokenizer, tmp_path: Path
) -> None:
    """In batches of few tokens, so that each rank has several."""
    written = []
    for ranks in (1, 2):
        out = tmp_path / f"on_{ranks}" / "scores.jsonl"
        words = [*flags, "--per-token", "--batch-tokens", "100", "--out", str(out)]
        done = run_python(*COMMAND, *words, ranks=ranks)
        assert done.returncode == 0, done.stderr
        assert done.stdout == ""
        assert os.listdir(out.parent) == [out.name]
        written.append(out.read_bytes())
    assert written[0] == written[1]
    rows = [json.loads(line) for line in written[0].split(b"\n")[:-1]]
    assert len(rows) == 32
    for row, score in zip(rows, expected, strict=True):
        assert row["log_probability"] == pytest.approx(score.log_probability, abs=1e-4)
        assert row["token_log_probabilities"] == pytest.approx(score.token_log_probabilities, abs=1e-5)
        assert row["tokens"][-1] == "</s>"
        text = "".join(row["tokens"][:-1]).replace("▁", " ")
        assert "�" in text or text == toy_tokenizer.decode(score.tokens)
    assert rows[-1]["tokens"] == ["</s>"]


@pytest.mark.system
def test_all_ranks_end_when_the_first_cannot_write(flags: list[str], tmp_path: Path) -> None:
    ranks = begin_ranks(range(2), *COMMAND, *flags, output=Path("/dev/full"), errors=tmp_path / "errors")
    assert 0 not in [rank.wait() for rank in ranks]
    errors = [line for line in (tmp_path / "errors").read_text().splitlines() if line.startswith("error: ")]
    assert errors == ["error: standard output cannot be written (No space left on device): choose another place"]


@pytest.mark.system
def test_a_reader_that_has_enough_is_no_error(flags: list[str]) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "wb") as pipe:
        done = subprocess.run([sys.executable, *COMMAND, *flags], stdout=pipe, stderr=subprocess.PIPE, check=False)
    assert (done.returncode, done.stderr) == (0, b"")


def test_what_is_wrong_is_one_sentence_and_leaves_no_file(
    flags: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: Call
) -> None:
    monkeypatch.setattr(scoring, "_LINES_AT_ONCE", 10)
    source, target = tmp_path / "test.en", tmp_path / "test.de"
    out = tmp_path / "scores.txt"
    out.write_text("earlier\n")
    before = sorted(os.listdir(tmp_path))

    def error() -> str:
        _, message = call("score", *flags, "--out", out, status=1)
        assert out.read_text() == "earlier\n"
        assert sorted(os.listdir(tmp_path)) == before
        return message

    with target.open("a") as file:
        file.write("one too many\n")
    assert error().startswith(
        f"error: {source} and {target} must have the same number of lines (32 and 33): line i of one must be"
    )
    with source.open("a") as file:
        file.write("§" * 80 + "\n")
    assert error().startswith("error: line 33 has 160 source and 8 target tokens, and the model has room for 159 of")
    # A disk that fills up in the second chunk.
    source.write_text("a\n" * 33)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (150, hard))
    try:
        message = error()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    remedy = "raise the limit of file size (ulimit -f), and run the same command again"
    assert message == f"error: {out} cannot be written (File too large): {remedy}\n"
