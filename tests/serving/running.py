"""`dist-transformer serve` as a user runs it, and the server alone in this process."""

import asyncio
import http.client
import json
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dist_transformer.serving import server
from dist_transformer.serving.server import allowed_hosts, make_app, open_socket, serve
from tests.conftest import allow_interrupts


@dataclass(frozen=True, kw_only=True, slots=True)
class Ended:
    status: int
    stdout: str
    """After the line that says where the server is."""
    stderr: str


@dataclass(frozen=True, kw_only=True, slots=True)
class RunningServer:
    process: subprocess.Popen[str]
    url: str

    @property
    def port(self) -> int:
        return int(self.url.rstrip("/").rpartition(":")[2])

    def end(self, number: signal.Signals = signal.SIGTERM) -> Ended:
        self.process.send_signal(number)
        stdout, stderr = self.process.communicate(timeout=60)
        return Ended(status=self.process.returncode, stdout=stdout, stderr=stderr)


TOOL = (sys.executable, "-m", "dist_transformer", "serve")


@contextmanager
def running_server(models: list[Path], *options: object, program: Sequence[str] = TOOL) -> Iterator[RunningServer]:
    """Start a server on a free port, and wait until it is ready; of two models, the second is compared."""
    first, *second = models
    compare = ("--compare", *second) if second else ()
    process = subprocess.Popen(
        [*program, *map(str, ("--model", first, *compare, "--port", 0, *options))],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=allow_interrupts,  # noqa: PLW1509
    )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line.startswith("Open http://"), process.communicate()
        yield RunningServer(process=process, url=line.split()[1])
    finally:
        process.kill()
        process.communicate()


def send(
    server: RunningServer, method: str, path: str, body: bytes | None = None, headers: dict[str, str] | None = None
) -> tuple[int, dict[str, str], bytes]:
    """Send a request; give status, headers and content of the answer."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
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


@asynccontextmanager
async def server_here(model: Any = None) -> AsyncIterator[int]:
    """Serve in this process, without a translator; give the port. A test replaces `server.translate`."""
    listening = open_socket("127.0.0.1", 0)
    port = listening.getsockname()[1]
    app = make_app([model], max_characters=100, hosts=allowed_hosts(listening))
    serving = asyncio.create_task(serve(app, listening))
    try:
        yield port
    finally:
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)
        server.log.filters.clear()
