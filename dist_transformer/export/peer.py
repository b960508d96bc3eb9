"""Interface of a model that another program loads, for the checks."""

from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from typing import Protocol

import numpy as np

from dist_transformer.base.errors import UserError

LENGTH_PENALTY = 0.5
"""α of the libraries' beam searches, which divide by length^α; ours divides by ((5 + length) / 6)^0.6. For lengths of
10 to 100, its ratios are those of an α of 0.4 to 0.57."""
# Sentences per batch of a library, and their tokens, padded.
SENTENCES = 64
_TOKENS = 16_384

IdPair = tuple[list[int], list[int]]
"""Source and target, without special tokens."""


class Peer(Protocol):
    """A model as another program has it. Its token ids are ours."""

    @property
    def precision(self) -> str:
        """Type of its arithmetic, such as `float32`."""

    def reads(self, text: str) -> bool:
        """Return whether its tokenizer takes a text as it is; the folder's card says what it does not."""

    def encode(self, lines: Sequence[str]) -> list[list[int]]:
        """Encode lines to the ids that the model reads, `</s>` last."""

    def decode(self, ids: Sequence[Sequence[int]]) -> list[str]:
        """Decode ids without special tokens."""

    def log_probabilities(self, pairs: Sequence[IdPair]) -> list[np.ndarray]:
        """Compute the natural logarithms of the probabilities of each pair's target tokens, `</s>` last."""

    def greedy(self, sources: Sequence[list[int]], longest: int) -> list[list[int]]:
        """Search greedily; return at most `longest` ids per source, without `</s>`."""


class Exported(Peer, Protocol):
    """An exported model."""

    def translate(self, lines: Sequence[str]) -> list[str]:
        """Translate with the beam search that the folder's card describes."""


def require_library(name: str) -> None:
    """Raise a UserError if a library of the extra `export` is not installed."""
    if find_spec(name) is None:
        raise UserError(f"{name} is not installed: in the clone, pip install -e '.[export]'")


def in_batches(lengths: Sequence[int], tokens: int = _TOKENS) -> Iterator[list[int]]:
    """Yield the indices of sentences in batches of similar length, longest first.

    Args:
        tokens: most tokens of a batch, padded; a longer sentence is a batch of its own.
    """
    order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    while order:
        size = min(SENTENCES, max(1, tokens // max(1, lengths[order[0]])))
        yield order[:size]
        order = order[size:]
