"""HTTP server with a page to try models, and the API that the page uses.

GET  /                the page, with /page.css and /page.js
GET  /api/models      the models, and the limits of a request
POST /api/translate   {"text": …} → translations of each model
POST /api/attention   {"model": 0, "text": …, "tokens": […], "kind": "cross", "layer": 0} → weights of each head

The API of LibreTranslate, for programs:

GET  /languages       the directions of the models
POST /translate       {"q": … or […], "source": "en", "target": "de"} → {"translatedText": … or […]}

An error is also JSON: {"error": one sentence}.
"""

import asyncio
import importlib.resources
import ipaddress
import json
import logging
import signal
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web

from dist_transformer.base.errors import UserError
from dist_transformer.runtime.launch import free_port
from dist_transformer.serving.connections import Connections, Limits, while_working
from dist_transformer.serving.faults import make_log
from dist_transformer.serving.libretranslate import (
    FORM,
    choose_model,
    describe_languages,
    read_batch,
    translate_batch,
)
from dist_transformer.serving.messages import most_bytes, read_attention_request, read_text
from dist_transformer.serving.models import LONGEST_MAP, ServedModel, attention, translate
from dist_transformer.serving.receiving import content, receive
from dist_transformer.serving.worker import TooBusyError, Worker

MOST_WAITING = 8
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
# Time for responses that are being sent when the server stops.
_SECONDS_TO_END = 1

LOG = web.AppKey("LOG", logging.Logger)
"""Log of the mistakes of an application."""
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def open_socket(host: str, port: int) -> socket.socket:
    """Listen on a port; connections wait until the server runs.

    Raises:
        UserError: the port is taken or not allowed, or the address is not this machine's.
    """
    if not 0 <= port < 1 << 16:
        raise UserError(f"--port is {port}: it must be 1 to {(1 << 16) - 1:,}, or 0 for any free port")
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listening = socket.socket(family, kind, protocol)
    except (OSError, UnicodeError) as error:
        raise UserError(
            f"--host {host} is not an address ({error}): use 127.0.0.1, or an address of this machine"
        ) from None
    try:
        # Allow the port of a server that has just ended.
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(address)
        listening.listen()
    except OSError as error:
        listening.close()
        reason = error.strerror or str(error)
        raise UserError(
            f"port {port} of {host} is not available ({reason}): use another one, such as --port {free_port()}"
        ) from None
    return listening


def is_loopback(listening: socket.socket) -> bool:
    return ipaddress.ip_address(listening.getsockname()[0].partition("%")[0]).is_loopback


def address_of(listening: socket.socket) -> str:
    """Return the URL of a listening socket for a browser on this machine."""
    host, port = listening.getsockname()[:2]
    if ipaddress.ip_address(host.partition("%")[0]).is_unspecified:
        host = socket.gethostname()
    return f"http://[{host}]:{port}/" if ":" in host else f"http://{host}:{port}/"


def make_app(
    models: Sequence[ServedModel], *, max_characters: int, only_local_names: bool, worker: Worker
) -> web.Application:
    """Make the application.

    Args:
        only_local_names: whether the Host header must be a loopback name. Otherwise a foreign web page could point its
            own name to 127.0.0.1 and read the responses (DNS rebinding).
    """

    async def show_models(_: web.Request) -> web.Response:
        limits = {"max_characters": max_characters, "longest_map": LONGEST_MAP - 1}
        return _json({**limits, "models": [model.describe() for model in models]})

    async def answer_translate(request: web.Request) -> web.Response:
        text, prefix = read_text(await _json_body(request), max_characters=max_characters)
        return _json({"results": await worker.run(lambda: [translate(model, text, prefix) for model in models])})

    async def answer_attention(request: web.Request) -> web.Response:
        wanted = read_attention_request(await _json_body(request), models=len(models), max_characters=max_characters)
        return _json(await worker.run(lambda: attention(models[wanted.model], wanted)))

    async def show_languages(_: web.Request) -> web.Response:
        return _json(describe_languages(models))

    async def answer_batch(request: web.Request) -> web.Response:
        body = await _batch_body(request)
        wanted = read_batch(body, request.content_type, max_characters=max_characters)
        model = choose_model(models, wanted)
        return _json(await worker.run(lambda: translate_batch(model, wanted)))

    guards = [_errors_as_json, _receive_first, *([_refuse_other_names] if only_local_names else [])]
    log = make_log()
    # What aiohttp decompresses has no limit in all its versions, and some damaged bodies fail in its protocol.
    settings = {"auto_decompress": False, "logger": log}
    app = web.Application(middlewares=guards, client_max_size=most_bytes(max_characters), handler_args=settings)
    app[LOG] = log
    app.on_response_prepare.append(_add_headers)
    for path, (name, kind) in _PAGE.items():
        app.router.add_get(path, _file_handler(name, kind))
    app.router.add_get("/api/models", show_models)
    app.router.add_post("/api/translate", answer_translate)
    app.router.add_post("/api/attention", answer_attention)
    app.router.add_get("/languages", show_languages)
    app.router.add_post("/translate", answer_batch)
    return app


async def serve(app: web.Application, listening: socket.socket, on_ready: Callable[[], None]) -> None:
    """Serve until SIGINT or SIGTERM."""
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    async with answering(app, listening, Limits()):
        on_ready()
        await stop.wait()


@asynccontextmanager
async def answering(app: web.Application, listening: socket.socket, limits: Limits) -> AsyncIterator[None]:
    """Answer requests in the background; close the socket at the end."""
    # A client that disconnects cancels its handler and its waiting work.
    runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=_SECONDS_TO_END)
    await runner.setup()
    assert runner.server is not None
    accepting = asyncio.create_task(Connections(runner.server, limits, app[LOG]).accept(listening))
    try:
        yield
    finally:
        accepting.cancel()
        await asyncio.gather(accepting, return_exceptions=True)
        listening.close()
        await runner.cleanup()


def _file_handler(name: str, kind: str) -> Handler:
    content = (importlib.resources.files("dist_transformer.serving") / "page" / name).read_bytes()

    async def show(_: web.Request) -> web.Response:
        return web.Response(body=content, content_type=kind, charset="utf-8")

    return show


async def _json_body(request: web.Request) -> bytes:
    """Return the body of a request that only a page of this server can send."""
    # A form of another site cannot send this content type. A script of another site needs CORS permission, which is
    # never given.
    if request.content_type != "application/json":
        raise web.HTTPUnsupportedMediaType(text="the request must have the content type application/json")
    return await content(request)


async def _batch_body(request: web.Request) -> bytes:
    """Return the body of a request from a program, or from a page of this server."""
    if request.content_type != FORM:
        return await _json_body(request)
    # Browsers name the site of each form that is sent; programs do not.
    origin = request.headers.get("Origin")
    if origin is not None and origin.partition("://")[2] != request.host:
        raise web.HTTPForbidden(text="forms of other sites are not answered: send JSON, or no Origin header")
    return await content(request)


@web.middleware
async def _errors_as_json(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except UserError as error:
        response = _error(400, str(error))
    except TooBusyError:
        sentence = f"{MOST_WAITING} requests are already waiting: try again in a moment"
        response = _error(503, sentence, {"Retry-After": "5"})
    except web.HTTPRequestEntityTooLarge as error:
        response = _error(error.status, "the request is too long: send a shorter text")
    except web.HTTPException as error:
        # A 405 response must list the allowed methods, and a 415 response may list encodings.
        named = {name: error.headers[name] for name in ("Allow", "Accept-Encoding") if name in error.headers}
        response = _error(error.status, error.text or error.reason, named)
    except Exception:
        request.app[LOG].exception("a request failed")
        response = _error(500, "the server failed: see the error in its terminal")
    if not request.content.is_eof():
        # The next request would begin within this one's body.
        response.force_close()
    return response


@web.middleware
async def _receive_first(request: web.Request, handler: Handler) -> web.StreamResponse:
    await receive(request)
    with while_working(request.transport):
        return await handler(request)


@web.middleware
async def _refuse_other_names(request: web.Request, handler: Handler) -> web.StreamResponse:
    if not _names_loopback(request.headers.get("Host", "")):
        raise web.HTTPForbidden(text="the server answers only as localhost: open the address that it printed")
    return await handler(request)


def _names_loopback(host: str) -> bool:
    """Return whether a Host header, with or without its port, is `localhost` or a loopback address."""
    name = host.partition("]")[0].removeprefix("[") if host.startswith("[") else host.partition(":")[0]
    if name.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


async def _add_headers(_: web.Request, response: web.StreamResponse) -> None:
    response.headers.update(_HEADERS)


def _json(value: Any) -> web.Response:
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return web.Response(text=text, content_type="application/json")


def _error(status: int, sentence: str, headers: dict[str, str] | None = None) -> web.Response:
    return web.json_response({"error": sentence}, status=status, headers=headers)
