"""Settings of an export, and a model as another program has it. They need neither torch nor the libraries."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Literal, Protocol, TypeVar

from dist_transformer.base.errors import UserError
from dist_transformer.config.schema import setting
from dist_transformer.model_folder import is_hub_name

Target = Literal["hf", "ctranslate2", "marian"]
LIBRARIES: dict[Target, str] = {"hf": "transformers", "ctranslate2": "ctranslate2", "marian": "marian"}
"""Names of the libraries that load an export, and of Marian's program."""
Quantization = Literal["int8", "int8_float32", "int8_float16", "int8_bfloat16", "int16", "float16", "bfloat16"]
"""Kinds of weights that CTranslate2 can store instead of fp32."""

BEAM_SIZE = 4
LENGTH_PENALTY = 0.5
"""α of the libraries' beam searches, which divide by length^α; ours divides by ((5 + length) / 6)^0.6. For lengths of
10 to 100, its ratios are those of an α of 0.4 to 0.57."""
# By default, prepared pairs have at most 256 tokens per side, so the model has not learned longer outputs.
_LONGEST_OUTPUT = 256
# Sentences per batch of a library, and their tokens, padded.
SENTENCES = 64
_TOKENS = 16_384

Row = TypeVar("Row")
Result = TypeVar("Result")
IdPair = tuple[list[int], list[int]]
"""Source and target, without special tokens."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ExportSettings:
    """The model to export, and the text for its checks."""

    model: Path
    """Model folder."""
    to: Target
    """Library that will load it, or Marian's program."""
    quantization: Quantization | None = setting(None, flag="quantize")
    """Kind of the weights, with --to ctranslate2; default: fp32."""
    out: Path
    """Folder to write; it must be new or empty."""
    source: Path | None = setting(None, flag="src")
    """Text to compare on, one sentence per line, 1,000 lines or more; default: a built-in text."""
    reference: Path | None = setting(None, flag="ref")
    """Raw reference text, line by line; with it, the card states BLEU."""
    name: str | None = None
    """Name of the model in its card; default: that of the folder."""
    license: str | None = None
    """License in the card, in the hub's notation, such as cc-by-4.0; default: none."""
    direction: str | None = None
    """Direction of the model, such as en-de; required if it has several."""
    tags: tuple[str, ...] | None = setting(None, flag="tag")
    """Tags in front of every source; default: those of the direction."""
    push: str | None = None
    """Model of the hub, ORG/NAME, to copy the folder to; a new one is private."""
    json: Path | None = None
    """File for the results; the outputs of beam search are written next to it."""
    program: str | None = setting(None, flag="marian", program=True)
    """Program to compare with --to marian; default: marian or pymarian in PATH."""
    device: str | None = None
    """cpu, cuda or cuda:N; default: cuda if there is one."""

    def __post_init__(self) -> None:
        if self.program is not None and self.to != "marian":
            raise UserError("marian names a program for --to marian: pass both, or leave it out")
        if self.push is not None and not is_hub_name(self.push):
            raise UserError(f"push {self.push} is no name of the hub: pass ORG/NAME")
        if self.reference is not None and self.source is None:
            raise UserError("reference needs source: pass --src, or leave --ref out")
        if self.quantization is not None and self.to != "ctranslate2":
            raise UserError(
                f"quantization {self.quantization} is for CTranslate2: pass --to ctranslate2, or leave it out"
            )


class Peer(Protocol):
    """A model as another program has it. Its token ids are ours."""

    def reads(self, text: str) -> bool:
        """Return whether its tokenizer takes a text as it is; the folder's card says what it does not."""

    def encode(self, lines: Sequence[str]) -> list[list[int]]:
        """Encode lines to the ids that the model reads, `</s>` last."""

    def decode(self, ids: Sequence[Sequence[int]]) -> list[str]:
        """Decode ids without special tokens."""

    def log_probabilities(self, pairs: Sequence[IdPair]) -> list[list[float]]:
        """Compute the natural logarithms of the probabilities of each pair's target tokens, `</s>` last."""

    def greedy(self, sources: Sequence[list[int]], longest: int) -> list[list[int]]:
        """Search greedily in one batch; return at most `longest` ids per source, without `</s>`."""


class Exported(Peer, Protocol):
    """An exported model."""

    precision: str
    """Type of its arithmetic, such as `float32`."""

    def translate(self, lines: Sequence[str]) -> list[str]:
        """Translate a batch with the beam search that the folder's card describes."""


def require_library(name: str) -> None:
    """Raise a UserError if a library of the extra `export` is not installed."""
    if find_spec(name) is None:
        raise UserError(f"{name} is not installed: in the clone, pip install -e '.[export]'")


def longest_output(max_positions: int) -> int:
    """Return the most tokens per output; `<s>` takes one position."""
    return min(max_positions - 1, _LONGEST_OUTPUT)


def in_batches(
    work: Callable[[list[Row]], Sequence[Result]],
    rows: Sequence[Row],
    lengths: Sequence[int],
    *,
    tokens: int = _TOKENS,
    done: Callable[[int], object] = lambda rows: None,
) -> list[Result]:
    """Compute a result per row, in batches of similar length, longest first.

    Args:
        tokens: most tokens of a batch, padded; a longer row is a batch of its own.
        done: called with the number of rows of each batch.
    """
    found: dict[int, Result] = {}
    order = sorted(range(len(rows)), key=lambda i: -lengths[i])
    while order:
        size = min(SENTENCES, max(1, tokens // max(1, lengths[order[0]])))
        places, order = order[:size], order[size:]
        found.update(zip(places, work([rows[i] for i in places]), strict=True))
        done(len(places))
    return [found[i] for i in range(len(rows))]
