"""Sampled segmentations of text into pieces, each a function of its seed.

BPE leaves out merges at random (BPE-dropout, Provilkov et al. 2020). A unigram model draws from its most probable
segmentations (subword regularization, Kudo 2018).
"""

import itertools
import math
from collections.abc import Callable, Sequence
from random import Random
from typing import Literal, TypeVar

Sampling = Literal["dropout", "alpha"]
"""Number that a kind of vocabulary is sampled by: the probability of BPE to leave a merge out, or the exponent of
unigram probabilities."""

N_BEST = 64
"""Segmentations that a unigram model draws from."""

T = TypeVar("T")


def merge(
    symbols: Sequence[str], rank_of: Callable[[str, str], float | None], *, dropout: float, random: Random
) -> list[str]:
    """Merge adjacent symbols as BPE does, always the pair of the lowest rank, the first one among equals.

    Args:
        rank_of: returns the rank of a pair; None if it is not merged.
        dropout: probability with which a pair is left out of a step.
    """
    parts = list(symbols)
    while True:
        best, place = math.inf, -1
        for i, (left, right) in enumerate(itertools.pairwise(parts)):
            rank = rank_of(left, right)
            # Whether a pair is left out matters only if it would be chosen.
            if rank is not None and rank < best and random.random() >= dropout:
                best, place = rank, i
        if place < 0:
            return parts
        parts[place : place + 2] = [parts[place] + parts[place + 1]]


def draw(choices: Sequence[T], log_probabilities: Sequence[float], *, alpha: float, random: Random) -> T:
    """Draw one of the choices with probabilities proportional to those given, raised to the power of `alpha`."""
    most = max(log_probabilities)
    weights = [math.exp(alpha * (value - most)) for value in log_probabilities]
    return random.choices(choices, weights)[0]
