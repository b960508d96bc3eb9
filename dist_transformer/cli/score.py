"""Score given translations: the log-probability that a model gives to each target line, given its source line.

dist-transformer score --model MODEL --src test.en --tgt test.de > scores.txt

Prints one number per pair, in order: the natural logarithm of p(target | source), summed over the target's tokens and
the final `</s>`. Divide by the number of tokens to compare lines of different length. The number comes from the model's
distribution alone, without label smoothing or search rules.

With --per-token every pair is one line of JSON: log_probability is the sum; tokens are the pieces of the target, with
`▁` for a space, and `</s>`; token_log_probabilities has one number per token.

Both files may be plain or compressed and of any size; 10,000 lines are in memory at a time. All lines are checked
first: the files must have the same number of lines, and no line may have more tokens than the model has positions.

Runs in one process or under a launcher (deepspeed, torchrun, srun, mpirun), which shares the work; the result is the
same.
"""

import argparse
import contextlib
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING

from dist_transformer.base.errors import UserError, say
from dist_transformer.base.files import make_folder, whole_path
from dist_transformer.cli.parser import make_parser
from dist_transformer.data.text.files import LineFiles
from dist_transformer.data.text.lines import require_readable
from dist_transformer.data.vocabulary.tokenizer import Vocabulary
from dist_transformer.evaluation.languages import wrong_side
from dist_transformer.inference.loading import load_joint, read_joint_info
from dist_transformer.inference.options import (
    PRECISIONS,
    SCORED_TOKENS,
    add_device_option,
    add_direction_options,
    add_models_option,
    as_dtype,
)
from dist_transformer.run.outputs import claim_file
from dist_transformer.runtime.world import World, read_world

if TYPE_CHECKING:
    from dist_transformer.inference.scoring import PairScore


def main() -> None:
    arguments = parse_arguments()
    claim_file(arguments.out, "--out", (*arguments.model, arguments.src, arguments.tgt))
    world = read_world()

    def check_files() -> None:
        read_joint_info(arguments.model, arguments.direction, arguments.tag)
        # Only the first rank reads the texts.
        for path in (arguments.src, arguments.tgt) if world.is_main else ():
            require_readable(path)

    if world.size == 1:
        # Early, because the imports below take seconds.
        check_files()

    from dist_transformer.inference.scoring import score_files
    from dist_transformer.runtime.agreement import require_agreement
    from dist_transformer.runtime.distributed import error_of_all, on_all_ranks
    from dist_transformer.runtime.process_group import process_group

    group = process_group(world, device_name=arguments.device, ready=check_files)
    with group as device, error_of_all(world):
        require_agreement(vars(arguments))
        way = {"direction": arguments.direction, "tags": arguments.tag}
        model, tokenizer, info = on_all_ranks(
            lambda: load_joint(arguments.model, device, as_dtype(arguments.precision), **way)
        )

        def look(sources: Sequence[str], targets: Sequence[str]) -> None:
            if caution := wrong_side(
                info,
                tokenizer,
                sources=sources,
                targets=targets,
                source_file=arguments.src,
                target_file=arguments.tgt,
                flags="whether --src and --tgt are swapped, and --direction",
            ):
                say(f"warning: {caution}", file=sys.stderr)

        chunks = score_files(
            model,
            tokenizer,
            LineFiles(source=arguments.src, target=arguments.tgt),
            device=device,
            tags=info.direction.tags,
            max_batch_tokens=arguments.batch_tokens,
            look=look,
        )
        with output_of(world, arguments.out) as write:
            for scores in chunks:
                write("".join(as_output(score, tokenizer, per_token=arguments.per_token) for score in scores))


def as_output(score: "PairScore", tokenizer: "Vocabulary", *, per_token: bool) -> str:
    from dist_transformer.inference.attention_maps import readable_pieces

    if not per_token:
        return f"{score.log_probability:.6f}\n"
    line = {
        "log_probability": round(score.log_probability, 6),
        "tokens": readable_pieces(tokenizer.target, score.tokens[:-1]),
        "token_log_probabilities": [round(value, 6) for value in score.token_log_probabilities],
    }
    return json.dumps(line, ensure_ascii=False) + "\n"


@contextlib.contextmanager
def output_of(world: World, out: Path | None) -> Iterator[Callable[[str], None]]:
    """Yield a function that writes text to standard output, or to a file that is whole or absent.

    Only rank 0 writes. Collective: every rank must call it.

    Raises:
        UserError: rank 0 cannot write; every rank raises it.
    """
    from dist_transformer.runtime.distributed import on_all_ranks

    # In one process, a closed pipe such as `| head` ends the command without an error message.
    errors = () if out is None and world.size == 1 else (OSError, UserError)

    def on_rank_0(work: Callable[[], object]) -> None:
        place = "standard output" if out is None else out
        on_all_ranks(
            lambda: work() if world.is_main else None,
            errors=errors,
            describe=lambda error: (
                str(error)
                if isinstance(error, UserError)
                else f"{place} cannot be written ({getattr(error, 'strerror', error)}): choose another place"
            ),
        )

    with contextlib.ExitStack() as stack:
        files: list[IO[bytes]] = [sys.stdout.buffer]
        if out is not None:
            on_rank_0(lambda: files.append(stack.enter_context(_new_file(out))))
        yield lambda text: on_rank_0(lambda: _write(files[-1], text.encode()))
        # Close inside on_rank_0, so that all ranks learn of an error when the file gets its final name.
        on_rank_0(stack.close)


@contextlib.contextmanager
def _new_file(path: Path) -> Iterator[IO[bytes]]:
    make_folder(path.parent)
    # Unbuffered: after an error, a buffer would be flushed on close and raise the error again.
    with whole_path(path) as beside, beside.open("wb", buffering=0) as file:
        yield file


def _write(file: IO[bytes], content: bytes) -> None:
    left = memoryview(content)
    while left:
        left = left[file.write(left) :]
    file.flush()


def parse_arguments() -> argparse.Namespace:
    parser = make_parser(__doc__, shares_work=True)
    add_models_option(parser)
    parser.add_argument("--src", type=Path, required=True, metavar="F", help="source text, one sentence per line")
    parser.add_argument("--tgt", type=Path, required=True, metavar="F", help="translations, line by line")
    parser.add_argument("--out", type=Path, metavar="F", help="file for the scores (default: standard output)")
    parser.add_argument("--per-token", action="store_true", help="write a line of JSON per pair, with token scores")
    add_direction_options(parser)
    add_device_option(parser, several_processes=True)
    parser.add_argument(
        "--precision", choices=tuple(PRECISIONS), default="fp32", help="arithmetic of the model (default fp32)"
    )
    defaults = f"default {SCORED_TOKENS['cpu']} on a CPU, {SCORED_TOKENS['cuda']} on a GPU"
    text = f"tokens per batch, counted on the longer side of each pair ({defaults})"
    parser.add_argument("--batch-tokens", type=int, metavar="N", help=text)
    # DeepSpeed's launcher adds this flag; the environment has the same value.
    parser.add_argument("--local_rank", type=int, help=argparse.SUPPRESS)
    return parser.parse_args()
