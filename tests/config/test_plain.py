"""JSON that another person or program may have written."""

from pathlib import Path

import pytest

from dist_transformer.base.errors import UserError
from dist_transformer.config.plain import read_json


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"a": 1, "b": {"c": 1, "c": 2}}', "has the name 'c' twice"),
        ('{"a": ' + "9" * 5000 + "}", "cannot be read as JSON"),
        ('{"a": 1\x00}', "cannot be read as JSON"),
    ],
    ids=lambda text: text[:20],
)
def test_json_that_is_damaged_or_ambiguous_is_refused_in_one_line(content: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    file.write_text(content)
    with pytest.raises(UserError, match=message) as refused:
        read_json(file)
    assert str(refused.value).isprintable()


def test_a_whole_pair_of_surrogates_is_a_character(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('{"a": "\\ud83d\\ude00"}')
    assert read_json(tmp_path / "a.json") == {"a": "😀"}


def test_a_message_is_one_line_whatever_a_file_holds() -> None:
    assert str(UserError("a\nb\x1b[2J\ud800\u2028 — é\xa0")) == "a\\nb\\x1b[2J\\ud800\\u2028 — é\xa0"
