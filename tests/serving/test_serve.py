"""`dist-transformer serve` over HTTP, on a port of its own."""

import contextlib
import http.client
import json
import signal
import socket
import subprocess
import sys
import time
import urllib.parse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dist_transformer.serving.messages import most_bytes
from tests.conftest import run_python
from tests.serving.running import TOOL, RunningServer, running_server

pytestmark = pytest.mark.system

JSON = {"Content-Type": "application/json"}
FORM = {"Content-Type": "application/x-www-form-urlencoded"}


@pytest.fixture(scope="module")
def server(model_folder: Path) -> Iterator[RunningServer]:
    with running_server([model_folder, model_folder], "--max-characters", 500, "--nbest", 2) as running:
        yield running
        # No request of any test was a mistake of the server.
        ended = running.end()
        assert (ended.status, ended.stdout, ended.stderr) == (0, "", "")


def send(
    server: RunningServer, method: str, path: str, body: bytes | None = None, headers: dict[str, str] | None = None
) -> tuple[int, dict[str, str], bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    try:
        connection.request(method, path, body, headers or {})
        answer = connection.getresponse()
        return answer.status, dict(answer.getheaders()), answer.read()
    finally:
        connection.close()


def post(server: RunningServer, path: str, value: Any) -> tuple[int, dict[str, Any]]:
    status, _, content = send(server, "POST", path, json.dumps(value).encode(), JSON)
    return status, json.loads(content)


def test_a_sentence_and_its_attention(server: RunningServer, toy_lines: tuple[list[str], list[str]]) -> None:
    text = toy_lines[0][0]
    status, answer = post(server, "/api/translate", {"text": text})
    assert status == 200
    first, second = answer["results"]
    assert first == second
    assert len(first["hypotheses"]) == 2
    request = {"model": 1, "text": text, "tokens": first["hypotheses"][0]["tokens"], "kind": "decoder", "layer": 0}
    status, maps = post(server, "/api/attention", request)
    assert status == 200
    assert maps["rows"] == first["hypotheses"][0]["pieces"]
    assert [len(row) for head in maps["weights"] for row in head] == 2 * len(maps["rows"]) * [len(maps["columns"])]


@pytest.mark.parametrize(
    ("path", "kind"), [("/", "text/html"), ("/page.css", "text/css"), ("/page.js", "text/javascript")]
)
def test_the_page_comes_with_a_policy(server: RunningServer, path: str, kind: str) -> None:
    status, headers, content = send(server, "GET", path)
    assert (status, headers["Content-Type"]) == (200, f"{kind}; charset=utf-8")
    assert b"http" not in content
    policy = dict(rule.split(" ", 1) for rule in headers["Content-Security-Policy"].split("; "))
    assert (policy["default-src"], policy["script-src"], policy["frame-ancestors"]) == ("'none'", "'self'", "'none'")
    assert headers["X-Content-Type-Options"] == "nosniff"
    assert "Access-Control-Allow-Origin" not in headers


@pytest.mark.parametrize(
    ("value", "status", "sentence"),
    [
        ({"text": "<script>alert(1)</script>"}, 200, None),
        ({"text": "\u202ea\u200f"}, 200, None),
        ({"text": "w" * 501}, 400, "the text has 501 characters, and at most 500 are allowed: send a shorter one"),
        ({"text": "w" * most_bytes(500)}, 413, "the request is too long: send a shorter text"),
        ({"text": "\u202e\u200f"}, 400, "there is no text: type a sentence"),
    ],
)
def test_input_of_any_kind(server: RunningServer, value: Any, status: int, sentence: str | None) -> None:
    found, answer = post(server, "/api/translate", value)
    assert found == status
    if sentence is None:
        assert len(answer["results"]) == 2
    else:
        assert answer["error"].startswith(sentence)


@pytest.mark.parametrize("path", ["/api/translate", "/api/attention"])
def test_what_is_not_json(server: RunningServer, path: str) -> None:
    status, _, content = send(server, "POST", path, b"\xff\xff", JSON)
    assert (status, json.loads(content)) == (400, {"error": "the request is not JSON in UTF-8"})


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x"])
def test_a_form_of_another_site_is_refused(server: RunningServer, kind: str) -> None:
    status, _, content = send(server, "POST", "/api/translate", b'{"text": "a"}', {"Content-Type": kind})
    assert status == 415
    assert json.loads(content)["error"] == "the request must have the content type application/json"


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost", 200),
        ("LOCALHOST:8000", 200),
        ("[::1]:8000", 200),
        ("evil.example", 403),
        ("localhost.evil.example", 403),
        ("192.168.0.1", 403),
        ("", 403),
    ],
)
@pytest.mark.parametrize("path", ["/", "/api/models"])
def test_only_names_of_this_machine_are_answered(server: RunningServer, path: str, host: str, status: int) -> None:
    assert send(server, "GET", path, headers={"Host": host})[0] == status


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/../../etc/passwd", 404),
        ("GET", "/api/translate", 405),
        ("PUT", "/", 405),
    ],
)
def test_other_paths(server: RunningServer, method: str, path: str, status: int) -> None:
    found, headers, content = send(server, method, path)
    assert found == status
    assert json.loads(content).keys() == {"error"}
    assert "Content-Security-Policy" in headers


def test_programs_translate_lists(server: RunningServer, toy_lines: tuple[list[str], list[str]]) -> None:
    text = toy_lines[0][0]
    best = post(server, "/api/translate", {"text": text})[1]["results"][0]["hypotheses"][0]["text"]
    (languages,) = json.loads(send(server, "GET", "/languages")[2])
    assert languages == {"code": "en", "name": "en", "targets": ["de"]}
    request = {"q": ["", text, f"{text}\n\n{text}"], "source": "en", "target": "de", "format": "text"}
    assert post(server, "/translate", request) == (200, {"translatedText": ["", best, f"{best}\n\n{best}"]})
    assert post(server, "/translate", {**request, "q": []}) == (200, {"translatedText": []})
    form = urllib.parse.urlencode({**request, "q": text, "source": "auto"}).encode()
    status, _, content = send(server, "POST", "/translate", form, FORM)
    assert (status, json.loads(content)) == (200, {"translatedText": best})


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Origin": "http://evil.example"}, 403),
        ({"Origin": "null"}, 403),
        ({"Origin": "http://localhost:80", "Host": "localhost:80"}, 200),
        ({"Content-Type": "text/plain"}, 415),
    ],
)
def test_a_form_of_another_site_translates_nothing(server: RunningServer, headers: dict[str, str], status: int) -> None:
    assert send(server, "POST", "/translate", b"q=a&source=en&target=de", {**FORM, **headers})[0] == status


def test_many_half_open_connections_keep_no_one_out(model_folder: Path) -> None:
    """The server may open fewer files than there are connections."""
    few_files = ("sh", "-c", 'ulimit -n 160; exec "$@"', "sh", *TOOL)
    halves = (b"", b"GET / HT", b"POST /api/translate HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\n{")
    with running_server([model_folder], program=few_files) as server, contextlib.ExitStack() as opened:
        for i in range(300):
            connection = socket.create_connection(("127.0.0.1", server.port), timeout=30)
            opened.enter_context(connection).sendall(halves[i % 3])
        begun = time.monotonic()
        assert post(server, "/api/translate", {"text": "a dog"})[0] == 200
        # Less than any limit of time.
        assert time.monotonic() - begun < 15
        assert server.end().stderr == ""


def begin_translation(server: RunningServer, text: str) -> http.client.HTTPConnection:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    connection.request("POST", "/api/translate", json.dumps({"text": text}).encode(), JSON)
    return connection


LONG = "the dog " * 60
"""A search of many seconds with a beam of 1,000."""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_it_also_during_a_search(model_folder: Path, number: signal.Signals) -> None:
    with running_server([model_folder], "--beam", 1000) as server:
        connection = begin_translation(server, LONG)
        time.sleep(1)
        begun = time.monotonic()
        ended = server.end(number)
        # There was no answer.
        with pytest.raises(ConnectionError):
            connection.getresponse()
    assert (ended.status, ended.stdout, ended.stderr) == (0, "", "")
    assert time.monotonic() - begun < 10


def test_a_signal_ends_it_while_models_are_loaded(model_folder: Path, tmp_path: Path) -> None:
    """A user's file makes loading last."""
    (tmp_path / "slow.py").write_text(
        "import time\n"
        "from dist_transformer.serving import models\n"
        "\n"
        "def load(*arguments, **options):\n"
        "    print('loading', flush=True)\n"
        "    time.sleep(60)\n"
        "\n"
        "models.load_models = load\n"
    )
    program = [sys.executable, "-m", "dist_transformer", "serve", "--import", tmp_path / "slow.py"]
    with subprocess.Popen(
        [*program, "--model", model_folder, "--port", "0"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"loading\n"
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=30) == 0
        assert process.communicate() == (b"", b"")


def test_a_port_that_is_taken(model_folder: Path, server: RunningServer) -> None:
    done = run_python("-m", "dist_transformer", "serve", "--model", model_folder, "--port", server.port)
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    start = f"error: port {server.port} of 127.0.0.1 is not available (Address already in use): use another one"
    assert line.startswith(f"{start}, such as --port ")
    free = int(line.rpartition(" ")[2])
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", free))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--port", "70000"), "error: --port is 70000"),
        (("--host", "no.such.host.invalid"), "error: --host no.such.host.invalid is not an address"),
        (("--host", "203.0.113.7"), "error: port 8000 of 203.0.113.7 is not available (Cannot assign"),
        (("--beam", "2", "--nbest", "3"), "error: --nbest is 3"),
        (("--max-characters", "0"), "error: --max-characters is 0"),
        (("--port", "0", "--model", "nowhere"), "error: nowhere is not a model folder"),
    ],
)
def test_bad_options_are_one_sentence(model_folder: Path, options: tuple[str, ...], message: str) -> None:
    model = () if "--model" in options else ("--model", model_folder)
    done = run_python("-m", "dist_transformer", "serve", *model, *options)
    assert (done.returncode, done.stdout) == (1, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith(message)


def test_beyond_loopback_it_warns_and_answers_to_any_name(model_folder: Path) -> None:
    with running_server([model_folder], "--host", "0.0.0.0") as server:
        assert send(server, "GET", "/api/models", headers={"Host": "trainer.example"})[0] == 200
        ended = server.end()
    (line,) = ended.stderr.splitlines()
    assert line.startswith("warning: --host 0.0.0.0 opens port ")
    assert line.endswith("without a password: anyone who can reach it can use the models")
