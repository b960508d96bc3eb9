"""Try a model in a browser: n-best translations with scores, and the attention weights of each head.

dist-transformer serve --model MODEL

dist-transformer serve --model MODEL --compare MODEL2

Prints the address of the page when it is ready. Ctrl-C stops the server. With --compare, two models are shown side by
side. Several folders after a flag are an ensemble, which translates with the mean of its models' probabilities and has
no attention weights.

Programs use it as they use LibreTranslate: POST /translate and /detect, GET /languages.

The page is for this machine only. --host 0.0.0.0 opens it to other machines. There is no password, so anyone who can
reach it can use the models. One search runs at a time; up to 8 requests wait, and further ones are refused.
"""

import asyncio
import os
import signal
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from dist_transformer.config.command_line import Page, parse
from dist_transformer.config.schema import FLAT, require_positive, values_of
from dist_transformer.inference.decoding import Decoding, ExactLoading, Search
from dist_transformer.inference.loading import read_joint_info


@dataclass(frozen=True, kw_only=True, slots=True)
class ServeSettings:
    """The server."""

    model: tuple[Path, ...]
    """Model folder; several are an ensemble: the mean of their probabilities, with shares such as A:2 B:1."""
    compare: tuple[Path, ...] = ()
    """A second model, or ensemble, shown beside it."""
    host: str = "127.0.0.1"
    """Address to listen on."""
    port: int = 8000
    """Port to listen on; 0: any free port."""
    max_characters: int = 2000
    """Characters of the longest accepted text."""
    nbest: int | None = None
    """Translations to show; default: 4, or as many as beam if that is less."""
    loading: Annotated[ExactLoading, FLAT]
    search: Annotated[Search, FLAT]

    def __post_init__(self) -> None:
        require_positive(self, "max_characters")
        # It checks the numbers.
        self.decoding()

    def decoding(self) -> Decoding:
        nbest = min(4, self.search.beam) if self.nbest is None else self.nbest
        return Decoding(nbest=nbest, alignment=True, **values_of(self.search))


def main() -> None:
    settings = parse_arguments()
    # Set early, so that the signals also work while models are loaded. An exception could be lost there, and nothing
    # needs an orderly end, not even a search.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: os._exit(0))
    served = [paths for paths in (settings.model, settings.compare) if paths]
    for paths in served:
        # Before the libraries are imported, which takes seconds.
        read_joint_info(paths, settings.loading)

    from dist_transformer.runtime.device import find_device
    from dist_transformer.serving.models import load_models
    from dist_transformer.serving.server import address_of, allowed_hosts, is_loopback, make_app, open_socket, serve

    device = find_device(settings.loading.device)
    listening = open_socket(settings.host, settings.port)
    models = load_models(served, settings.loading, settings.decoding(), device)
    for model in models:
        # Libraries are loaded at first use, and a request may find no file left to open.
        model.translate_texts([["a"]], has_tags=True)
    if not is_loopback(listening):
        port = listening.getsockname()[1]
        print(
            f"warning: --host {settings.host} opens port {port} to other machines without a password: anyone who can "
            "reach it can use the models",
            file=sys.stderr,
            flush=True,
        )
    app = make_app(models, max_characters=settings.max_characters, hosts=allowed_hosts(listening))
    print(f"Open {address_of(listening)} in a browser. Ctrl-C stops the server.", flush=True)
    asyncio.run(serve(app, listening))


def parse_arguments() -> ServeSettings:
    return parse(ServeSettings, Page(text=__doc__))
