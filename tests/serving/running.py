"""`dist-transformer serve` as a user runs it, and the server alone in this process."""

import asyncio
import http.client
import json
import resource
import signal
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any, TypeVar

from dist_transformer.serving import server
from dist_transformer.serving.server import allowed_hosts, make_app, open_socket, serve
from tests.commands import Begun
from tests.conftest import begin_python

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class Ended:
    status: int
    stdout: str
    """After the line that says where the server is."""
    stderr: str


@dataclass(frozen=True, kw_only=True, slots=True)
class RunningServer:
    process: Begun
    url: str

    @property
    def port(self) -> int:
        return int(self.url.rstrip("/").rpartition(":")[2])

    def end(self, number: signal.Signals = signal.SIGTERM) -> Ended:
        self.process.send_signal(number)
        stdout, stderr = self.process.communicate(timeout=600)
        _, _, rest = stdout.partition("\n")
        return Ended(status=self.process.wait(), stdout=rest, stderr=stderr)


@contextmanager
def running_server(models: list[Path], *options: object, most_files: int | None = None) -> Iterator[RunningServer]:
    """Start a server on a free port, and wait until it is ready; of two models, the second is compared.

    Args:
        most_files: that it may open.
    """
    first, *second = models
    compare = ("--compare", *second) if second else ()
    words = ("--model", first, *compare, "--port", 0, *options)
    with TemporaryDirectory() as folder:
        files = {"output": Path(folder, "output"), "errors": Path(folder, "errors")}
        process = begin_python("-m", "dist_transformer", "serve", *words, **files)
        if most_files is not None:
            resource.prlimit(process.pid, resource.RLIMIT_NOFILE, (most_files, most_files))
        try:
            line = process.first_line()
            assert line.startswith("Open http://"), process.communicate()
            yield RunningServer(process=process, url=line.split()[1])
        finally:
            process.kill()
            process.wait()


def send(
    server: RunningServer, method: str, path: str, body: bytes | None = None, headers: dict[str, str] | None = None
) -> tuple[int, dict[str, str], bytes]:
    """Send a request; give status, headers and content of the answer."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=600)
    try:
        connection.request(method, path, body, headers or {})
        answer = connection.getresponse()
        # The names of headers are lower case.
        return answer.status, {name.lower(): value for name, value in answer.getheaders()}, answer.read()
    finally:
        connection.close()


def post(server: RunningServer, path: str, value: Any) -> tuple[int, Any]:
    """Send JSON; give status and JSON of the answer."""
    status, _, content = send(server, "POST", path, json.dumps(value).encode(), {"Content-Type": "application/json"})
    return status, json.loads(content)


MODEL = SimpleNamespace(
    info=SimpleNamespace(source_language="en", target_language="de"),
    describe=lambda: {"name": "a model"},
    translate=None,
    translate_texts=None,
)
"""Stands for a model, whose methods a test replaces."""


def with_server(use: Callable[[int], Awaitable[T]]) -> T:
    """Serve in this process while a test uses the port."""

    async def main() -> T:
        listening = open_socket("127.0.0.1", 0)
        port = listening.getsockname()[1]
        app = make_app([MODEL], max_characters=100, hosts=allowed_hosts(listening))  # type: ignore[list-item]
        serving = asyncio.create_task(serve(app, listening))
        try:
            return await asyncio.wait_for(use(port), 300)
        finally:
            serving.cancel()
            await asyncio.gather(serving, return_exceptions=True)
            server.log.filters.clear()

    return asyncio.run(main())


async def exchange(port: int, sent: bytes) -> bytes:
    """Send bytes over a new connection; give all that comes until the server closes it."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(sent)
    try:
        return await reader.read()
    finally:
        writer.close()


def a_post(path: str, kind: str, body: bytes, *headers: str) -> bytes:
    """Write a request whose connection ends after it."""
    lines = (f"POST {path} HTTP/1.1", "Host: localhost", "Connection: close", f"Content-Type: {kind}", *headers)
    return "\r\n".join((*lines, f"Content-Length: {len(body)}", "", "")).encode("latin-1") + body


def read_answer(answer: bytes) -> tuple[int, Any]:
    """Return status and JSON."""
    head, _, content = answer.partition(b"\r\n\r\n")
    return int(head.split()[1]), json.loads(content)
