"""`dist-transformer serve` as a user runs it, and the server alone in this process."""

import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path

from dist_transformer.serving.connections import Limits
from dist_transformer.serving.server import MOST_WAITING, answering, make_app, open_socket
from dist_transformer.serving.worker import Worker
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


@asynccontextmanager
async def server_here(limits: Limits) -> AsyncIterator[int]:
    """Serve in this process, without a model; give the port. A test replaces `server.translate`."""
    listening = open_socket("127.0.0.1", 0)
    port = listening.getsockname()[1]
    app = make_app([None], max_characters=100, only_local_names=True, worker=Worker(MOST_WAITING))  # type: ignore[list-item]
    async with answering(app, listening, limits):
        yield port
