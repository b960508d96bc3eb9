"""Mix several corpora in fixed proportions. Each has its own plan and its own epochs.

Every pack is from one corpus. The next pack comes from the corpus that is furthest behind its share of the target
tokens so far. So the proportions hold from the first steps on, and no randomness is involved.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dist_transformer.data.folder.split import Memory, Split
from dist_transformer.data.loading.packing import Events, Packs
from dist_transformer.data.loading.plan import Course, Plan, Position, Step


@dataclass(frozen=True, kw_only=True, slots=True)
class MixturePosition:
    """Progress of each corpus; plain JSON through `to_json` and `from_json`."""

    corpora: tuple[Position, ...]
    target_tokens: tuple[int, ...]
    """Target tokens of each corpus so far."""

    @property
    def epoch(self) -> int:
        """Epoch of the first corpus."""
        return self.corpora[0].epoch

    def to_json(self) -> dict[str, Any]:
        return {"corpora": [place.to_json() for place in self.corpora], "target_tokens": list(self.target_tokens)}

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> "MixturePosition":
        places = tuple(Position.from_json(place) for place in values["corpora"])
        return cls(corpora=places, target_tokens=tuple(values["target_tokens"]))


def position_from_json(values: dict[str, Any]) -> Position | MixturePosition:
    return MixturePosition.from_json(values) if "corpora" in values else Position.from_json(values)


def temperature_shares(tokens: Sequence[int], temperature: float) -> tuple[float, ...]:
    """Return shares ∝ tokens^(1 / temperature): 1 is by size, higher is more even (Arivazhagan et al. 2019)."""
    weights = [(count / max(tokens)) ** (1 / temperature) for count in tokens]
    return tuple(weight / sum(weights) for weight in weights)


class Mixture:
    """Draw steps from several plans, with the interface of a `Plan`.

    Args:
        shares: shares of the target tokens, one per plan; they sum to 1.
    """

    def __init__(self, plans: Sequence[Plan], shares: Sequence[float]) -> None:
        self.plans, self.shares = plans, shares
        self.skipped = sum(plan.skipped for plan in plans)

    def start(self) -> MixturePosition:
        return MixturePosition(corpora=(Position(),) * len(self.plans), target_tokens=(0,) * len(self.plans))

    def steps(self, position: MixturePosition, packs_per_step: int) -> Iterator[Step]:
        """Yield steps without end. No step has a pack of weight zero, because a corpus' next epoch fills it."""
        events = Events()
        courses = [Course(plan, place, events) for plan, place in zip(self.plans, position.corpora, strict=True)]
        tokens = list(position.target_tokens)
        while True:
            parts, missing = [], packs_per_step
            while missing:
                parts.append(self._draw(courses, tokens, missing))
                missing -= len(parts[-1])
            after = MixturePosition(corpora=tuple(course.position for course in courses), target_tokens=tuple(tokens))
            yield Step(epoch=after.epoch, packs=Packs.join(parts), position=after, **events.take())

    def _draw(self, courses: Sequence[Course], tokens: list[int], count: int) -> Packs:
        """Draw up to `count` packs, and count their tokens; fewer if a corpus reaches the end of a window."""
        ahead = [course.target_tokens(count) for course in courses]
        corpora, used = range(len(courses)), [0] * len(courses)
        chosen: list[int] = []
        while len(chosen) < count:
            due = sum(tokens) + 1
            furthest = max(corpora, key=lambda corpus: self.shares[corpus] * due - tokens[corpus])
            if used[furthest] == len(ahead[furthest]):
                break
            tokens[furthest] += ahead[furthest][used[furthest]]
            used[furthest] += 1
            chosen.append(furthest)
        drawn = Packs.join([course.take(packs) for course, packs in zip(courses, used, strict=True)])
        # Sort the packs from the order of corpora to the order of choice.
        return drawn.taken(np.argsort(np.argsort(chosen, kind="stable"), kind="stable"))


class Corpora:
    """Several splits as one: the ids of split k's pairs start at `first_ids[k]`."""

    def __init__(self, splits: Sequence[Split]) -> None:
        self.splits = splits
        self.first_ids = np.cumsum([0, *(split.info.rows for split in splits)])

    @property
    def longest(self) -> tuple[int, int]:
        """Tokens of the longest source and target, each with one special token."""
        source, target = (max(side) for side in zip(*(split.longest for split in self.splits), strict=True))
        return source, target

    def sizes(self, pair_ids: np.ndarray) -> np.ndarray:
        sizes = np.empty((2, len(pair_ids)), dtype=np.int64)
        for number, chosen, ids in self._by_split(pair_ids):
            sizes[:, chosen] = self.splits[number].sizes(ids)
        return sizes

    def copy_tokens(self, pair_ids: np.ndarray, source: np.ndarray, target: np.ndarray, places: np.ndarray) -> None:
        for number, chosen, ids in self._by_split(pair_ids):
            self.splits[number].copy_tokens(ids, source, target, places[:, chosen])

    def copy_links(self, pair_ids: np.ndarray, links: np.ndarray, places: np.ndarray) -> None:
        for number, chosen, ids in self._by_split(pair_ids):
            self.splits[number].copy_links(ids, links, places[chosen])

    def memory(self, pair_ids: np.ndarray) -> Memory:
        parts = [(number, self.splits[number].memory(ids)) for number, _, ids in self._by_split(pair_ids)]
        return Memory.join([memory for _, memory in parts], [int(self.first_ids[number]) for number, _ in parts])

    def forget_past(self) -> None:
        for split in self.splits:
            split.forget_past()

    def _by_split(self, pair_ids: np.ndarray) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
        """Yield the number of each split that has some of the pairs, where they stand, and their ids in the split."""
        numbers = np.searchsorted(self.first_ids, pair_ids, side="right") - 1
        for number in np.unique(numbers).tolist():
            chosen = np.flatnonzero(numbers == number)
            yield number, chosen, pair_ids[chosen] - self.first_ids[number]
