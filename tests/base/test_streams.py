"""Streams that a process outlives, in processes of their own: a user's shell redirects them."""

import shlex
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import sys, time
from dist_transformer.base.streams import outlive_streams

outlive_streams(remedy="the run continues")
# A file that is opened next must not become a standard stream.
kept = open(sys.argv[1], "w")
for number in range(300):
    print("line", number)
    if number == 100:
        time.sleep(0.5)
print("wide" * 20000)
print("to stderr", file=sys.stderr)
print("kept", file=kept)
raise SystemExit(75)
"""


def run(tmp_path: Path, redirected: str) -> tuple[int, str]:
    """Status of the program, and what the shell's own stdout and stderr got."""
    words = shlex.join([sys.executable, "-c", PROGRAM, str(tmp_path / "kept")])
    done = subprocess.run(
        ["bash", "-c", f"{words} {redirected}; exit ${{PIPESTATUS[0]}}"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        timeout=120,
    )
    assert (tmp_path / "kept").read_text() == "kept\n"
    return done.returncode, done.stdout


@pytest.mark.parametrize(
    ("redirected", "seen"),
    [
        ("> /dev/null", "to stderr\n"),
        ("> /dev/full", "stdout cannot be written (No space left on device): the run continues\nto stderr\n"),
        ("> /dev/full 2>&1", ""),
        (">&-", "to stderr\n"),
        ("<&- >&- 2>&-", ""),
        ("2> /dev/full | tail -n 1", "stderr cannot be written (No space left on device): the run continues\n"),
    ],
)
def test_a_process_outlives_its_streams(tmp_path: Path, redirected: str, seen: str) -> None:
    assert run(tmp_path, redirected) == (75, seen)


def test_a_reader_that_has_read_enough(tmp_path: Path) -> None:
    status, seen = run(tmp_path, "| head -n 1")
    assert status == 75
    assert sorted(seen.splitlines()) == [
        "line 0",
        "stdout cannot be written (Broken pipe): the run continues",
        "to stderr",
    ]


def test_a_disk_that_has_room_again_gets_the_next_lines(tmp_path: Path) -> None:
    """A limit on the size of files stands for the disk."""
    program = """
import resource, sys
from dist_transformer.base.streams import outlive_streams
outlive_streams(remedy="the run continues")
print("first")
soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, (6, hard))
print("second")
print("third")
resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
print("fourth")
"""
    with (tmp_path / "log").open("w") as log:
        done = subprocess.run(
            [sys.executable, "-c", program], stdout=log, stderr=subprocess.PIPE, text=True, check=True, timeout=120
        )
    assert (tmp_path / "log").read_text() == "first\nfourth\n"
    assert done.stderr == "stdout cannot be written (File too large): the run continues\n"


TOOL = """
import os, sys
from dist_transformer.base.errors import exit_on_user_error

def main():
    if sys.argv[1] == "print":
        for _ in range(100_000):
            print("a line of a result")
    read, write = os.pipe()
    os.close(read)
    os.write(write, b"a broken connection, and stdout is well")

exit_on_user_error(main)
"""


def test_a_tool_ends_well_only_if_it_is_stdout_that_was_closed() -> None:
    words = shlex.join([sys.executable, "-c", TOOL])
    for what, redirected, status in (("print", "| head -n 1", 0), ("connect", "| cat", 1), ("connect", "", 1)):
        done = subprocess.run(
            ["bash", "-c", f"{words} {what} {redirected}; exit ${{PIPESTATUS[0]}}"],
            capture_output=True,
            text=True,
            check=False,
            timeout=120,
        )
        assert done.returncode == status, done.stderr
        assert ("BrokenPipeError" in done.stderr) == (status == 1)


# A command that prints, as every command does it.
COMMAND = """
import sys
from dist_transformer.base.errors import exit_on_user_error, say

def main():
    if sys.argv[1] == "say":
        say("a line")
    elif sys.argv[1] == "bytes":
        sys.stdout.buffer.write(b"a line" * 10_000)
    elif sys.argv[1] == "exit":
        print("help")
        raise SystemExit(0)
    else:
        print("a line")
    say("a note", file=sys.stderr)

exit_on_user_error(main)
"""
FULL = "error: standard output cannot be written (No space left on device): choose another place"
CLOSED = "error: standard output is closed: open it, for instance with > FILE or > /dev/null"


def run_command_line(what: str, redirected: str, command: str = COMMAND) -> tuple[int, list[str]]:
    """Status of a command, and the lines that the shell's own stdout and stderr got."""
    words = shlex.join([sys.executable, "-c", command])
    done = subprocess.run(
        ["bash", "-c", f"{words} {what} {redirected}"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        timeout=120,
    )
    return done.returncode, done.stdout.splitlines()


@pytest.mark.parametrize("what", ["say", "bytes", "exit", "print"])
def test_a_result_that_cannot_be_written_is_one_error(what: str) -> None:
    """No traceback, and no second message at the interpreter's end."""
    status, lines = run_command_line(what, "> /dev/full")
    assert (status, lines[-1]) == (1, FULL)
    # What is printed without a flush fails at the end.
    assert lines[:-1] == (["a note"] if what in ("bytes", "print") and lines[:-1] else [])
    assert run_command_line(what, ">&-") == (1, [CLOSED])


@pytest.mark.parametrize("redirected", ["2> /dev/full", "2>&-", "2>&- <&-"])
def test_a_lost_note_changes_nothing_and_is_not_in_the_result(redirected: str) -> None:
    assert run_command_line("print", redirected) == (0, ["a line"])


def test_an_argument_that_is_not_utf8_is_one_error() -> None:
    status, lines = run_command_line(r"$'caf\xe9.txt'", "")
    assert status == 1
    assert lines == [r"error: the argument caf\udce9.txt is not UTF-8: write it in UTF-8, or rename the file"]
