"""The server's answers, in this process: what depends on when a search ends."""

import asyncio
import threading
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from aiohttp import ClientResponse
from aiohttp.test_utils import TestClient, TestServer

from dist_transformer.serving import server
from dist_transformer.serving.server import MOST_WAITING, make_app
from dist_transformer.serving.worker import Worker

Use = Callable[[TestClient[Any, Any]], Awaitable[None]]


class Gate:
    """Takes the place of a search: begins, and ends when it may."""

    def __init__(self) -> None:
        self.begun, self.may_end = threading.Event(), threading.Event()
        self.texts: list[str] = []

    def translate(self, _: object, text: str, prefix: str = "") -> dict[str, Any]:
        self.texts.append(text)
        self.begun.set()
        assert self.may_end.wait(60)
        if text == "bad":
            raise ZeroDivisionError("a mistake")
        return {"text": text}


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Gate:
    gate = Gate()
    monkeypatch.setattr(server, "translate", gate.translate)
    return gate


def with_client(use: Use) -> None:
    async def main() -> None:
        app = make_app([None], max_characters=100, only_local_names=True, worker=Worker(MOST_WAITING))  # type: ignore[list-item]
        async with TestClient(TestServer(app)) as client:
            await use(client)

    asyncio.run(main())


async def post(client: TestClient[Any, Any], text: str) -> ClientResponse:
    return await client.post("/api/translate", json={"text": text})


def test_a_full_queue_is_refused_while_the_page_is_served(gate: Gate) -> None:
    async def use(client: TestClient[Any, Any]) -> None:
        asked = [asyncio.create_task(post(client, str(i))) for i in range(MOST_WAITING + 1)]
        await asyncio.to_thread(gate.begun.wait, 30)
        await asyncio.sleep(0.5)
        refused = await asyncio.wait_for(post(client, "more"), 2)
        assert refused.status == 503
        assert await refused.json() == {"error": "8 requests are already waiting: try again in a moment"}
        assert refused.headers["Retry-After"] == "5"
        # The event loop is free.
        assert (await asyncio.wait_for(client.get("/"), 2)).status == 200
        gate.may_end.set()
        answers = [await (await each).json() for each in asked]
        assert answers == [{"results": [{"text": str(i)}]} for i in range(MOST_WAITING + 1)]
        assert "more" not in gate.texts

    with_client(use)


def test_a_waiting_request_of_a_client_that_left_is_dropped(gate: Gate) -> None:
    async def use(client: TestClient[Any, Any]) -> None:
        first = asyncio.create_task(post(client, "first"))
        await asyncio.to_thread(gate.begun.wait, 30)
        second = asyncio.create_task(post(client, "second"))
        await asyncio.sleep(0.2)
        second.cancel()
        await asyncio.sleep(0.2)
        third = asyncio.create_task(post(client, "third"))
        await asyncio.sleep(0.2)
        gate.may_end.set()
        assert [(await each).status for each in (first, third)] == [200, 200]
        assert gate.texts == ["first", "third"]

    with_client(use)


def test_a_mistake_of_the_server_is_one_sentence(gate: Gate, capsys: pytest.CaptureFixture[str]) -> None:
    async def use(client: TestClient[Any, Any]) -> None:
        gate.may_end.set()
        answer = await post(client, "bad")
        assert answer.status == 500
        assert await answer.json() == {"error": "the server failed: see the error in its terminal"}
        assert (await post(client, "good")).status == 200

    with_client(use)
    assert "ZeroDivisionError: a mistake" in capsys.readouterr().err
