"""Names that come from files, as a terminal shows them, and errors of a command."""

import io
import sys
from pathlib import Path

import pytest
import torch

from dist_transformer.base.errors import UserError, exit_on_user_error, printable, say
from dist_transformer.base.files import SETTINGS_BYTES, read_small


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


@pytest.mark.parametrize(("encoding", "shown"), [("utf-8", "→ ü"), ("latin-1", r"\u2192 ü"), ("ascii", r"\u2192 \xfc")])
def test_a_character_that_an_encoding_lacks_is_an_escape(encoding: str, shown: str) -> None:
    stream = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    say("→ ü", file=stream)
    assert stream.buffer.getvalue().decode(encoding) == f"{shown}\n"  # type: ignore[attr-defined]


def test_an_error_of_the_system_is_shown_without_its_number(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    large = tmp_path / "config.json"
    large.write_bytes(b" " * (SETTINGS_BYTES + 1))
    found = []
    for path in (large, tmp_path / "missing"):
        with pytest.raises(OSError, match="Errno") as raised:
            read_small(path)
        found.append(UserError(f"{path.name} cannot be read ({raised.value})"))
        say(f"note: {path.name} cannot be read ({raised.value})")
    texts = [
        "config.json cannot be read (it has 1,048,577 bytes, but at most 1,048,576 are expected)",
        f"missing cannot be read (No such file or directory: '{tmp_path / 'missing'}')",
    ]
    assert [str(error) for error in found] == texts
    assert capsys.readouterr().out.splitlines() == [f"note: {text}" for text in texts]


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (MemoryError(), "error: out of memory (MemoryError): use smaller sizes or batches"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: 7 bytes.\nmore"), "memory: 7 bytes.): use smaller"),
        (torch.OutOfMemoryError("CUDA out of memory"), "(CUDA out of memory): use smaller sizes"),
    ],
)
def test_memory_that_is_short_is_one_sentence(
    error: Exception, said: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        raise error

    monkeypatch.setattr(sys, "argv", ["command"])
    with pytest.raises(SystemExit) as ended:
        exit_on_user_error(fail, prints=False)
    assert ended.value.code == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert said in line
    error = RuntimeError("a fault of ours")
    with pytest.raises(RuntimeError, match="a fault of ours"):
        exit_on_user_error(fail, prints=False)
