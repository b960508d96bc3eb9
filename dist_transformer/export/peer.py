"""What the gate asks of an exported model, loaded by the library that it was written for."""

from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from typing import Protocol

import numpy as np

from dist_transformer.errors import UserError

# Sentences that a library translates at a time.
SENTENCES = 64

IdPair = tuple[list[int], list[int]]
"""Source and target, without special tokens."""


class Peer(Protocol):
    """An exported model. Ids are ours, which all of its files keep."""

    @property
    def precision(self) -> str:
        """What it computes in, such as `float32`."""

    def encode(self, lines: Sequence[str]) -> list[list[int]]:
        """Ids as the model reads them, `</s>` last."""

    def decode(self, ids: Sequence[Sequence[int]]) -> list[str]:
        """Texts of ids without special tokens."""

    def log_probabilities(self, pairs: Sequence[IdPair]) -> list[np.ndarray]:
        """Natural logarithms of the probabilities of each pair's target tokens, `</s>` last."""

    def greedy(self, sources: Sequence[list[int]], longest: int) -> list[list[int]]:
        """The most probable token, again and again: ids of at most `longest` tokens, without `</s>`."""

    def translate(self, lines: Sequence[str], length_penalty: float) -> list[str]:
        """Beam search as the card of the folder tells its users."""


def require_library(name: str) -> None:
    """Raise a UserError where a library of the extra `export` is not installed."""
    if find_spec(name) is None:
        raise UserError(f"{name} is not installed: pip install 'dist_transformer[export]'")


def in_batches(lengths: Sequence[int], size: int = SENTENCES) -> Iterator[list[int]]:
    """Places of sentences of similar length, longest first."""
    order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    for start in range(0, len(order), size):
        yield order[start : start + size]
