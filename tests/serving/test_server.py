"""The server's answers, in this process: what depends on when a search ends, and mistakes."""

import asyncio
import json
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from dist_transformer.serving import server
from dist_transformer.serving.server import MOST_WAITING
from tests.serving.running import MODEL, a_post, exchange, read_answer, with_server


class PanicError(BaseException):
    """Panic as Rust raises it: no Exception."""


class Gate:
    """Takes the place of a search: ends when it may. Counts the requests that wait or are searched for."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.may_end, self.texts, self.held = threading.Event(), list[str](), 0
        run = server._Queue.run

        async def counted(*arguments: Any) -> Any:
            self.held += 1
            try:
                return await run(*arguments)
            finally:
                self.held -= 1

        monkeypatch.setattr(server._Queue, "run", counted)
        monkeypatch.setattr(MODEL, "translate", self.translate)

    async def until_held(self, count: int) -> None:
        while self.held != count:
            await asyncio.sleep(0.01)

    def translate(self, text: str, prefix: str) -> dict[str, Any]:
        self.texts.append(text)
        assert self.may_end.wait(600)
        if text == "bad":
            raise ZeroDivisionError("a mistake")
        if text == "panic":
            raise PanicError("index out of bounds")
        return {"text": text}


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    gate = Gate(monkeypatch)
    yield gate
    gate.may_end.set()


async def post(port: int, text: str) -> tuple[int, Any]:
    """Ask for a translation; give the status and the JSON of the answer."""
    body = json.dumps({"text": text}).encode()
    return read_answer(await exchange(port, a_post("/api/translate", "application/json", body)))


def test_a_full_queue_is_refused_and_searches_run_in_order(gate: Gate) -> None:
    async def use(port: int) -> None:
        asked = []
        for i in range(MOST_WAITING + 1):
            asked.append(asyncio.create_task(post(port, str(i))))
            await gate.until_held(i + 1)
        refused = {"error": "8 requests are already waiting: try again in a moment"}
        assert await post(port, "more") == (503, refused)
        gate.may_end.set()
        expected = [(200, {"results": [{"text": str(i)}]}) for i in range(MOST_WAITING + 1)]
        assert await asyncio.gather(*asked) == expected
        assert gate.texts == [str(i) for i in range(MOST_WAITING + 1)]

    with_server(use)


def test_of_clients_that_leave_only_the_search_that_runs_keeps_its_place(gate: Gate) -> None:
    async def use(port: int) -> None:
        first = asyncio.create_task(post(port, "first"))
        while not gate.texts:
            await asyncio.sleep(0.01)
        others = [asyncio.create_task(post(port, "other")) for _ in range(MOST_WAITING)]
        await gate.until_held(1 + MOST_WAITING)
        for each in (first, *others):
            each.cancel()
        await gate.until_held(1)
        last = [asyncio.create_task(post(port, "last")) for _ in range(MOST_WAITING)]
        await gate.until_held(1 + MOST_WAITING)
        # There is no ninth place: a search cannot be stopped.
        assert (await post(port, "more"))[0] == 503
        gate.may_end.set()
        assert await asyncio.gather(*last) == MOST_WAITING * [(200, {"results": [{"text": "last"}]})]
        assert gate.texts == ["first", *MOST_WAITING * ["last"]]

    with_server(use)


@pytest.mark.parametrize(
    ("text", "name"), [("bad", "ZeroDivisionError: a mistake"), ("panic", "PanicError: index out")]
)
def test_a_mistake_of_the_server_is_one_sentence_and_printed_once(
    gate: Gate, text: str, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    gate.may_end.set()

    async def use(port: int) -> None:
        for _ in range(3):
            sentence = "the server failed: see the error in its terminal"
            assert await post(port, text) == (500, {"error": sentence})
        assert (await post(port, "good"))[0] == 200

    with_server(use)
    assert [record.getMessage() for record in caplog.records] == ["error: a request failed"]
    assert caplog.text.count(name) == 1
