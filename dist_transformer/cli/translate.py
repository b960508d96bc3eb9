"""Translate standard input to standard output, one line a line.

dist-transformer translate --model MODEL < input.txt > output.txt

A blank line gives a blank line. A line with more tokens than the model has room for is split at the ends of its
sentences, or where the limit is reached; its parts are translated one by one and joined, with a space or, next to
Chinese and Japanese characters, without. Standard error names the line and the number of parts.

With --nbest K every line gives up to K lines `number ||| text ||| score`, best first (Moses' format): the number counts
input lines from 0, the score is log p / ((5 + length) / 6)^penalty. The k-th of a split line joins the k-th of each
part, and its score is the mean of theirs.

At a terminal each line is translated when it is typed; Ctrl-D ends.
"""

import argparse
import itertools
import sys
from collections.abc import Iterator
from dataclasses import replace

import torch

from dist_transformer.cli.parser import make_parser
from dist_transformer.data.text.files import decode_lines
from dist_transformer.errors import UserError
from dist_transformer.inference.options import (
    PRECISIONS,
    add_decoding_options,
    add_direction_options,
    add_model_option,
    beam_settings,
)
from dist_transformer.inference.translator import Translation, Translator
from dist_transformer.model_folder import load_model

# Batches are formed from so many lines, and so many are held in memory.
_LINES_AT_ONCE = 10_000


def main() -> None:
    arguments = parse_arguments()
    settings = beam_settings(arguments, nbest=1 if arguments.nbest is None else arguments.nbest)
    device = find_device(arguments.device)
    model, tokenizer, info = load_model(arguments.model, device, PRECISIONS[arguments.precision])
    direction = info.facing(arguments.direction, arguments.tag).direction
    translator = Translator(
        model, tokenizer, device, settings, tags=direction.tags, max_batch_tokens=arguments.batch_tokens
    )
    at_terminal = sys.stdin.isatty()
    prompt = f"{direction.name}> " if at_terminal and sys.stderr.isatty() else ""
    lines = decode_lines(typed_lines(prompt) if at_terminal else sys.stdin.buffer, "standard input")
    first = 0
    while chunk := list(itertools.islice(lines, 1 if at_terminal else _LINES_AT_ONCE)):
        for number, translation in enumerate(translator.translate(chunk), first):
            if translation.split is not None:
                print(f"note: {replace(translation.split, line=number + 1)}", file=sys.stderr, flush=True)
            sys.stdout.buffer.write(as_output(number, translation, nbest=arguments.nbest is not None).encode("utf-8"))
        sys.stdout.buffer.flush()
        first += len(chunk)


def typed_lines(prompt: str) -> Iterator[bytes]:
    """Read lines as they are typed, each after a prompt on standard error."""
    if prompt:
        print("Type one sentence per line. Ctrl-D ends.", file=sys.stderr)
    while True:
        print(prompt, end="", file=sys.stderr, flush=True)
        line = sys.stdin.buffer.readline()
        if not line:
            break
        yield line
    if prompt:
        # The shell's own prompt begins a line.
        print(file=sys.stderr)


def as_output(number: int, translation: Translation, *, nbest: bool) -> str:
    if not nbest:
        return f"{translation.text}\n"
    return "".join(f"{number} ||| {found.text} ||| {found.score:.6f}\n" for found in translation.hypotheses)


def find_device(name: str | None) -> torch.device:
    try:
        device = torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise UserError(f"--device {name} cannot be used ({str(error).splitlines()[0]}): give cpu or cuda:0") from None
    if device.type not in ("cpu", "cuda"):
        raise UserError(f"--device {name} is not supported: give cpu or cuda:0")
    return device


def parse_arguments() -> argparse.Namespace:
    parser = make_parser(__doc__)
    add_model_option(parser)
    add_direction_options(parser)
    add_decoding_options(parser)
    parser.add_argument("--nbest", type=int, metavar="K", help="print the K best (default: the best, as plain text)")
    parser.add_argument("--device", metavar="D", help="cpu, cuda or cuda:N (default: cuda where there is one)")
    return parser.parse_args()
