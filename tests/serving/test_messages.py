import json
from typing import Any

import pytest

from dist_transformer.base.errors import UserError
from dist_transformer.serving.messages import AttentionRequest, most_bytes, read_attention_request, read_text

GOOD = {"model": 1, "text": "a dog", "tokens": [5, 6], "kind": "encoder", "layer": 2}


def body(value: Any) -> bytes:
    return json.dumps(value).encode()


def test_a_text_is_one_line() -> None:
    text, prefix = read_text(body({"text": "one\ntwo\r\nthree\tfour\u2028five\n"}), max_characters=100)
    assert (text, prefix) == ("one two three four five", "")
    assert read_text(body({"text": "a", "prefix": "b\tc"}), max_characters=100) == ("a", "b c")


def test_the_longest_text_fits_the_longest_body() -> None:
    # JSON escapes each of these to two times six bytes.
    sent = body({"text": "💥" * 2000, "prefix": "💥" * 2000})
    assert len(sent) <= most_bytes(2000)
    assert read_text(sent, max_characters=2000) == ("💥" * 2000, "💥" * 2000)


@pytest.mark.parametrize(
    ("sent", "message"),
    [
        (b"{", "the request is not JSON"),
        (b"\xff\xfe", "the request is not JSON"),
        (b"[]", "the request must be a JSON object with text"),
        (body({"text": "a", "more": 1}), "the request must be a JSON object with text"),
        (body({"text": 5}), "text must be a string"),
        (body({"text": " \n\t\u3000"}), "there is no text"),
        (body({"text": "a" * 11}), "the text has 11 characters, and at most 10 are allowed"),
        (body({"text": "a", "prefix": 5}), "prefix must be a string of at most 10 characters"),
        (body({"text": "a", "prefix": "b" * 11}), "prefix must be a string of at most 10 characters"),
        (body({"text": "a", "prefix": "a\0b"}), "the text holds U+0000"),
        (body({"text": "a\x1b[1m"}), "the text holds U+001B"),
        (b'{"text": "\\ud83d"}', "the text holds U+D83D"),
    ],
)
def test_a_bad_text_is_one_sentence(sent: bytes, message: str) -> None:
    with pytest.raises(UserError) as refused:
        read_text(sent, max_characters=10)
    assert str(refused.value).startswith(message)
    assert "\n" not in str(refused.value)


def test_a_request_for_attention() -> None:
    request = read_attention_request(body(GOOD), models=2, max_characters=10)
    assert request == AttentionRequest(model=1, text="a dog", tokens=(5, 6), kind="encoder", layer=2)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"model": 2}, "model must be a number from 0 to 1"),
        ({"model": "0"}, "model must be a number from 0 to 1"),
        ({"layer": -1}, "layer must be a number from 0"),
        ({"tokens": "5"}, "tokens must be a list of ids"),
        ({"tokens": [5, None]}, "tokens must be a list of ids"),
        ({"kind": "self"}, "kind must be one of cross, encoder, decoder"),
        ({"text": "a" * 11}, "the text has 11 characters"),
        ({"extra": 1}, "the request must be a JSON object with kind, layer, model, text, tokens"),
    ],
)
def test_a_bad_request_for_attention_is_one_sentence(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as refused:
        read_attention_request(body({**GOOD, **changed}), models=2, max_characters=10)
    assert str(refused.value).startswith(message)
