"""Batches of sentences for decoding: of similar length, longest first, so that a lack of memory shows early.

On a CPU all sentences of a batch begin together, and its steps get smaller as sentences end. On CUDA a step is launched
as a graph of fixed shapes. A batch then has more sentences than slots, and when a sentence ends, the next one takes its
slot.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

# A short sentence costs as much as this many tokens: its beams have logits and caches too.
_LEAST_COST = 8
# Lengths up to the same power of 2 share a graph, so that there are few graphs. Below this length, the rest of a step
# costs more than attention.
_LEAST_ROOM = 32
# Sentences per slot in a batch. More would leave fewer batches to share among ranks; fewer would leave slots idle more
# often, because slots are idle at the end of each batch.
_SENTENCES_OF_A_SLOT = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    places: list[int]
    """Places of its sentences in the input."""
    slots: int | None = None
    """Sentences that are decoded at a time; None: all of them."""


def make_batches(
    places: Sequence[int], lengths: Sequence[int], *, beam_size: int, max_tokens: int, refills: bool
) -> list[Batch]:
    """Form batches of the sentences at `places`. The batches do not depend on the order of `places`.

    Args:
        lengths: tokens of all sentences of the input, with `</s>`.
        max_tokens: padded tokens of the sentences that are decoded at a time, times beam size. A longer sentence is
            decoded alone.
        refills: whether the next sentence takes the slot of one that ended.
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
    """Cut into as few batches as possible, of even cost: a small rest would take as many steps as a full batch."""
    fewest = len(_cut(costs, budget))
    even = sum(costs) / max(1, fewest)
    while even < budget and len(_cut(costs, even)) > fewest:
        even *= 1.02
    return _cut(costs, min(even, budget))


def _cut(costs: Sequence[int], budget: float) -> list[slice]:
    """Cut a list of falling costs so that highest cost times size of each part is within the budget.

    A part of one sentence may exceed the budget.
    """
    cuts, start = [], 0
    while start < len(costs):
        stop = start + max(1, int(budget // costs[start]))
        cuts.append(slice(start, stop))
        start = stop
    return cuts
