"""The output of a run in a terminal and in a log file."""

import fcntl
import math
import os
import pty
import re
import select
import struct
import sys
import termios
from pathlib import Path

import pytest

from dist_transformer.reporting.reporter import Reporter
from tests.conftest import begin_python
from tests.reporting.recorded import VALUES


def test_a_log_file_has_plain_lines_without_carriage_returns(
    reporter: Reporter, capsys: pytest.CaptureFixture[str]
) -> None:
    assert not sys.stderr.isatty()
    assert reporter.bar is None
    reporter.train_line(50, VALUES, seconds_left=61)
    reporter.advance()
    reporter.say("saved")
    output = capsys.readouterr()
    assert output.err == ""
    assert output.out == (
        "step  50/100  loss  1.500  ppl    3.49  tok/s    12,346  fill  99%  data stall   0%  left 1:01\nsaved\n"
    )


def test_columns_stay_in_place_from_start_to_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    reporter = Reporter(tmp_path, is_main=True, max_steps=300_000, first_step=0)
    early = {"loss": 11.25, "ppl": 37_000.4, "target_tokens_per_second": 850.0, "data_stall": 1.0, "mfu": 0.004}
    late = {"loss": 1.0, "ppl": 4.5, "target_tokens_per_second": 1_987_654.0, "fill": 1.0, "mfu": 0.4151}
    for step, values in ((50, early), (300_000, late)):
        reporter.train_line(step, {**VALUES, **values}, seconds_left=360_000)
    reporter.close()
    first, second = capsys.readouterr().out.splitlines()
    names = ("loss", "ppl", "tok/s", "fill", "data stall", "mfu", "left")
    assert [first.index(name) for name in names] == [second.index(name) for name in names]
    assert "ppl 3.7e+04" in first
    assert second.endswith("tok/s 1,987,654  fill 100%  data stall   0%  mfu  42%  left 100:00:00")
    assert len(first) == len(second) <= 116


def test_a_line_shows_the_memory_of_gpus_and_a_rank_that_is_slower(
    reporter: Reporter, capsys: pytest.CaptureFixture[str]
) -> None:
    """0.56 s are 12% more than the median of 0.5 s; 4% are not worth a word."""
    ranks = {"peak_memory_share": 0.884, "slowest_rank": 3, "median_rank_seconds": 0.5}
    for seconds in (0.56, 0.52):
        reporter.train_line(50, {**VALUES, **ranks, "slowest_rank_seconds": seconds}, seconds_left=61)
    slow, even = capsys.readouterr().out.splitlines()
    assert slow.endswith("data stall   0%  memory  88%  slowest rank 3 +12%  left 1:01")
    assert even.endswith("data stall   0%  memory  88%  left 1:01")


def test_numbers_that_are_not_finite_or_huge_are_shown(reporter: Reporter, capsys: pytest.CaptureFixture[str]) -> None:
    for loss, ppl in ((math.nan, math.nan), (690.0, 1e300), (math.inf, math.inf)):
        reporter.train_line(1, {**VALUES, "loss": loss, "ppl": ppl}, seconds_left=0)
    lines = capsys.readouterr().out.splitlines()
    assert re.search(r"loss +nan +ppl +nan ", lines[0])
    assert re.search(r"loss +690.000 +ppl +1.0e\+300 ", lines[1])
    assert re.search(r"loss +inf +ppl +inf", lines[2])
    assert max(map(len, lines)) <= 105


# Numbers as wide as they come, resumed far into the run; the reporter is all that it writes.
IN_A_TERMINAL = """
import os, sys, time
from pathlib import Path
from dist_transformer.base.errors import print_messages
from dist_transformer.reporting.reporter import Reporter
print_messages()
figures = {"loss": 10.138, "nll": 9.0, "ppl": 8737.92, "fill": 0.99, "data_stall": 0.012, "mfu": 0.415}
reporter = Reporter(Path(sys.argv[1]), is_main=True, max_steps=300_000, first_step=99_990)
reporter.say("begin")
for step in range(99_991, 100_000):
    reporter.advance()
    if step % 3 == 0:
        reporter.train_line(step, {**figures, "target_tokens_per_second": 1234567.8}, seconds_left=3000)
        reporter.say(f"step {step}: saved")
        while os.get_terminal_size(0).columns != int(sys.argv[2]):
            time.sleep(0.01)
    time.sleep(0.12)
reporter.close()
"""


def screen_lines(output: str) -> list[str]:
    """List the texts that a line of the terminal had at any time."""
    return [line.rstrip() for line in re.split(r"[\r\n]+", output) if line.strip()]


def run_in_terminal(folder: Path, columns: int, later: int | None = None, **files: Path) -> str:
    """Output of the program where input, output and errors are a terminal of so many columns, but for `files`.

    Args:
        later: number of columns after the first message.
    """
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    # An empty width is none.
    terminal = Path(os.ttyname(theirs))
    streams = {"output": terminal, "errors": terminal, **files}
    process = begin_python(
        "-c", IN_A_TERMINAL, folder, later or columns, stdin=terminal, COLUMNS="", LINES="", **streams
    )
    output = b""
    while process.poll() is None or select.select([ours], [], [], 0)[0]:
        if select.select([ours], [], [], 0.05)[0]:
            output += os.read(ours, 65536)
        if later is not None and b"saved" in output:
            fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, later, 0, 0))
    os.close(theirs)
    os.close(ours)
    assert process.returncode == 0, output
    return output.decode()


@pytest.mark.system
@pytest.mark.parametrize(
    ("columns", "figures"),
    [
        (120, " loss 10.138 ppl 8737.92 tok/s 1,234,568 fill 99% data stall 1% mfu 42%"),
        (80, " loss 10.138 ppl 8737.92 tok/s 1,234,568"),
        (40, " loss 10.138"),
        # The width is not known: 80 is taken.
        (0, " loss 10.138 ppl 8737.92 tok/s 1,234,568"),
    ],
)
def test_the_bar_is_as_wide_as_its_terminal(tmp_path: Path, columns: int, figures: str) -> None:
    output = run_in_terminal(tmp_path, columns)
    lines = screen_lines(output)
    room = (columns or 80) - 1
    assert max(map(len, lines)) <= room
    bars = [line for line in lines if "/300000" in line]
    assert len(bars) >= 5
    # Figures come whole or not at all. A narrow terminal has them in place of the bar, which else takes all the rest.
    place = "" if columns == 40 else r"\|.{8,}\| "
    assert all(re.fullmatch(rf"\d+/300000 {place}\S+ left({re.escape(figures)})?", line) for line in bars), bars
    if columns != 40:
        assert {len(line) for line in bars} == {room}
    assert bars[-1].startswith("99999/300000 ")
    assert bars[-1].endswith(figures)
    assert [line for line in lines if line not in bars] == [
        "begin",
        "step 99993: saved",
        "step 99996: saved",
        "step 99999: saved",
    ]
    assert "\x1b" not in output


@pytest.mark.system
def test_the_bar_follows_the_width_of_its_terminal(tmp_path: Path) -> None:
    lines = [line for line in screen_lines(run_in_terminal(tmp_path, 120, later=40)) if "/300000" in line]
    assert len(lines[0]) == 119
    assert re.fullmatch(r"99999/300000 \S+ left loss 10.138", lines[-1])


@pytest.mark.system
@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_a_stream_that_goes_to_a_file_gives_plain_lines(tmp_path: Path, stream: str) -> None:
    """`train > log` and `train 2> log` in a terminal."""
    log = tmp_path / "log"
    screen = run_in_terminal(tmp_path, 80, **{"output" if stream == "stdout" else "errors": log})
    lines = (log.read_text() if stream == "stdout" else screen.replace("\r\n", "\n")).splitlines(keepends=True)
    assert [line.split()[1] for line in lines if "loss" in line] == ["99993/300000", "99996/300000", "99999/300000"]
    assert len(lines) == 7
    assert not re.search(r"[\r\x1b]", "".join(lines))
    # The other stream has nothing to say.
    assert (screen if stream == "stdout" else log.read_text()) == ""
