"""Names that come from files, as a terminal shows them, and errors of a command."""

import errno
import io
import re
import sys
from pathlib import Path

import pytest
import torch

from dist_transformer.base import urls
from dist_transformer.base.errors import UserError, exit_on_user_error, one_line, printable, say


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain, ü → 文\n\ttext", "plain, ü → 文\n\ttext"),
        ("\x1b[2J\x1b]0;title\x07", r"\x1b[2J\x1b]0;title\x07"),
        ("over\rwritten\b", r"over\rwritten\x08"),
        ("\x9b1m", r"\x9b1m"),
        ("\u202etxt.exe", r"\u202etxt.exe"),
        ("r\udcff", r"r\udcff"),
    ],
)
def test_nothing_commands_a_terminal(text: str, shown: str) -> None:
    assert printable(text) == shown
    assert one_line(f"{text}\u2028") == shown.replace("\n", r"\n").replace("\t", r"\t") + r"\u2028"


@pytest.mark.parametrize(("encoding", "shown"), [("utf-8", "→ ü"), ("latin-1", r"\u2192 ü"), ("ascii", r"\u2192 \xfc")])
def test_a_character_that_an_encoding_lacks_is_an_escape(encoding: str, shown: str) -> None:
    stream = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    say("→ ü", file=stream)
    assert stream.buffer.getvalue().decode(encoding) == f"{shown}\n"  # type: ignore[attr-defined]


def test_an_error_of_the_system_is_shown_without_its_number(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(OSError, match="Errno") as raised:
        (tmp_path / "missing").read_bytes()
    say(f"note: missing cannot be read ({raised.value})")
    text = f"missing cannot be read (No such file or directory: '{tmp_path / 'missing'}')"
    assert str(UserError(f"missing cannot be read ({raised.value})")) == text
    assert capsys.readouterr().out == f"note: {text}\n"


DISK = "free space there, and run the same command again"


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (MemoryError(), "out of memory (MemoryError): use smaller sizes or batches"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: 7 bytes.\nmore"), "memory: 7 bytes.): use smaller"),
        (torch.OutOfMemoryError("CUDA out of memory"), "(CUDA out of memory): use smaller sizes"),
        (OSError(errno.ENOSPC, "No space", "run/x.json"), f"run/x.json cannot be written (No space): {DISK}"),
        (OSError(errno.EDQUOT, "Disk quota exceeded", "x"), f"x cannot be written (Disk quota exceeded): {DISK}"),
        (
            RuntimeError("I/O error: No space left on device (os error 28)"),
            f"a file cannot be written (No space left on device): {DISK}",
        ),
        (
            RuntimeError("I/O error: File too large (os error 27)"),
            "a file cannot be written (File too large): raise the limit of file size (ulimit -f)",
        ),
    ],
)
def test_memory_and_disks_that_are_full_are_one_sentence(
    error: Exception, said: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        raise error

    monkeypatch.setattr(sys, "argv", ["command"])
    with pytest.raises(SystemExit) as ended:
        exit_on_user_error(fail, prints=False)
    assert ended.value.code == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
    assert said in line


@pytest.mark.parametrize(
    "variables",
    [
        ("RANK", "WORLD_SIZE"),
        ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
        ("PMI_RANK", "PMI_SIZE"),
        ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),
    ],
)
def test_any_other_error_is_one_line_and_a_traceback_on_request(
    variables: tuple[str, str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The line names the rank and the last place in the package."""
    # Afterwards it is as before.
    monkeypatch.setenv("DIST_TRANSFORMER_TRACEBACK", "")
    monkeypatch.delenv("DIST_TRANSFORMER_TRACEBACK")
    for name, value in zip(variables, ("3", "4"), strict=True):
        monkeypatch.setenv(name, value)
    ended = []
    for words in ([], ["--traceback"]):
        monkeypatch.setattr(sys, "argv", ["command", *words])
        with pytest.raises(SystemExit) as ends:
            exit_on_user_error(lambda: Path(urls.without_secrets(None)), prints=False)  # type: ignore[arg-type]
        ended.append((ends.value.code, sys.argv))
    assert ended == [(1, ["command"])] * 2
    line, *rest = capsys.readouterr().err.splitlines()
    said = r"error: rank 3: TypeError in base/urls.py:\d+: argument of type.*"
    assert re.fullmatch(f"{said}; run again with --traceback to see all", line)
    assert rest[0].startswith("Traceback")
    assert re.fullmatch(said, rest[-1])
