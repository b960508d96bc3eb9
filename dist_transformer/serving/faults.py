"""The server's log: mistakes of the server, each with one traceback; clients cannot fill it."""

import logging
import sys
import traceback

from aiohttp import web
from aiohttp.http import HttpProcessingError

# Bytes that are not HTTP, and connections that end early.
_CAUSED_BY_CLIENTS = (HttpProcessingError, web.RequestPayloadError, ConnectionError)


class FaultLog(logging.Handler):
    """Handler that prints to stderr: the traceback of an exception the first time, and one line each further time.

    Exceptions that only a client can cause are not printed.
    """

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        # The types and places of the exceptions that were printed.
        self._known: set[tuple[type[BaseException], str, int | None]] = set()

    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info[1] if record.exc_info else None
        if isinstance(error, _CAUSED_BY_CLIENTS):
            return
        print(f"error: {record.getMessage()}: {error!r}" if error else record.getMessage(), file=sys.stderr, flush=True)
        if error is not None and self._is_new(error):
            traceback.print_exception(error, file=sys.stderr)

    def _is_new(self, error: BaseException) -> bool:
        frames = traceback.extract_tb(error.__traceback__)
        last = (frames[-1].filename, frames[-1].lineno) if frames else ("", None)
        before = len(self._known)
        self._known.add((type(error), *last))
        return len(self._known) > before


def make_log() -> logging.Logger:
    """Make the logger of a server."""
    log = logging.getLogger(__name__)
    log.propagate = False
    log.handlers = [FaultLog()]
    return log
