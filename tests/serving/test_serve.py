"""`dist-transformer serve` over HTTP, on a port of its own."""

import html
import http.client
import json
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from libretranslatepy import LibreTranslateAPI

from tests.conftest import begin_python, run_python
from tests.serving.running import RunningServer, post, running_server, send

pytestmark = pytest.mark.system

JSON = {"Content-Type": "application/json"}
ATTENTION = {"model": 0, "text": "a", "tokens": [], "kind": "cross", "layer": 0}


@pytest.fixture(scope="module")
def server(model_folder: Path) -> Iterator[RunningServer]:
    with running_server([model_folder, model_folder], "--max-characters", 500, "--nbest", 2) as running:
        yield running
        # No request of any test was a mistake of the server.
        ended = running.end()
        assert (ended.status, ended.stdout, ended.stderr) == (0, "", "")


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
    assert (status, headers["content-type"]) == (200, f"{kind}; charset=utf-8")
    assert b"http" not in content
    policy = dict(rule.split(" ", 1) for rule in headers["content-security-policy"].split("; "))
    assert (policy["default-src"], policy["script-src"], policy["frame-ancestors"]) == ("'none'", "'self'", "'none'")
    assert headers["x-content-type-options"] == "nosniff"
    assert "access-control-allow-origin" not in headers


@pytest.mark.parametrize(
    ("path", "value", "sentence"),
    [
        ("/api/translate", {"text": "\u202e\u200f"}, "there is no text: type a sentence"),
        ("/api/translate", ["a"], "the request: Input should be an object"),
        ("/api/attention", {**ATTENTION, "model": 2}, "model must be a number from 0 to 1"),
        ("/api/attention", {**ATTENTION, "layer": 1}, "layer is 1: it must be 0 to 0"),
        ("/api/attention", {**ATTENTION, "tokens": [400]}, "tokens holds an id that is not in the vocabulary of 400"),
    ],
)
def test_a_bad_request_is_one_sentence(server: RunningServer, path: str, value: Any, sentence: str) -> None:
    status, answer = post(server, path, value)
    assert status == 400
    assert answer["error"].startswith(sentence)
    status, _, content = send(server, "POST", path, b"\xff\xff", JSON)
    assert (status, json.loads(content)) == (400, {"error": "the request is not JSON in UTF-8"})


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost", 200),
        ("LOCALHOST:8000", 200),
        ("[::1]:8000", 200),
        ("evil.example", 400),
        ("localhost.evil.example", 400),
        ("192.168.0.1", 400),
        ("", 400),
    ],
)
def test_only_names_of_this_machine_are_answered(server: RunningServer, host: str, status: int) -> None:
    assert send(server, "GET", "/api/models", headers={"Host": host})[0] == status


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
    assert "content-security-policy" in headers


def test_the_client_of_libretranslate(server: RunningServer, toy_lines: tuple[list[str], list[str]]) -> None:
    text = toy_lines[0][0]
    best = post(server, "/api/translate", {"text": text})[1]["results"][0]["hypotheses"][0]["text"]
    client = LibreTranslateAPI(server.url)
    assert client.languages() == [{"code": "en", "name": "English", "targets": ["de"]}]
    assert client.detect("ein Hund") == [{"language": "en", "confidence": 100}]
    assert client.translate(text, "auto", "de") == client.translate(text, "eng", "de-DE") == best
    # It has no lists.
    request = {"q": ["", text, f"{text}\n\n{text}"], "source": "en", "target": "de", "format": "text"}
    assert post(server, "/translate", request) == (200, {"translatedText": ["", best, f"{best}\n\n{best}"]})
    tagged = {**request, "q": f"<p class=x>{text}</p>\n<script>{text}</script>", "format": "html"}
    answer = f"<p class=x>{html.escape(best, quote=False)}</p>\n<script>{text}</script>"
    assert post(server, "/translate", tagged) == (200, {"translatedText": answer})
    assert post(server, "/translate", {**request, "q": []}) == (200, {"translatedText": []})


def begin_translation(server: RunningServer, text: str) -> http.client.HTTPConnection:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=600)
    connection.request("POST", "/api/translate", json.dumps({"text": text}).encode(), JSON)
    return connection


LONG = "the dog " * 60
"""A search of many seconds with a beam of 1,000."""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_it_also_during_a_search(model_folder: Path, number: signal.Signals) -> None:
    with running_server([model_folder], "--beam", 1000, "--max-extra-tokens", 1) as server:
        connection = begin_translation(server, LONG)
        time.sleep(1)
        begun = time.monotonic()
        ended = server.end(number)
        # There was no answer.
        with pytest.raises(ConnectionError):
            connection.getresponse()
    assert (ended.status, ended.stdout, ended.stderr) == (0, "", "")
    assert time.monotonic() - begun < 300


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
    words = ("serve", "--import", tmp_path / "slow.py", "--model", model_folder, "--port", "0")
    files = {"output": tmp_path / "output", "errors": tmp_path / "errors"}
    process = begin_python("-m", "dist_transformer", *words, **files)
    assert process.first_line() == "loading\n"
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=600) == 0
    assert process.communicate() == ("loading\n", "")


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
