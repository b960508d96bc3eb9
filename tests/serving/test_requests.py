import json
from typing import Any

import pytest
from pydantic import ValidationError

from dist_transformer.base.errors import UserError
from dist_transformer.serving.requests import AttentionRequest, TextRequest, check_length, most_bytes

GOOD = {"model": 1, "text": "a dog", "tokens": [5, 6], "kind": "encoder", "layer": 2}


def read(value: Any) -> TextRequest:
    return TextRequest.model_validate_json(json.dumps(value))


def test_a_text_is_one_line() -> None:
    assert read({"text": "one\ntwo\r\nthree\tfour\u2028five\n"}).text == "one two three four five"
    assert read({"text": "a", "prefix": "b\tc"}).prefix == "b c"


def test_the_longest_text_fits_the_longest_body() -> None:
    # JSON escapes each of these to two times six bytes.
    sent = {"text": "💥" * 2000, "prefix": "💥" * 2000}
    assert len(json.dumps(sent)) <= most_bytes(2000)
    check_length(read(sent).text, 2000)
    with pytest.raises(UserError, match="the text has 2,000 characters, and at most 1,999 are allowed"):
        check_length(read(sent).text, 1999)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"text": " \n\t\u3000"}, "there is no text"),
        ({"text": "a", "prefix": "a\0b"}, r"the text holds U\+0000"),
        ({"text": "a\x1b[1m"}, r"the text holds U\+001B"),
        ({"text": 5}, "text\n  Input should be a valid string"),
        ({"text": "a", "more": 1}, "more\n  Extra inputs are not permitted"),
    ],
)
def test_a_bad_text(value: Any, message: str) -> None:
    with pytest.raises((UserError, ValidationError), match=message):
        read(value)


@pytest.mark.parametrize(
    "changed", [{"model": "0"}, {"layer": -1}, {"tokens": [5, None]}, {"tokens": [True]}, {"kind": "self"}, {"more": 1}]
)
def test_a_bad_request_for_attention(changed: dict[str, Any]) -> None:
    assert AttentionRequest.model_validate_json(json.dumps(GOOD)).tokens == [5, 6]
    with pytest.raises(ValidationError):
        AttentionRequest.model_validate_json(json.dumps({**GOOD, **changed}))
