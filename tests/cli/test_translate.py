"""tools/translate.py as a user runs it."""

import json
import os
import re
import select
import shlex
import shutil
import subprocess
import sys
import termios
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dist_transformer.cli.translate import translation_of
from dist_transformer.inference.translation import ScoredText, Translation, noted
from tests.cli.conftest import Call, Lines
from tests.conftest import ROOT, run_python
from tests.small_model import restate

pytestmark = pytest.mark.system


def command(model: Path) -> list[str]:
    return [str(ROOT / "tools/translate.py"), "--model", str(model), "--max-extra-tokens", "5"]


def translate(model: Path, text: str | bytes, *options: str) -> subprocess.CompletedProcess[str]:
    return run_python(*command(model), *options, input=text)


def test_the_command_of_a_card_works_from_any_folder_after_a_move(model_folder: Path, tmp_path: Path) -> None:
    moved = Path(shutil.copytree(model_folder, tmp_path / "else where" / "renamed"))
    (words,) = re.findall(r"`(dist-transformer translate .*)`", (moved / "README.md").read_text(encoding="utf-8"))
    (tmp_path / "input.txt").write_text("a\n\n", encoding="utf-8")
    program = f'dist-transformer() {{ "{sys.executable}" -m dist_transformer "$@"; }}'
    script = f"{program}; cd {shlex.quote(str(moved))}; MODEL=$PWD; cd {shlex.quote(str(tmp_path))}; {words}"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(["bash", "-c", script], env=environment, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert len((tmp_path / "output.txt").read_text(encoding="utf-8").splitlines()) == 2


def test_one_line_for_each_line(model_folder: Path, toy_lines: Lines) -> None:
    lines = [toy_lines[0][0], "", "word " * 5000, toy_lines[0][1] + "\r", "   ", toy_lines[0][2]]
    done = translate(model_folder, "\n".join(lines))
    assert done.returncode == 0, done.stderr
    out = done.stdout.split("\n")
    assert len(out) == 7
    assert out[-1] == ""
    assert [bool(line) for line in out[:6]] == [True, False, True, True, False, True]
    parts, cut = done.stderr.splitlines()
    assert parts.startswith("note: 1 line of more than 154 tokens: translated in parts")
    assert "cut at the limit of source + 5 tokens" in cut


def test_lines_of_several_sentences_are_split_as_the_flag_says(
    model_folder: Path, toy_lines: Lines, tmp_path: Path
) -> None:
    sentences = [line for line in toy_lines[0][:40] if line.endswith(".") and len(line) < 52][:3]
    trained = tmp_path / "trained"
    shutil.copytree(model_folder, trained)
    restate(trained, longest_source=30)
    lines = "\n".join([" ".join(sentences), *sentences])
    first, *alone = translate(trained, lines, "--split-over", "29").stdout.splitlines()
    assert first == " ".join(line for line in alone if line)
    for model, flags, note in (
        (trained, (), "note: 1 line of more than 30 tokens: translated in parts"),
        (trained, ("--split-over", "no"), "note: 1 line with a sentence that is longer than any in the training"),
        (model_folder, ("--split-over", "12"), "note: 1 line of more than 12 tokens: translated in parts"),
        (model_folder, (), ""),
    ):
        done = translate(model, lines, *flags)
        assert done.returncode == 0, done.stderr
        assert (done.stdout.splitlines()[0] == first) == ("in parts" in note)
        notes = [said for said in done.stderr.splitlines() if "that was cut at the limit" not in said]
        assert [said.startswith(note) for said in notes] == [True] * bool(note)


def test_lines_are_answered_as_they_are_typed(model_folder: Path, toy_lines: Lines) -> None:
    lines = [toy_lines[0][0], "", " ".join(toy_lines[0][:20])]
    piped = translate(model_folder, "".join(f"{line}\n" for line in lines))
    expected = piped.stdout.splitlines()
    terminal, inner = os.openpty()
    settings = termios.tcgetattr(inner)
    settings[3] &= ~termios.ECHO
    termios.tcsetattr(inner, termios.TCSANOW, settings)
    words = [sys.executable, *command(model_folder)]
    with subprocess.Popen(words, stdin=inner, stdout=subprocess.PIPE, stderr=inner) as process:
        os.close(inner)
        assert process.stdout is not None
        try:
            screen = read_until(terminal, "en-de> ")
            assert screen == "Type one sentence per line. Ctrl-D ends.\r\nen-de> "
            for line, translation in zip(lines, expected, strict=True):
                os.write(terminal, f"{line}\n".encode())
                # It arrives although standard input stays open.
                assert process.stdout.readline().decode() == f"{translation}\n"
                screen = read_until(terminal, "en-de> ")
                assert screen.startswith("note: 1 line of more than 154 tokens") == (line == lines[2])
            os.write(terminal, b"\x04")
            assert process.wait(timeout=600) == 0
            assert process.stdout.read() == b""
            assert os.read(terminal, 100) == b"\r\n"
        finally:
            process.kill()
            os.close(terminal)


def read_until(terminal: int, end: str) -> str:
    text = ""
    while not text.endswith(end):
        assert select.select([terminal], [], [], 60)[0], f"after {text!r} nothing came for a minute"
        text += os.read(terminal, 10_000).decode()
    return text


def test_a_run_folder_in_place_of_its_model(model_folder: Path, tmp_path: Path, call: Call) -> None:
    run = tmp_path / "run"
    shutil.copytree(model_folder, run / "model")
    remedy = f"use the model folder in it, {run / 'model'}"
    assert call("translate", "--model", run, status=1) == (
        "",
        f"error: {run} is not a model folder (it has no config.json): {remedy}\n",
    )


def test_of_a_beam_the_text_closest_to_a_reference(model_folder: Path, toy_lines: Lines, tmp_path: Path) -> None:
    text = f"{toy_lines[0][0]}\n\n{toy_lines[0][1]}\n"
    ranked = translate(model_folder, text, "--nbest", "3", "--beam", "3", "--format", "jsonl").stdout.splitlines()
    worst = [json.loads(line)["translations"][-1]["text"] for line in ranked]
    references = tmp_path / "references of the lines"
    references.write_text("".join(f"{line}\n" for line in worst), encoding="utf-8")
    done = translate(model_folder, text, "--beam", "3", "--closest-to", str(references))
    assert done.stdout.splitlines() == worst
    assert translate(model_folder, text, "--beam", "3").stdout.splitlines() != worst


@pytest.mark.parametrize("lowercase", [True, False])
def test_closeness_ignores_case_if_the_vocabulary_lowercases(lowercase: bool) -> None:
    texts = ("ein hund rennt hier", "Der Hund läuft dort")
    both = (ScoredText(text=text, score=0.0, tokens=(), terms_kept=kept) for kept, text in enumerate(texts))
    found, notes = Translation(hypotheses=(*both,), terms=1), Counter[str]()
    tokenizer = SimpleNamespace(target=SimpleNamespace(lowercase=lowercase))
    translator: Any = SimpleNamespace(tokenizer=tokenizer, translate=lambda lines, **_: [found])
    info: Any = SimpleNamespace(target_language="de")
    settings: Any = SimpleNamespace(closest_to=Path("references"), beside={"--closest-to": Path("references")})
    choose = translation_of(settings, translator, info, notes)
    (chosen,) = choose([("A dog runs there", "Ein Hund rennt dort")], 1)
    assert chosen.text == texts[0 if lowercase else 1]
    assert noted(notes) == [f"{0 if lowercase else 1} of 1 terms are in the translations"]


def test_translations_begin_with_the_lines_of_a_file(model_folder: Path, toy_lines: Lines, tmp_path: Path) -> None:
    prefixes = tmp_path / "prefixes.txt"
    prefixes.write_text("der Hu\n\ndie al\n", encoding="utf-8")
    text = "".join(f"{line}\n" for line in toy_lines[0][:3])
    first, second, third = translate(model_folder, text, "--prefix", str(prefixes)).stdout.splitlines()
    assert (first[:6], third[:6]) == ("der Hu", "die al")
    assert second == translate(model_folder, text).stdout.splitlines()[1]
    # The same from a file, in chunks of one line, on two ranks.
    (tmp_path / "in.txt").write_text(text, encoding="utf-8")
    files = ["--input", tmp_path / "in.txt", "--output", tmp_path / "out.txt", "--chunk-lines", 1]
    done = run_python(*command(model_folder), *files, "--prefix", prefixes, ranks=2)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "out.txt").read_text("utf-8").splitlines() == [first, second, third]
    for count, said in ((2, "the input ends after 2 lines"), (4, f"{prefixes} ends after 3 lines")):
        done = translate(model_folder, "a\n" * count, "--prefix", str(prefixes))
        assert done.returncode == 1
        assert done.stderr.startswith(
            f"error: --prefix must have one line for each input line, which may be empty; {said}, and "
        )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ((), "error: standard input line 2 is not UTF-8"),
        (("--device", "abacus"), "error: --device abacus cannot be used"),
        (("--device", "meta"), "error: --device meta is not supported: use cpu or cuda:0"),
    ],
)
def test_bad_input_is_one_sentence(model_folder: Path, options: tuple[str, ...], message: str) -> None:
    done = translate(model_folder, b"good\nbad \xff\n", *options)
    assert (done.returncode, done.stdout) == (1, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith(message)
