"""An S3 server on this machine behind a proxy that throttles, delays, cuts transfers and changes objects.

The server is moto's, in an environment of its own. Requests reach it over real sockets, through the proxy.
"""

import http.client
import socket
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Literal

Fault = Literal["throttle", "cut", "change", "silence", "none"]

_BUCKET = "corpora"
# The server does not check signatures.
_SIGNED = "AWS4-HMAC-SHA256 Credential=nobody/20260101/us-east-1/s3/aws4_request, SignedHeaders=host, Signature=00"
_THROTTLED = (
    b'<?xml version="1.0" encoding="UTF-8"?>\n<Error><Code>SlowDown</Code>'
    b"<Message>Please reduce your request rate.</Message></Error>"
)


class ObjectStore:
    """A bucket with one data folder, and what happens to requests for it."""

    def __init__(self, server_port: int) -> None:
        self.server_port = server_port
        self.fault: Fault = "none"
        self.times: float = 0
        """Requests for each shard that suffer; infinity for all."""
        self.delay_seconds = 0.0
        """Before every answer."""
        self.requests: Counter[tuple[str, str]] = Counter()
        """Number of requests by method and object."""
        self._suffered: Counter[str] = Counter()
        self._uploaded: dict[str, bytes] = {}
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._proxy = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self._proxy.daemon_threads = True

    @property
    def environment(self) -> dict[str, str]:
        """The variables that a user sets to reach the store."""
        return {
            "AWS_ENDPOINT_URL_S3": f"http://127.0.0.1:{self._proxy.server_port}",
            "AWS_ACCESS_KEY_ID": "nobody",
            "AWS_SECRET_ACCESS_KEY": "nothing",
            "AWS_DEFAULT_REGION": "us-east-1",
        }

    def upload(self, folder: Path, name: str) -> str:
        """Copy a data folder into the bucket; give its URL."""
        for file in folder.rglob("*"):
            if file.is_file():
                path = f"/{_BUCKET}/{name}/{file.relative_to(folder)}"
                self._uploaded[path] = file.read_bytes()
                self.put(path, self._uploaded[path])
        return f"s3://{_BUCKET}/{name}"

    def put(self, path: str, content: bytes) -> None:
        headers = {"Content-Type": "application/octet-stream", "Authorization": _SIGNED}
        status, _, said = self.ask_server("PUT", path, headers, content)
        assert status == 200, said

    def suffer(self, fault: Fault, *, times: float = float("inf"), delay_seconds: float = 0.0) -> None:
        """Apply a fault to the next `times` requests for each training shard, and answer all requests late."""
        self.fault, self.times, self.delay_seconds = fault, times, delay_seconds
        self._suffered.clear()
        self.requests.clear()

    def next_fault(self, method: str, path: str) -> Fault:
        with self._lock:
            self.requests[method, path.rsplit("/", 1)[-1]] += 1
            # Sizes are asked for by HEAD: cuts and changes come between that and the reading.
            concerned = "/train-" in path and (method == "GET" or self.fault not in ("cut", "change"))
            if not concerned or self._suffered[path] >= self.times:
                return "none"
            self._suffered[path] += 1
            return self.fault

    def wait_in_silence(self) -> None:
        self._ended.wait()

    @contextmanager
    def changed(self, path: str) -> Iterator[None]:
        """Put another object of the same size in the place of one, as a second upload would, and the first back."""
        content = self._uploaded[path]
        middle = len(content) // 2
        self.put(path, content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :])
        try:
            yield
        finally:
            self.put(path, content)

    def ask_server(
        self, method: str, path: str, headers: dict[str, str], content: bytes = b""
    ) -> tuple[int, dict[str, str], bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self.server_port, timeout=600)
        try:
            connection.request(method, path, content or None, headers)
            response = connection.getresponse()
            return response.status, dict(response.getheaders()), response.read()
        finally:
            connection.close()

    def start(self) -> None:
        deadline = time.monotonic() + 600
        while True:
            try:
                self.put(f"/{_BUCKET}", b"")
                break
            except ConnectionError:
                assert time.monotonic() < deadline, "moto's server does not answer"
                time.sleep(0.1)
        threading.Thread(target=self._proxy.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._ended.set()
        self._proxy.shutdown()
        self._proxy.server_close()


def _handler(store: ObjectStore) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self._answer()

        def do_HEAD(self) -> None:
            self._answer()

        def _answer(self) -> None:
            fault = store.next_fault(self.command, self.path)
            if fault == "silence":
                store.wait_in_silence()
                self.close_connection = True
                return
            time.sleep(store.delay_seconds)
            if fault == "throttle":
                self._send(503, {"Content-Type": "application/xml"}, _THROTTLED)
                return
            with store.changed(self.path) if fault == "change" else nullcontext():
                status, headers, content = store.ask_server(self.command, self.path, dict(self.headers))
            self._send(status, headers, content, cut=fault == "cut")

        def _send(self, status: int, headers: dict[str, str], content: bytes, *, cut: bool = False) -> None:
            self.send_response_only(status)
            length = headers.pop("Content-Length", None)
            for name, value in headers.items():
                if name.lower() not in ("connection", "transfer-encoding"):
                    self.send_header(name, value)
            self.send_header("Content-Length", length if self.command == "HEAD" and length else str(len(content)))
            self.end_headers()
            if self.command == "HEAD":
                return
            self.wfile.write(content[: len(content) // 2] if cut else content)
            if cut:
                self.close_connection = True
                self.connection.shutdown(socket.SHUT_RDWR)

        def log_message(self, *_: object) -> None:
            """Nothing: tests look at what was requested."""

    return Handler


@contextmanager
def running_store(server: Path) -> Iterator[ObjectStore]:
    """Run `server`, the program of moto's server, with the proxy before it."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    process = subprocess.Popen(
        [server, "-H", "127.0.0.1", "-p", str(port)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    store = ObjectStore(port)
    try:
        store.start()
        yield store
        store.close()
    finally:
        process.terminate()
        process.wait()
