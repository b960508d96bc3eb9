"""Messages of the library: commands print them, and other programs silence, redirect or reformat them by `logging`."""

import io
import logging
import subprocess
import sys
from pathlib import Path

import pytest

from dist_transformer.base.errors import UserError, exit_on_user_error, logger
from dist_transformer.runtime.child import run_child
from tests.api.examples import sections
from tests.conftest import run_python

# A program that uses the package, and gives no handler.
SPEAKING = """
from dist_transformer.base.errors import log_line
log_line("kept: 3 of 4 pairs")
log_line("warning: 1 pair is empty")
"""


def run(program: str) -> tuple[str, str]:
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    return done.stdout, done.stderr


def test_a_command_prints_warnings_to_stderr_and_others_to_stdout(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def main() -> None:
        logger.info("50% done: https://me:word@host/a\x1b[2J")
        logger.info("resumes", extra={"stream": "stderr"})
        logger.warning("a note")

    monkeypatch.setattr(logger, "handlers", [])
    exit_on_user_error(main)
    assert capsys.readouterr() == ("50% done: https://***@host/a\\x1b[2J\n", "resumes\na note\n")


def test_a_command_prints_each_message_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also if a library that it imports gives the root logger a handler."""
    monkeypatch.setattr(logging.root, "handlers", [logging.StreamHandler(sys.stdout)])
    exit_on_user_error(lambda: logger.info("a line"))
    assert capsys.readouterr().out == "a line\n"


def test_a_command_decides_on_an_output_that_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    class Lost(io.StringIO):
        def write(self, text: str) -> int:
            raise UserError("standard output cannot be written")

    monkeypatch.setattr(sys, "stdout", Lost())
    with pytest.raises(UserError, match="cannot be written"):
        logger.info("a line")


@pytest.mark.system
def test_another_program_sees_warnings_alone() -> None:
    assert run(SPEAKING) == ("", "warning: 1 pair is empty\n")


@pytest.mark.system
def test_another_program_silences_redirects_and_reformats() -> None:
    silent = "import logging\nlogging.getLogger('dist_transformer').setLevel(logging.CRITICAL)"
    assert run(f"{silent}{SPEAKING}") == ("", "")
    by_name = "import sys, logging\nlogging.basicConfig(stream=sys.stdout, level=0, format='%(name)s: %(message)s')"
    lines = "dist_transformer: kept: 3 of 4 pairs\ndist_transformer: warning: 1 pair is empty\n"
    assert run(f"{by_name}{SPEAKING}") == (lines, "")
    (of_the_page,) = sections()["Messages"]
    out, error = run(f"{of_the_page}{SPEAKING}")
    assert out == ""
    assert [line.split(maxsplit=2)[2] for line in error.splitlines()] == [
        line.split(": ", 1)[1] for line in lines.splitlines()
    ]


@pytest.mark.system
@pytest.mark.parametrize(("first", "shown"), [("", True), ("import logging; logging.basicConfig(); ", False)])
def test_a_function_prints_its_lines_unless_the_program_configures_them(
    tmp_path: Path, first: str, shown: bool
) -> None:
    call = f"api.prepare(toy=60, vocab_size=300, out={str(tmp_path / 'data')!r}, seed=3)"
    done = run_python("-c", f"{first}from dist_transformer import api; {call}")
    assert ("kept" in done.stdout) == shown, done.stderr


def test_the_lines_of_a_child_are_messages(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(logger, "handlers", [caplog.handler])
    program = (
        "import sys; print('step 1\\n'); print('warning: slow'); print('error: no disk', file=sys.stderr); sys.exit(1)"
    )
    assert run_child([sys.executable, "-c", program]) == (1, "no disk")
    said = [(record.levelname, record.getMessage()) for record in caplog.records]
    assert [line for line in said if line[1] != "error: no disk"] == [
        ("INFO", "step 1"),
        ("INFO", ""),
        ("WARNING", "warning: slow"),
    ]
    assert ("WARNING", "error: no disk") in said
