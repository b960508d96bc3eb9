"""HTTP server with a page to try models, and the API that the page uses.

GET  /                the page, with /page.css and /page.js
GET  /api/models      the models, and the limits of a request
POST /api/translate   {"text": …} → translations of each model
POST /api/attention   {"model": 0, "text": …, "tokens": […], "kind": "cross", "layer": 0} → weights of each head

The API of LibreTranslate, for programs:

GET  /languages       the directions of the models
POST /detect          {"q": …} → the source languages of the models; nothing is detected
POST /translate       {"q": … or […], "source": "en", "target": "de"} → {"translatedText": … or […]}

An error is also JSON: {"error": one sentence}.
"""

import asyncio
import errno
import importlib.resources
import ipaddress
import logging
import os
import socket
import sys
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

import hypercorn.asyncio
from hypercorn.config import Config
from pydantic import ValidationError
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from dist_transformer.base.errors import UserError
from dist_transformer.runtime.launch import free_port
from dist_transformer.serving.models import LONGEST_MAP, ServedModel, choose_model, describe_languages, possible_sources
from dist_transformer.serving.requests import AttentionRequest, BatchRequest, DetectRequest, TextRequest, receive

MOST_WAITING = 8
SECONDS_TO_BEGIN = 5
"""Time to send the headers of a request, from the connection or the last answer on."""
SECONDS_TO_READ = 60
"""Time in which a client that does not read its answer must begin to."""
_PAGE = {
    "/": ("index.html", "text/html"),
    "/page.css": ("page.css", "text/css"),
    "/page.js": ("page.js", "text/javascript"),
}
_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; base-uri 'none'; "
        "form-action 'none'; frame-ancestors 'none'"
    ),
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-store",
}

# Mistakes in answers go to the same log as those in connections.
log = logging.getLogger("asyncio")
T = TypeVar("T")


def open_socket(host: str, port: int) -> socket.socket:
    """Listen on a port; connections wait until the server runs.

    Raises:
        UserError: the port is taken or not allowed, or the address is not this machine's.
    """
    if not 0 <= port < 1 << 16:
        raise UserError(f"--port is {port}: it must be 1 to {(1 << 16) - 1:,}, or 0 for any free port")
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except (OSError, UnicodeError) as error:
        raise UserError(
            f"--host {host} is not an address ({error}): use 127.0.0.1, or an address of this machine"
        ) from None
    try:
        # It allows the port of a server that has just ended.
        takes_both = family == socket.AF_INET6 and socket.has_dualstack_ipv6()
        listening = socket.create_server(address, family=family, dualstack_ipv6=takes_both)
    except OSError as error:
        reason = os.strerror(error.errno or errno.EIO)
        raise UserError(
            f"port {port} of {host} is not available ({reason}): use another one, such as --port {free_port()}"
        ) from None
    if sys.platform == "linux":
        # Connections inherit it: one whose client does not read its answer ends.
        listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * SECONDS_TO_READ)
    return listening


def is_loopback(listening: socket.socket) -> bool:
    return ipaddress.ip_address(listening.getsockname()[0].partition("%")[0]).is_loopback


def address_of(listening: socket.socket) -> str:
    """Return the URL of a listening socket for a browser on this machine."""
    host, port = listening.getsockname()[:2]
    if ipaddress.ip_address(host.partition("%")[0]).is_unspecified:
        host = socket.gethostname()
    return f"http://[{host}]:{port}/" if ":" in host else f"http://{host}:{port}/"


def allowed_hosts(listening: socket.socket) -> list[str]:
    """Return the names that the Host header may have.

    On a loopback address, these are loopback names. Otherwise a foreign web page could point its own name to 127.0.0.1
    and read the answers (DNS rebinding).
    """
    local = ["localhost", "127.0.0.1", "[::1]", listening.getsockname()[0]]
    return local if is_loopback(listening) else ["*"]


def make_app(models: Sequence[ServedModel], *, max_characters: int, hosts: Sequence[str]) -> Starlette:
    """Make the application.

    Args:
        hosts: names that the Host header may have; `*`: any.
    """
    queue = _Queue()
    page = importlib.resources.files("dist_transformer.serving") / "page"
    described = {
        "max_characters": max_characters,
        "longest_map": LONGEST_MAP - 1,
        "models": [model.describe() for model in models],
    }
    fixed = {path: Response((page / name).read_bytes(), media_type=kind) for path, (name, kind) in _PAGE.items()}
    fixed |= {"/api/models": JSONResponse(described), "/languages": JSONResponse(describe_languages(models))}

    async def answer_translate(request: Request) -> Response:
        wanted = await receive(request, TextRequest, max_characters)
        results = await queue.run(request, lambda: [model.translate(wanted.text, wanted.prefix) for model in models])
        return JSONResponse({"results": results})

    async def answer_attention(request: Request) -> Response:
        wanted = await receive(request, AttentionRequest, max_characters)
        if wanted.model >= len(models):
            raise UserError(f"model must be a number from 0 to {len(models) - 1}")
        return JSONResponse(await queue.run(request, lambda: models[wanted.model].attention(wanted)))

    async def answer_detect(request: Request) -> Response:
        await receive(request, DetectRequest, max_characters, forms=True)
        return JSONResponse(possible_sources(models))

    async def answer_batch(request: Request) -> Response:
        wanted = await receive(request, BatchRequest, max_characters, forms=True)
        texts, model = wanted.lines(max_characters), choose_model(models, wanted)
        has_tags = wanted.format == "html"
        found = await queue.run(request, lambda: model.translate_texts(texts, has_tags=has_tags))
        return JSONResponse({"translatedText": found[0] if isinstance(wanted.q, str) else found})

    return Starlette(
        routes=[
            *(Route(path, response, methods=["GET"]) for path, response in fixed.items()),
            Route("/api/translate", answer_translate, methods=["POST"]),
            Route("/api/attention", answer_attention, methods=["POST"]),
            Route("/detect", answer_detect, methods=["POST"]),
            Route("/translate", answer_batch, methods=["POST"]),
        ],
        middleware=[Middleware(TrustedHostMiddleware, allowed_hosts=hosts)],
        exception_handlers=dict.fromkeys((HTTPException, UserError, ValidationError, ClientDisconnect), _explain),
    )


class _Config(Config):
    """Configuration of the HTTP library, with headers of every answer, also of those to a request that is no HTTP."""

    def response_headers(self, protocol: str) -> list[tuple[bytes, bytes]]:
        own = ((name.encode(), rule.encode()) for name, rule in _HEADERS.items())
        return [*super().response_headers(protocol), *own]


async def serve(app: Starlette, listening: socket.socket) -> None:
    """Serve, and own the socket, until the task is cancelled."""
    config = _Config()
    config.bind = [f"fd://{listening.detach()}"]
    config.keep_alive_timeout = SECONDS_TO_BEGIN
    # No limit: with one, a body in many chunks that no route reads keeps its connection open.
    config.max_app_queue_size = 0
    config.include_server_header = False
    # An impossible value, by which HTTP/2 fails: its connections have no limit of time.
    config.h2_max_header_list_size = -1
    config.errorlog = log
    log.addFilter(_Once())
    await hypercorn.asyncio.serve(app, config, shutdown_trigger=asyncio.Event().wait)  # type: ignore[arg-type]


class _Queue:
    """Searches, one at a time, in the order of their arrival."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "search")
        self._searches: list[Future] = []

    async def run(self, request: Request, search: Callable[[], T]) -> T:
        """Run the search of a request whose body has been received, unless the client leaves before it begins.

        Raises:
            HTTPException: the queue is full, or the search failed.
        """
        self._searches = [each for each in self._searches if not each.done()]
        if len(self._searches) > MOST_WAITING:
            sentence = f"{MOST_WAITING} requests are already waiting: try again in a moment"
            raise HTTPException(503, sentence, {"Retry-After": "5"})
        future = self._thread.submit(search)
        self._searches.append(future)
        # After the body, the only thing that comes is the end of the connection.
        leaving = asyncio.ensure_future(request.receive())
        leaving.add_done_callback(lambda _: future.cancel())
        try:
            return await asyncio.wrap_future(future)
        except (UserError, asyncio.CancelledError):
            raise
        except BaseException:
            # Also a panic of Rust, which is no Exception.
            log.exception("error: a request failed")
            raise HTTPException(500, "the server failed: see the error in its terminal") from None
        finally:
            leaving.cancel()


class _Once(logging.Filter):
    """Filter of a log: a mistake of the server is printed once, however often it happens, and one of a client never."""

    def __init__(self) -> None:
        super().__init__()
        self._seen: set[tuple[object, ...]] = set()

    def filter(self, record: logging.LogRecord) -> bool:
        kind, error, place = record.exc_info or (None, None, None)
        # Clients that left, or read nothing, or speak no HTTP/1.1.
        failed = record.getMessage().startswith("Unhandled exception in client_connected_cb")
        if failed or error is None or isinstance(error, ConnectionError | TimeoutError):
            return False
        if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
            # asyncio prints 128 tracebacks at a time.
            record.exc_info = None
            record.msg, record.args = (
                f"warning: connections cannot be accepted until others end ({error.strerror}): raise the limit of open "
                "files, for example with ulimit -n",
                (),
            )
        seen = (kind, record.getMessage().partition("\n")[0], *traceback.format_tb(place)[-1:])
        is_new = seen not in self._seen
        self._seen.add(seen)
        return is_new


async def _explain(_: Request, error: Exception) -> Response:
    status, sentence, headers = 400, str(error), None
    if isinstance(error, HTTPException):
        status, sentence, headers = error.status_code, error.detail, error.headers
    elif isinstance(error, ValidationError):
        first = error.errors()[0]
        about = f"{first['loc'][0] if first['loc'] else 'the request'}: {first['msg']}"
        sentence = "the request is not JSON in UTF-8" if first["type"] == "json_invalid" else about
    return JSONResponse({"error": sentence}, status, headers)
