"""Names that come from files, as a terminal shows them."""

import io

import pytest

from dist_transformer.base.errors import printable, say


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
