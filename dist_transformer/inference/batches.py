"""Which sentences are searched in together: of similar length, longest first, so that what does not fit fails early.

On a CPU a batch begins and ends together, and its steps get smaller as sentences are done. On CUDA a step is launched
as a graph, of fixed shapes, so a batch is many sentences for a number of slots, and the next begins where one is done.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

# A short sentence costs as much as this many tokens: its beams have logits and caches too.
_LEAST_COST = 8
# Lengths up to a power of 2 share a graph, lest there be many; below this one, the rest of a step costs more.
_LEAST_ROOM = 32
# Sentences of a slot, after which another rank may take a batch: at the end of each, slots are idle.
_SENTENCES_OF_A_SLOT = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    places: list[int]
    """Of its sentences in the input."""
    slots: int | None = None
    """Sentences in search at a time; all of them when not given."""


def make_batches(
    places: Sequence[int], lengths: Sequence[int], *, beam_size: int, max_tokens: int, refills: bool
) -> list[Batch]:
    """Batches of the sentences at `places`; in whatever order these come, the batches are the same.

    Args:
        lengths: tokens of all sentences of the input, with `</s>`.
        max_tokens: padded tokens of the sentences in search at a time, times beam size; a sentence that alone has more
            is searched in alone.
        refills: whether the next sentence begins where one is done.
    """
    places = sorted(places, key=lambda i: (-lengths[i], i))
    if not refills:
        costs = [max(lengths[i], _LEAST_COST) * beam_size for i in places]
        return [Batch(places=places[cut]) for cut in _even_cuts(costs, max_tokens)]
    batches = []
    for room, alike in itertools.groupby(places, key=lambda i: max(_LEAST_ROOM, 1 << (lengths[i] - 1).bit_length())):
        slots, members = max(1, max_tokens // (room * beam_size)), list(alike)
        size = _SENTENCES_OF_A_SLOT * slots
        batches += [Batch(places=members[i : i + size], slots=slots) for i in range(0, len(members), size)]
    return batches


def _even_cuts(costs: Sequence[int], budget: int) -> list[slice]:
    """No more than needed, but even ones: a few lines that are left over take as many steps as many do."""
    fewest = len(_cut(costs, budget))
    even = sum(costs) / max(1, fewest)
    while even < budget and len(_cut(costs, even)) > fewest:
        even *= 1.02
    return _cut(costs, min(even, budget))


def _cut(costs: Sequence[int], budget: float) -> list[slice]:
    """Parts of falling costs, in which none times the number of them is above the budget, unless it is alone."""
    cuts, start = [], 0
    while start < len(costs):
        stop = start + max(1, int(budget // costs[start]))
        cuts.append(slice(start, stop))
        start = stop
    return cuts
