"""Requests: what is read of them, alone and over connections to a server in this process."""

import gzip
import json
import tracemalloc
import urllib.parse
import zlib
from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import ValidationError

from dist_transformer.base.errors import UserError
from dist_transformer.serving.models import choose_model, describe_languages, possible_sources
from dist_transformer.serving.requests import MOST_LINES, AttentionRequest, BatchRequest, TextRequest
from tests.serving.running import MODEL, a_post, exchange, read_answer, with_server

JSON, FORM = "application/json", "application/x-www-form-urlencoded"
PARTS = "multipart/form-data; boundary=X"
BODY = b'{"text": "a dog"}'
GZIP = gzip.compress(BODY, mtime=0)
BOMB = gzip.compress(bytes(5_000_000), mtime=0)[:5000]
NOT_WHOLE = "the body of the request is not one complete gzip stream: send the text as it is"
TOO_LONG = "the request is too long: send a shorter text"
NO_FORM = "the request is not a form in UTF-8 with q, source, target"
FIELDS = {"q": "für\r\ndich 💥", "source": "en", "target": "de", "api_key": ""}
ATTENTION = {"model": 1, "text": "a dog", "tokens": [5, 6], "kind": "encoder", "layer": 2}


def parts(fields: dict[str, str]) -> bytes:
    head = '--X\r\nContent-Disposition: form-data; name="{}"\r\n\r\n{}\r\n'
    return ("".join(head.format(name, value) for name, value in fields.items()) + "--X--\r\n").encode()


@pytest.fixture
def echo(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Any:
    monkeypatch.setattr(MODEL, "translate", lambda text, prefix: text)
    monkeypatch.setattr(MODEL, "translate_texts", lambda texts, has_tags: ["|".join(lines) for lines in texts])
    yield
    assert [record.getMessage() for record in caplog.get_records("call")] == []


def send(path: str, kind: str, body: bytes, *headers: str) -> tuple[int, Any]:
    """Send a POST; give the status and the JSON of the answer."""
    return read_answer(with_server(lambda port: exchange(port, a_post(path, kind, body, *headers))))


def test_a_text_is_one_line() -> None:
    read = TextRequest.model_validate_json(
        json.dumps({"text": "one\ntwo\r\nthree\tfour\u2028five\n", "prefix": "b\tc"})
    )
    assert (read.text, read.prefix) == ("one two three four five", "b c")


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"text": " \n\t\u3000"}, "there is no text"),
        ({"text": "a", "prefix": "a\0b"}, r"the text holds U\+0000"),
        ({"text": "a\x1b[1m"}, r"the text holds U\+001B"),
        ({"text": 5}, "text\n  Input should be a valid string"),
        ({"text": "a", "more": 1}, "more\n  Extra inputs are not permitted"),
        *(
            ({**ATTENTION, **changed}, "validation error")
            for changed in ({"model": "0"}, {"layer": -1}, {"tokens": [5, None]}, {"kind": "self"}, {"more": 1})
        ),
    ],
)
def test_a_bad_request_of_the_page(value: Any, message: str) -> None:
    kind = AttentionRequest if "model" in value else TextRequest
    with pytest.raises((UserError, ValidationError), match=message):
        kind.model_validate_json(json.dumps(value))


def test_texts_of_programs_are_read_as_lines() -> None:
    several = BatchRequest(**{**FIELDS, "q": ["a\tb\r\n\nc\n", "", "d"], "format": "text"})
    assert several.lines(10) == [["a b", "", "c", ""], [""], ["d"]]
    tagged = BatchRequest(**{**FIELDS, "q": ["<p>a\tb\r\n</p>c\n", ""], "format": "html"})
    assert tagged.lines(100) == [["<p>a\tb\r\n</p>c\n"], [""]]


@pytest.mark.parametrize(
    ("q", "message"),
    [
        (["a" * 600, "b" * 401], "q has 1,001 characters and 1,000 are allowed: send several requests"),
        ("a\n" * (MOST_LINES + 1), "q has 129 lines and 128 are allowed: send several requests"),
        ("<p>a" * (MOST_LINES + 1), "q has 129 lines and 128 are allowed: send several requests"),
        (["a", "b\0"], r"the text holds U\+0000"),
    ],
)
def test_texts_that_are_too_long_are_one_sentence(q: str | list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        BatchRequest(**{**FIELDS, "q": q, "format": "html" if "<p>" in q else None}).lines(1000)


def served(*names: str) -> list[Any]:
    pairs = [name.split("-") for name in names]
    infos = [SimpleNamespace(source_language=source, target_language=target) for source, target in pairs]
    return [SimpleNamespace(name=name, info=info) for name, info in zip(names, infos, strict=True)]


@pytest.mark.parametrize(
    ("source", "target", "name"),
    [
        ("en", "de", "en-de"),
        ("auto", "de", "en-de"),
        ("eng", "de-DE", "en-de"),
        ("en", "zh-Hant", "en-zho_Hant"),
        ("en", "zh", "en-zho_Hans"),
    ],
)
def test_the_first_model_of_a_direction_answers(source: str, target: str, name: str) -> None:
    models = served("en-de", "de-en", "en-zho_Hans", "en-zho_Hant", "en-de")
    chosen = choose_model(models, BatchRequest(q="", source=source, target=target))
    assert chosen is next(model for model in models if model.name == name)


@pytest.mark.parametrize(
    ("names", "source", "message"),
    [
        (("en-de",), "fr", "no model translates from this source to this target: there is en to de"),
        (("en-de", "fr-de"), "auto", "the source auto could be several languages: set one, because there"),
    ],
)
def test_another_direction_is_one_sentence(names: tuple[str, ...], source: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        choose_model(served(*names), BatchRequest(q="", source=source, target="de"))


def test_languages_have_names_and_all_their_targets() -> None:
    models = served("en-de", "en-fr", "zho_Hans-en", "our own-de")
    assert describe_languages(models) == [
        {"code": "en", "name": "English", "targets": ["de", "fr"]},
        {"code": "zho_Hans", "name": "Chinese", "targets": ["en"]},
        {"code": "our own", "name": "our own", "targets": ["de"]},
    ]
    assert [each["language"] for each in possible_sources(models)] == ["en", "zho_Hans", "our own"]


@pytest.mark.usefixtures("echo")
@pytest.mark.parametrize(
    ("encoding", "body", "status", "answer"),
    [
        ("GZip", GZIP, 200, ["a dog"]),
        ("deflate", zlib.compress(BODY), 200, ["a dog"]),
        ("gzip", BODY, 400, NOT_WHOLE),
        ("gzip", GZIP[:-9], 400, NOT_WHOLE),
        ("gzip", GZIP + b"a", 400, NOT_WHOLE),
        ("gzip", BOMB, 413, TOO_LONG),
        ("identity", bytes(1_000_000), 413, TOO_LONG),
        ("\xe9", BODY, 415, "the content encoding of the request is neither gzip nor deflate: send the text as it is"),
        # The longest text, of which JSON escapes each character to two times six bytes; and a longer one.
        ("", json.dumps({"text": "💥" * 100, "prefix": "💥" * 100}).encode(), 200, ["💥" * 100]),
        ("", json.dumps({"text": "a" * 101}).encode(), 400, "the text has 101 characters, and at most 100 are allowed"),
    ],
)
def test_compressed_and_long_bodies(encoding: str, body: bytes, status: int, answer: Any) -> None:
    found, content = send("/api/translate", JSON, body, f"Content-Encoding: {encoding}")
    assert found == status
    assert content["results"] == answer if status == 200 else content["error"].startswith(answer)


@pytest.mark.usefixtures("echo")
@pytest.mark.parametrize(
    ("encoding", "body", "limit"),
    # The client's connection keeps a copy of what it has not sent yet.
    [("gzip", BOMB, 4_000_000), ("identity", bytes(20_000_000), 30_000_000)],
)
def test_a_long_body_takes_no_memory(encoding: str, body: bytes, limit: int) -> None:
    request = a_post("/api/translate", JSON, body, f"Content-Encoding: {encoding}")
    tracemalloc.start()
    try:
        # The request itself is in memory before.
        assert b" 413 " in with_server(lambda port: exchange(port, memoryview(request)))
        assert tracemalloc.get_traced_memory()[1] < limit
    finally:
        tracemalloc.stop()


@pytest.mark.usefixtures("echo")
@pytest.mark.parametrize(
    ("kind", "body", "answer"),
    [
        (JSON, json.dumps(FIELDS).encode(), None),
        (FORM, urllib.parse.urlencode(FIELDS).encode(), None),
        # As `curl -d` sends it.
        (FORM, "&".join(f"{name}={value}" for name, value in FIELDS.items()).encode(), None),
        (PARTS, parts(FIELDS), None),
        (FORM, b"q=%ff&source=en&target=de", NO_FORM),
        (FORM, b"&".join(b"a%d=" % i for i in range(50)), NO_FORM),
        (FORM, b"q=a&q=b&source=en&target=de", "the form has a field twice: send lists as JSON"),
        (PARTS, parts({"q": "a"}).replace(b"a\r", b"\xff\r"), NO_FORM),
        (PARTS, b"--X", "q: Field required"),
    ],
)
def test_a_form_is_read_as_json_is(kind: str, body: bytes, answer: str | None) -> None:
    whole = (200, {"translatedText": "für|dich 💥"})
    assert send("/translate", kind, body) == (whole if answer is None else (400, {"error": answer}))


@pytest.mark.usefixtures("echo")
@pytest.mark.parametrize(
    ("origin", "kind", "status"),
    [
        ("http://evil.example", FORM, 403),
        ("null", PARTS, 403),
        ("http://localhost", FORM, 200),
        ("http://evil.example", "text/plain", 415),
    ],
)
def test_a_form_of_another_site_translates_nothing(origin: str, kind: str, status: int) -> None:
    body = parts(FIELDS) if kind == PARTS else urllib.parse.urlencode(FIELDS).encode()
    assert send("/translate", kind, body, f"Origin: {origin}")[0] == status
    # The page sends JSON only.
    assert send("/api/translate", kind, BODY)[0] == 415
