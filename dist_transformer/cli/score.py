"""Score given translations: the log-probability that a model gives to each target line, given its source line.

dist-transformer score --model MODEL --src test.en --tgt test.de > scores.txt

Prints one number per pair, in order: the natural logarithm of p(target | source), summed over the target's tokens and
the `</s>` at its end. Divide by the number of tokens to compare lines of different length. No label smoothing and no
rule of search applies: it is the model's distribution.

With --per-token every pair is one line of JSON: log_probability, the sum; tokens, the pieces of the target, a space as
`▁`, and `</s>`; token_log_probabilities, one number for each of them.

Both files may be plain or compressed and of any size; 10,000 lines are in memory at a time. All lines are checked
first: the files must have the same number of lines, and no line more tokens than the model has positions.

Runs alone or under a launcher (deepspeed, torchrun, srun, mpirun), which shares the work; the result is the same.
"""

import argparse
import contextlib
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

from dist_transformer.cli.parser import make_parser
from dist_transformer.data.text.files import LineFiles
from dist_transformer.data.tokenizer import Tokenizer
from dist_transformer.files import make_folder, require_writable, whole_path
from dist_transformer.inference.options import PRECISIONS, add_device_option, add_direction_options, add_model_option
from dist_transformer.inference.pieces import readable_pieces
from dist_transformer.inference.scoring import SCORED_TOKENS, PairScore, score_files
from dist_transformer.model_folder import load_model
from dist_transformer.runtime.distributed import error_of_all, on_all_ranks
from dist_transformer.runtime.process_group import process_group
from dist_transformer.runtime.world import World, read_world


def main() -> None:
    arguments = parse_arguments()
    if arguments.out is not None:
        require_writable(arguments.out)
    world = read_world()
    with process_group(world, device_name=arguments.device) as device, error_of_all(world):
        model, tokenizer, info = on_all_ranks(
            lambda: load_model(arguments.model, device, PRECISIONS[arguments.precision])
        )
        info = on_all_ranks(lambda: info.facing(arguments.direction, arguments.tag))
        chunks = score_files(
            model,
            tokenizer,
            LineFiles(source=arguments.src, target=arguments.tgt),
            device=device,
            tags=info.direction.tags,
            max_batch_tokens=arguments.batch_tokens,
        )
        with output_of(world, arguments.out) as write:
            for scores in chunks:
                write("".join(as_output(score, tokenizer, per_token=arguments.per_token) for score in scores))


def as_output(score: PairScore, tokenizer: Tokenizer, *, per_token: bool) -> str:
    if not per_token:
        return f"{score.log_probability:.6f}\n"
    line = {
        "log_probability": round(score.log_probability, 6),
        "tokens": readable_pieces(tokenizer, score.tokens[:-1]),
        "token_log_probabilities": [round(value, 6) for value in score.token_log_probabilities],
    }
    return json.dumps(line, ensure_ascii=False) + "\n"


@contextlib.contextmanager
def output_of(world: World, out: Path | None) -> Iterator[Callable[[str], None]]:
    """Give what writes text to standard output, or to a file that is whole or absent. Collective: on rank 0 only.

    Raises:
        UserError: on every rank alike, when rank 0 cannot write.
    """
    # Alone, an output that nobody reads any more ends the command as `| head` wants it, not with an error.
    errors = () if out is None and world.size == 1 else (OSError,)

    def on_rank_0(work: Callable[[], object]) -> None:
        place = "standard output" if out is None else out
        on_all_ranks(
            lambda: work() if world.is_main else None,
            errors=errors,
            describe=lambda error: (
                f"{place} cannot be written ({getattr(error, 'strerror', error)}): choose another place"
            ),
        )

    with contextlib.ExitStack() as stack:
        files: list[IO[bytes]] = [sys.stdout.buffer]
        if out is not None:
            on_rank_0(lambda: files.append(stack.enter_context(_new_file(out))))
        yield lambda text: on_rank_0(lambda: _write(files[-1], text.encode()))
        # Here, and not at the end of the block: the file gets its name while all ranks listen.
        on_rank_0(stack.close)


@contextlib.contextmanager
def _new_file(path: Path) -> Iterator[IO[bytes]]:
    make_folder(path.parent)
    # Without a buffer, whose rest would be written at the end, an error a second time.
    with whole_path(path) as beside, beside.open("wb", buffering=0) as file:
        yield file


def _write(file: IO[bytes], content: bytes) -> None:
    left = memoryview(content)
    while left:
        left = left[file.write(left) :]
    file.flush()


def parse_arguments() -> argparse.Namespace:
    parser = make_parser(__doc__)
    add_model_option(parser)
    parser.add_argument("--src", type=Path, required=True, metavar="F", help="source text, one sentence a line")
    parser.add_argument("--tgt", type=Path, required=True, metavar="F", help="its translations, line by line")
    parser.add_argument("--out", type=Path, metavar="F", help="write the scores here (default: standard output)")
    parser.add_argument("--per-token", action="store_true", help="a line of JSON per pair, with each token's score")
    add_direction_options(parser)
    add_device_option(parser, several_processes=True)
    parser.add_argument("--precision", choices=tuple(PRECISIONS), default="fp32", help="of the model (default fp32)")
    defaults = f"default {SCORED_TOKENS['cpu']} on a CPU, {SCORED_TOKENS['cuda']} on a GPU"
    text = f"tokens of a batch, of the longer side of each pair ({defaults})"
    parser.add_argument("--batch-tokens", type=int, metavar="N", help=text)
    # DeepSpeed's launcher adds this one; the environment says the same.
    parser.add_argument("--local_rank", type=int, help=argparse.SUPPRESS)
    return parser.parse_args()
