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

import contextlib
import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, TYPE_CHECKING, Annotated, Literal

from dist_transformer.base.errors import UserError, caution, failure
from dist_transformer.base.files import make_folder, whole_path
from dist_transformer.config.command_line import Page, parse
from dist_transformer.config.schema import FLAT, values_of
from dist_transformer.data.text.pairs import LineFiles
from dist_transformer.data.vocabulary.tokenizer import Vocabulary
from dist_transformer.evaluation.languages import warn_of_wrong_side
from dist_transformer.inference.decoding import Loading
from dist_transformer.inference.loading import load_joint, require_inputs
from dist_transformer.run.outputs import claim_file
from dist_transformer.runtime.agreement import joined
from dist_transformer.runtime.world import World, read_world

if TYPE_CHECKING:
    from dist_transformer.inference.scoring import PairScore


@dataclass(frozen=True, kw_only=True, slots=True)
class ScoreLoading(Loading):
    """The model."""

    precision: Literal["fp32", "bf16"] = "fp32"
    """Arithmetic of the model."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ScoreSettings:
    """Text and its scores."""

    model: tuple[Path, ...]
    """Model folder; several are an ensemble: the mean of their probabilities, with shares such as A:2 B:1."""
    src: Path
    """Source text, one sentence per line."""
    tgt: Path
    """Translations, line by line."""
    out: Path | None = None
    """File for the scores; default: standard output."""
    per_token: bool = False
    """Write a line of JSON per pair, with token scores."""
    batch_tokens: int | None = None
    """Tokens per batch, counted on the longer side of each pair; default: 4096 on a CPU, 32768 on a GPU."""
    loading: Annotated[ScoreLoading, FLAT]


def main() -> None:
    settings, world = parse_arguments(), read_world()
    claim_file(settings.out, "--out", (*settings.model, settings.src, settings.tgt))

    # Only the first rank reads the texts.
    texts = (settings.src, settings.tgt) if world.is_main else ()
    with joined(world, values_of(settings), partial(require_inputs, settings.model, settings.loading, texts)) as device:
        from dist_transformer.inference.scoring import score_files
        from dist_transformer.runtime.distributed import on_all_ranks

        model, tokenizer, info = on_all_ranks(lambda: load_joint(settings.model, settings.loading, device))

        def look(sources: Sequence[str], targets: Sequence[str]) -> None:
            flags = "whether --src and --tgt are swapped, and --direction"
            warn_of_wrong_side(caution, info, tokenizer, flags, (sources, settings.src), (targets, settings.tgt))

        files = LineFiles(source=settings.src, target=settings.tgt)
        tags, tokens = info.direction.tags, settings.batch_tokens
        chunks = score_files(model, tokenizer, files, device=device, tags=tags, batch_tokens=tokens, look=look)
        rows = (map(partial(as_output, tokenizer, settings.per_token), scores) for scores in chunks)
        write_texts(map("".join, rows), world, settings.out)


def parse_arguments() -> ScoreSettings:
    return parse(ScoreSettings, Page(text=__doc__, taken=("--processes", "--import")))


def as_output(tokenizer: "Vocabulary", per_token: bool, score: "PairScore") -> str:
    from dist_transformer.inference.attention_maps import readable_pieces

    if not per_token:
        return f"{score.log_probability:.6f}\n"
    line = {
        "log_probability": round(score.log_probability, 6),
        "tokens": readable_pieces(tokenizer.target, score.tokens[:-1]),
        "token_log_probabilities": [round(value, 6) for value in score.token_log_probabilities],
    }
    return json.dumps(line, ensure_ascii=False) + "\n"


def write_texts(texts: Iterable[str], world: World, out: Path | None) -> None:
    """Write texts to standard output, or to a file that is whole or absent, on rank 0.

    Collective: every rank must call it.

    Raises:
        UserError: rank 0 cannot write; every rank raises it.
    """
    from dist_transformer.runtime.distributed import by_main

    # In one process, a closed pipe such as `| head` ends the command without an error message.
    errors = () if out is None and world.size == 1 else (OSError, UserError)

    def described(error: Exception) -> str:
        return failure(error, f"{out or 'standard output'} cannot be written", "choose another place")

    on_rank_0 = partial(by_main, errors=errors, describe=described)
    with contextlib.ExitStack() as stack:
        files: list[IO[bytes]] = [sys.stdout.buffer]
        if out is not None:
            on_rank_0(lambda: files.append(stack.enter_context(_new_file(out))))
        for text in texts:
            on_rank_0(partial(_write, files[-1], text.encode()))
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
