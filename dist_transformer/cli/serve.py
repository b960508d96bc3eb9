"""Try a model in a browser: n-best translations with scores, and the attention weights of each head.

dist-transformer serve --model MODEL

dist-transformer serve --model MODEL --compare MODEL2

Prints the address of the page when it is ready. Ctrl-C stops the server. With --compare, two models are shown side by
side. Several folders after a flag are an ensemble, which translates with the mean of its models' probabilities and has
no attention weights.

Programs use it as they use LibreTranslate: POST /translate, GET /languages.

The page is for this machine only. --host 0.0.0.0 opens it to other machines. There is no password, so anyone who can
reach it can use the models. One search runs at a time; up to 8 requests wait, and further ones are refused.
"""

import argparse
import asyncio
import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from dist_transformer.base.errors import UserError
from dist_transformer.cli.parser import make_parser
from dist_transformer.inference.loading import read_joint_info
from dist_transformer.inference.options import (
    DECODING_PRECISIONS,
    add_device_option,
    add_direction_options,
    add_models_option,
    as_arithmetic,
)
from dist_transformer.serving.worker import Worker

if TYPE_CHECKING:
    from dist_transformer.inference.beam import BeamSettings


def main() -> None:
    arguments = parse_arguments()
    # Set early, so that the signals also work while models are loaded. An exception could be lost there, and nothing
    # needs an orderly end.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: os._exit(0))
    check_arguments(arguments)

    from dist_transformer.runtime.device import find_device
    from dist_transformer.serving.models import load_models
    from dist_transformer.serving.server import MOST_WAITING, address_of, is_loopback, make_app, open_socket, serve

    settings = decoding_settings(arguments)
    device = find_device(arguments.device)
    listening = open_socket(arguments.host, arguments.port)
    way = {"direction": arguments.direction, "tags": arguments.tag}
    arithmetic = as_arithmetic(arguments.precision, device)
    models = load_models(models_of(arguments), device, *arithmetic, settings=settings, **way)
    local, worker = is_loopback(listening), Worker(MOST_WAITING)
    if not local:
        port = listening.getsockname()[1]
        print(
            f"warning: --host {arguments.host} opens port {port} to other machines without a password: anyone who can "
            "reach it can use the models",
            file=sys.stderr,
            flush=True,
        )
    app = make_app(models, max_characters=arguments.max_characters, only_local_names=local, worker=worker)
    ready = f"Open {address_of(listening)} in a browser. Ctrl-C stops the server."
    asyncio.run(serve(app, listening, lambda: print(ready, flush=True)))
    if worker.is_busy:
        # No client waits for that search any more, and the interpreter must not exit while a thread computes.
        os._exit(0)


def check_arguments(arguments: argparse.Namespace) -> None:
    """Check what can be checked before the libraries are imported, which takes seconds."""
    if arguments.max_characters < 1:
        raise UserError(f"--max-characters is {arguments.max_characters}: it must be 1 or more, such as 2000")
    for paths in models_of(arguments):
        read_joint_info(paths, arguments.direction, arguments.tag)


def models_of(arguments: argparse.Namespace) -> list[list[Path]]:
    """Return the folders of each model to show."""
    return [arguments.model, *([arguments.compare] if arguments.compare else [])]


def decoding_settings(arguments: argparse.Namespace) -> "BeamSettings":
    from dist_transformer.inference.beam import BeamSettings

    nbest = min(4, arguments.beam) if arguments.nbest is None else arguments.nbest
    return BeamSettings(beam_size=arguments.beam, length_penalty=arguments.length_penalty, nbest=nbest)


def parse_arguments() -> argparse.Namespace:
    parser = make_parser(__doc__)
    option = parser.add_argument
    add_models_option(parser)
    option("--compare", type=Path, nargs="+", metavar="MODEL", help="a second model, or ensemble, shown beside it")
    add_direction_options(parser)
    option("--host", default="127.0.0.1", help="address to listen on (default 127.0.0.1)")
    option("--port", type=int, default=8000, metavar="N", help="port to listen on; 0: any free port (default 8000)")
    add_device_option(parser)
    option("--precision", choices=DECODING_PRECISIONS, default="fp32", help="arithmetic (default fp32)")
    option("--beam", type=int, default=4, metavar="K", help="beam size; 1: greedy search (default 4)")
    option("--nbest", type=int, metavar="K", help="translations to show (default 4, at most --beam)")
    option("--length-penalty", type=float, default=0.6, metavar="A", help="exponent of the penalty (default 0.6)")
    option("--max-characters", type=int, default=2000, metavar="N", help="longest accepted text (default 2000)")
    return parser.parse_args()
