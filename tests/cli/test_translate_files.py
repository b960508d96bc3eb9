"""Files to a file, as a user does it: on one rank and two, killed, and with what cannot be."""

import gzip
import json
import signal
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from dist_transformer.inference.decoding import Loading
from dist_transformer.inference.files.parts import MANIFEST_FILE
from dist_transformer.inference.loading import with_agreed_precision
from tests.cli.conftest import Call, Lines
from tests.commands import Begun
from tests.conftest import ROOT, begin_ranks, run_python, scratch_folder

pytestmark = pytest.mark.system

PATIENCE = 300
# What ranks execute first. Where a test interrupts them, they are still there, however late it comes.
ENDLESS = """
import time
from dist_transformer.inference.files import corpus
corpus._finish = lambda *_: time.sleep(600)
"""
RANK_1_WRITES_LITTLE = """
import os, resource
if os.environ["RANK"] == "1":
    resource.setrlimit(resource.RLIMIT_FSIZE, (50, 50))
"""


@pytest.fixture
def files(tmp_path: Path, toy_lines: Lines) -> list[Path]:
    """100 lines in two files, of which one is compressed; two are blank and two are too long."""
    lines = [*toy_lines[0][:50], "", "word " * 80, *toy_lines[0][50:96], "   ", "§" * 80]
    with gzip.open(tmp_path / "first.en.gz", "wt", encoding="utf-8") as file:
        file.write("\n".join(lines[:65]) + "\n")
    (tmp_path / "second.en").write_text("\n".join(lines[65:]) + "\n", encoding="utf-8")
    return [tmp_path / "first.en.gz", tmp_path / "second.en"]


def words(model: Path, inputs: Sequence[Path], output: Path, *options: str) -> list[object]:
    files = ["--input", *inputs, "--output", output, "--chunk-lines", 10]
    return [ROOT / "tools" / "translate.py", "--model", model, "--max-extra-tokens", 5, *files, *options]


def whole(model: Path, inputs: Sequence[Path], output: Path, *options: str) -> str:
    """Translate on one rank, to the end; gives what it said."""
    done = run_python(*words(model, inputs, output, *options), COLUMNS="200")
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    return done.stderr


def start(
    model: Path, inputs: Sequence[Path], output: Path, *options: str, ranks: int = 1, first: str = ""
) -> list[Begun]:
    """Start the ranks without a launcher; they execute `first`."""
    folder, program = scratch_folder(), words(model, inputs, output, *options)
    files = {"output": folder / "output", "errors": folder / "errors"}
    (folder / "sitecustomize.py").write_text(first)
    return begin_ranks(range(ranks), *program, **files, world=ranks, COLUMNS="200", PYTHONPATH=f"{folder}:{ROOT}")


def end(processes: list[Begun]) -> tuple[list[int], str]:
    """Wait for the ranks: their exit statuses, and what they said."""
    statuses = [process.wait(PATIENCE) for process in processes]
    out, said = processes[0].communicate()
    assert out == ""
    return statuses, said


def wait_for_parts(output: Path, count: int, processes: list[Begun]) -> None:
    deadline = time.monotonic() + PATIENCE
    while len(list(Path(f"{output}.parts").glob("[0-9]*"))) < count:
        assert time.monotonic() < deadline
        assert [process.poll() for process in processes] == [None] * len(processes)
        time.sleep(0.005)


def test_the_same_bytes_on_any_number_of_ranks_and_after_kills(
    model_folder: Path, files: list[Path], tmp_path: Path
) -> None:
    alone, shared = tmp_path / "on_1.de", tmp_path / "on_2.de"
    said = whole(model_folder, files, alone)
    parts, cut = [line for line in said.splitlines() if line.startswith("note: ")]
    assert parts.startswith("note: 2 lines of more than 154 tokens: translated in parts")
    assert "that was cut at the limit" in cut

    # A rank that cannot write ends the other one too, with one message.
    statuses, said = end(start(model_folder, files, shared, ranks=2, first=RANK_1_WRITES_LITTLE))
    assert statuses == [1, 1], said
    (error,) = [line for line in said.splitlines() if line.startswith("error: ")]
    assert error.startswith(f"error: {shared} cannot be written (File too large)")
    assert "Traceback" not in said

    killed = start(model_folder, files, shared, ranks=2, first=ENDLESS)
    # Rank 0 had written some, before it learned of the other's end.
    wait_for_parts(shared, 5, killed)
    for process in killed:
        process.send_signal(signal.SIGKILL)
    assert end(killed)[0] == [-signal.SIGKILL] * 2
    assert not shared.exists()
    kept = {path: path.stat().st_mtime_ns for path in Path(f"{shared}.parts").glob("[0-9]*")}
    # A resume on another processor does not mix two precisions.
    recorded = json.loads((Path(f"{shared}.parts") / MANIFEST_FILE).read_text("utf-8"))["settings"]
    assert recorded["--precision"] == with_agreed_precision(Loading(), torch.device("cpu")).precision

    # Other settings are refused by both ranks, in one sentence.
    statuses, said = end(start(model_folder, files, shared, "--beam", "2", ranks=2))
    assert statuses == [1, 1], said
    assert said.splitlines() == [
        f"error: {shared}.parts was started with --beam 4, not 2: use the same settings and files to resume it, or "
        "remove that folder to start again"
    ]
    assert {path: path.stat().st_mtime_ns for path in kept} == kept

    # On another number of ranks.
    said = whole(model_folder, files, shared)
    assert f"resumes {shared}: {10 * len(kept)} of 100 lines are done" in said
    assert shared.read_bytes() == alone.read_bytes()
    rows = alone.read_text(encoding="utf-8").split("\n")
    assert len(rows) == 101
    assert [number for number, row in enumerate(rows) if not row] == [50, 98, 100]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["first.en.gz", "on_1.de", "on_2.de", "second.en"]


def test_an_interruption_says_how_to_resume(model_folder: Path, files: list[Path], tmp_path: Path) -> None:
    for parts, number in ((2, signal.SIGINT), (5, signal.SIGTERM)):
        started = start(model_folder, files, tmp_path / "out.de", first=ENDLESS)
        wait_for_parts(tmp_path / "out.de", parts, started)
        started[0].send_signal(number)
        statuses, said = end(started)
        assert statuses == [128 + number]
        assert said.splitlines()[-1] == "interrupted: run the same command again to resume"


@pytest.mark.slow
def test_samples_noise_and_the_best_few_under_a_launcher(model_folder: Path, files: list[Path], tmp_path: Path) -> None:
    """The same on one rank and on two; the last, which all draw by seed and line, also through standard input."""
    inputs, text = files[1:], files[1].read_bytes()
    tool = [str(ROOT / "tools" / "translate.py"), "--model", str(model_folder), "--max-extra-tokens", "5"]
    references = tmp_path / "references"
    references.write_text("a reference .\n" * len(text.splitlines()), encoding="utf-8")
    for options in (
        ["--closest-to", str(references), "--beam", "3"],
        ["--noise", "--beam", "1"],
        ["--nbest", "2", "--format", "jsonl", "--beam", "2"],
        ["--mbr", "6", "--utility", "bleu", "--nbest", "2", "--epsilon", "0.01", "--seed", "5"],
        ["--distinct", "--sample", "--nbest", "3", "--top-p", "0.8", "--epsilon", "0.01", "--seed", "5"],
    ):
        alone, shared = tmp_path / f"1{options[0]}", tmp_path / f"2{options[0]}"
        whole(model_folder, inputs, alone, *options)
        assert run_python(*words(model_folder, inputs, shared, *options), ranks=2).returncode == 0
        assert shared.read_bytes() == alone.read_bytes()
    assert run_python(*tool, "--chunk-lines", 10, *options, input=text).stdout == alone.read_text("utf-8")
    rows = [json.loads(line) for line in (tmp_path / "1--nbest").read_text(encoding="utf-8").splitlines()]
    assert [row["line"] for row in rows] == list(range(35))
    assert {len(row["translations"]) for row in rows} == {1, 2}


def test_chance_goes_by_seed_and_line(model_folder: Path, toy_lines: Lines) -> None:
    tool = [ROOT / "tools" / "translate.py", "--model", model_folder]
    line = toy_lines[0][0]

    def run(text: str, *options: str) -> list[str]:
        done = run_python(*tool, "--sample", "--max-extra-tokens", 5, *options, input=text)
        assert done.returncode == 0, done.stderr
        return done.stdout.splitlines()

    first = run(f"{line}\n" * 4)
    assert len(set(first)) == 4
    # The batch is another.
    assert run(f"{line}\n\nword\n{line}\n")[::3] == first[::3]
    assert run(f"{line}\n", "--seed", "2") != first[:1]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--input", "a"], "--input needs --output: add --output, or leave --input out"),
        (["--input", "none.en", "--output", "a"], "none.en does not exist: check the name"),
        (["--input", "none*.en", "--output", "a"], '--input "none*.en" matches no file'),
        (["--format", "tsv"], "--format needs --nbest: add --nbest, or leave --format out"),
        (["--sample", "--temperature", "0"], "--temperature is 0.0: it must be above 0"),
        (["--sample", "--noise"], "--noise has no effect with --sample, because noise is for"),
        (["--epsilon", "0.1"], "--epsilon needs --sample or --mbr: add one of them"),
        (["--prefix", "a", "--noise"], "--prefix has no effect with --noise, which changes its words: leave"),
        (["--prefix", "none.de"], "none.de does not exist: check the"),
        (
            ["--closest-to", "a", "--nbest", "2"],
            "--closest-to has no effect with --nbest, because it chooses one of the hypotheses of a beam: leave",
        ),
        (["--mbr", "1"], "--mbr is 1: set 2 to 1,000 samples per line"),
        (["--mbr", "4", "--nbest", "5"], "--nbest is 5: it must be 1 up to the 4 samples of mbr"),
        (["--mbr", "4", "--sample"], "--sample has no effect with --mbr, which draws samples of its own: leave"),
        (["--sample", "--top-p", "0"], "--top-p is 0.0: it must be above 0"),
        (["--sample", "--nbest", "0"], "--nbest is 0: it must be above 0"),
        (["--sample", "--length-penalty", "1"], "--length-penalty with --sample needs --nbest: add --nbest, or leave"),
        (
            ["--closest-to", "a", "--beam", "1"],
            "--closest-to has no effect with a beam of 1, which has one hypothesis: raise beam",
        ),
        (["--split-over", "0"], "--split-over is 0: it must be above 0"),
        (["--split-over", "some"], "--split-over is 'some': it must be a whole number or no"),
        (["--beam", "0"], "--beam is 0"),
        (["--chunk-lines", "0"], "--chunk-lines is 0: it must be above 0"),
    ],
)
def test_what_cannot_be_is_said_in_a_sentence(
    options: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: Call, model_folder: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    out, errors = call("translate", "--model", model_folder, *options, status=1)
    assert (out, errors.startswith(f"error: {said}"), errors.count("\n")) == ("", True, 1)
    assert list(tmp_path.iterdir()) == []
