"""tools/translate.py as a user runs it."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
Lines = tuple[list[str], list[str]]


def translate(model: Path, text: bytes, *options: str) -> subprocess.CompletedProcess[bytes]:
    command = [sys.executable, str(ROOT / "tools/translate.py"), "--model", str(model), "--max-extra-tokens", "5"]
    return subprocess.run([*command, *options], input=text, capture_output=True, check=False)


def test_one_line_for_each_line(model_folder: Path, toy_lines: Lines) -> None:
    lines = [toy_lines[0][0], "", "word " * 5000, toy_lines[0][1] + "\r", "   ", toy_lines[0][2]]
    done = translate(model_folder, "\n".join(lines).encode())
    assert done.returncode == 0, done.stderr
    out = done.stdout.decode("utf-8").split("\n")
    assert len(out) == 7
    assert out[-1] == ""
    assert [bool(line) for line in out[:6]] == [True, False, False, True, False, True]
    (warning,) = done.stderr.decode().splitlines()
    assert warning.startswith("warning: line 3 has ")
    assert "the limit is 154" in warning


def test_nbest(model_folder: Path, toy_lines: Lines) -> None:
    text = f"{toy_lines[0][0]}\n\n{toy_lines[0][1]}\n".encode()
    plain = translate(model_folder, text).stdout.decode().splitlines()
    done = translate(model_folder, text, "--nbest", "3", "--beam", "3")
    rows = [line.split(" ||| ") for line in done.stdout.decode().splitlines()]
    assert [row[0] for row in rows] == ["0", "0", "0", "1", "2", "2", "2"]
    scores = [float(row[2]) for row in rows]
    assert scores[:3] == sorted(scores[:3], reverse=True)
    assert rows[3][1:] == ["", "0.000000"]
    assert len(plain) == 3


@pytest.mark.parametrize(
    ("text", "options", "message"),
    [
        (b"good\nbad \xff\n", (), "error: standard input line 2 is not UTF-8"),
        (b"good\n", ("--beam", "0"), "error: beam_size is 0"),
        (b"good\n", ("--device", "abacus"), "error: --device abacus cannot be used"),
        (b"good\n", ("--device", "meta"), "error: --device meta is not supported: give cpu or cuda:0"),
    ],
)
def test_bad_input_is_one_sentence(model_folder: Path, text: bytes, options: tuple[str, ...], message: str) -> None:
    done = translate(model_folder, text, *options)
    assert done.returncode == 1
    assert done.stdout == b""
    (line,) = done.stderr.decode().splitlines()
    assert line.startswith(message)
