"""Bodies of all kinds, over connections to a server in this process."""

import gzip
import json
import tracemalloc
import urllib.parse
import zlib
from typing import Any

import pytest

from dist_transformer.serving import server
from tests.serving.running import a_post, exchange, read_answer, with_server

BODY = b'{"text": "a dog"}'
GZIP = gzip.compress(BODY, mtime=0)
BOMB = gzip.compress(bytes(5_000_000), mtime=0)[:5000]
JSON = "application/json"
FORM = "application/x-www-form-urlencoded"
PARTS = "multipart/form-data; boundary=X"
FIELDS = {"q": "für\r\ndich 💥", "source": "en", "target": "de", "api_key": ""}


def parts(fields: dict[str, str]) -> bytes:
    head = '--X\r\nContent-Disposition: form-data; name="{}"\r\n\r\n{}\r\n'
    return ("".join(head.format(name, value) for name, value in fields.items()) + "--X--\r\n").encode()


@pytest.fixture(autouse=True)
def echo(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Any:
    monkeypatch.setattr(server, "translate", lambda _, text, prefix: text)
    monkeypatch.setattr(server, "translate_texts", lambda _, texts: ["|".join(lines) for lines in texts])
    yield
    assert [record.getMessage() for record in caplog.get_records("call")] == []


def send(path: str, kind: str, body: bytes, *headers: str) -> tuple[int, Any]:
    """Send a POST; give the status and the JSON of the answer."""
    return read_answer(with_server(lambda port: exchange(port, a_post(path, kind, body, *headers))))


@pytest.mark.parametrize(
    ("encoding", "body", "status", "answer"),
    [
        ("GZip", GZIP, 200, ["a dog"]),
        ("deflate", zlib.compress(BODY), 200, ["a dog"]),
        ("gzip", BODY, 400, "the body of the request is not one complete gzip stream: send the text as it is"),
        ("gzip", GZIP[:-9], 400, "the body of the request is not one complete gzip stream: send the text as it is"),
        ("gzip", GZIP + b"a", 400, "the body of the request is not one complete gzip stream: send the text as it is"),
        ("gzip", BOMB, 413, "the request is too long: send a shorter text"),
        ("identity", bytes(1_000_000), 413, "the request is too long: send a shorter text"),
        ("\xe9", BODY, 415, "the content encoding of the request is neither gzip nor deflate: send the text as it is"),
    ],
)
def test_compressed_and_long_bodies(encoding: str, body: bytes, status: int, answer: Any) -> None:
    expected = {"results" if status == 200 else "error": answer}
    assert send("/api/translate", JSON, body, f"Content-Encoding: {encoding}") == (status, expected)


@pytest.mark.parametrize(("encoding", "body"), [("gzip", BOMB), ("identity", bytes(20_000_000))])
def test_a_long_body_takes_no_memory(encoding: str, body: bytes) -> None:
    request = a_post("/api/translate", JSON, body, f"Content-Encoding: {encoding}")
    tracemalloc.start()
    try:
        # The client's own bytes are in memory before.
        assert b" 413 " in with_server(lambda port: exchange(port, memoryview(request)))
        assert tracemalloc.get_traced_memory()[1] < 4_000_000 + len(body)
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        (JSON, json.dumps(FIELDS).encode()),
        (FORM, urllib.parse.urlencode(FIELDS).encode()),
        # As `curl -d` sends it.
        (FORM, "&".join(f"{name}={value}" for name, value in FIELDS.items()).encode()),
        (PARTS, parts(FIELDS)),
    ],
)
def test_a_form_is_read_as_json_is(kind: str, body: bytes) -> None:
    assert send("/translate", kind, body) == (200, {"translatedText": "für|dich 💥"})


@pytest.mark.parametrize(
    ("kind", "body", "sentence"),
    [
        (FORM, b"q=%ff&source=en&target=de", "the request is not a form in UTF-8 with q, source, target"),
        (FORM, b"&".join(b"a%d=" % i for i in range(50)), "the request is not a form in UTF-8 with q, source, target"),
        (FORM, b"q=a&q=b&source=en&target=de", "the form has a field twice: send lists as JSON"),
        (
            PARTS,
            parts({"q": "a"}).replace(b"a\r", b"\xff\r"),
            "the request is not a form in UTF-8 with q, source, target",
        ),
        (PARTS, b"--X", "q: Field required"),
        ("multipart/form-data", parts(FIELDS), "q: Field required"),
    ],
)
def test_a_bad_form_is_one_sentence(kind: str, body: bytes, sentence: str) -> None:
    assert send("/translate", kind, body) == (400, {"error": sentence})


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
    assert send("/api/translate", kind, b'{"text": "a"}')[0] == 415
