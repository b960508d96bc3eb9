"""JSON that another person or program may have written."""

from pathlib import Path

import pytest

from dist_transformer.base.errors import UserError
from dist_transformer.config.plain import read_json


def test_reading_json(tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    with pytest.raises(UserError, match=r"a\.json does not exist: check the path"):
        read_json(file)
    for content in (b"", b"{", b"\xff\xfe", b'{"a": 1}}', b'{"a": 1\x00}', b'{"a": ' + b"9" * 5000 + b"}"):
        file.write_bytes(content)
        with pytest.raises(UserError, match=r"a\.json cannot be read as JSON .*: restore or rewrite it") as refused:
            read_json(file)
        assert str(refused.value).isprintable()
    file.write_text("[1]")
    with pytest.raises(UserError, match=r"a\.json must hold a JSON object, not list"):
        read_json(file)
    with pytest.raises(UserError, match="cannot be read as JSON"):
        read_json(tmp_path)
    file.write_text('{"ä": "\\ud83d\\ude00"}', encoding="utf-8")
    assert read_json(file) == {"ä": "😀"}


def test_a_message_is_one_line_whatever_a_file_holds() -> None:
    assert str(UserError("a\nb\x1b[2J\ud800\u2028 — é\xa0")) == "a\\nb\\x1b[2J\\ud800\\u2028 — é\xa0"
