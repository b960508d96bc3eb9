"""Packing: a queue of sentence pairs to packs whose source and target budgets are both full.

A pack takes pairs in the order of the queue up to 95% of its budgets. A look-ahead of 64 then completes it: always by
the pair that leaves both budgets equally full. What was passed over is first in the next pack.

Long queues are cut into lanes of equal length that are packed side by side, one numpy operation for all of them:
0.09 ms a pack in 50 lanes, 1.1 ms in one.
"""

from dataclasses import dataclass

import numpy as np

# Pairs that may complete a pack; more than 99% of budgets of 4096 is then text.
LOOK_AHEAD = 64
# Share of the budgets that is filled in order, without choosing.
_BULK_SHARE = 0.95
# A lane leaves about one pack that the next lane, or the next window, completes.
_PACKS_PER_LANE = 16
_MAX_LANES = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class Budgets:
    """What fits a pack; tokens include `<s>` and `</s>`."""

    max_source_tokens: int
    max_target_tokens: int
    max_sentences: int

    @property
    def tokens(self) -> np.ndarray:
        """Source and target tokens."""
        return np.array([self.max_source_tokens, self.max_target_tokens])


def pack_queue(sizes: np.ndarray, budgets: Budgets, *, is_last: bool) -> tuple[list[np.ndarray], np.ndarray]:
    """Pack a queue of pairs, none of which is above the budgets.

    Args:
        sizes: (pairs, 2), source and target tokens in the order of the queue.
        is_last: nothing follows, so the last packs are as full as may be. Otherwise pairs are left for those to come.

    Returns:
        the packs, as rows of the queue, and the rows that are left, in their order.
    """
    rows = np.arange(len(sizes))
    packs: list[np.ndarray] = []
    full = int((sizes.sum(axis=0) / budgets.tokens).max())
    lanes = min(_MAX_LANES, full // _PACKS_PER_LANE)
    if lanes > 1:
        packs, rows = _Lanes(np.array_split(rows, lanes), sizes, budgets).pack(is_last=False)
    more, rows = _Lanes([rows], sizes, budgets).pack(is_last=is_last)
    return packs + more, rows


class _Lanes:
    """Queues that are packed side by side. Row numbers rise along a lane; the row after the last one fits nowhere."""

    def __init__(self, lanes: list[np.ndarray], sizes: np.ndarray, budgets: Budgets) -> None:
        self.limits, self.max_sentences = budgets.tokens, budgets.max_sentences
        self.nothing = len(sizes)
        self.sizes = np.concatenate([sizes, [self.limits + 1]])
        self.tilts = self._tilt(self.sizes)
        self.width = max(self.max_sentences, LOOK_AHEAD)
        counts = np.array([len(rows) for rows in lanes])
        self.queues = np.full((len(lanes), counts.max() + self.width + LOOK_AHEAD), self.nothing)
        for lane, rows in enumerate(lanes):
            self.queues[lane, : len(rows)] = rows
        self.counts, self.heads = counts, np.zeros(len(lanes), dtype=np.int64)

    def pack(self, *, is_last: bool) -> tuple[list[np.ndarray], np.ndarray]:
        """Packs, one of each lane in turn, and the rows that are left, lane by lane."""
        packs: list[np.ndarray] = []
        going = np.flatnonzero(self.counts > 0)
        while len(going):
            bulk, room = self._fill_in_order(going)
            picks, pool, ends = self._complete(going, bulk, room)
            # A lane that looked beyond its end waits for more pairs to choose from.
            done = np.ones(len(going), dtype=bool) if is_last else ends < self.counts[going]
            for i in np.flatnonzero(done):
                lane, head = going[i], self.heads[going[i]]
                chosen = picks[i][picks[i] != self.nothing]
                packs.append(np.concatenate([self.queues[lane, head : head + bulk[i]], chosen]))
            self._drop_packed(going[done], pool[done], ends[done])
            going = going[done]
            going = going[self.heads[going] < self.counts[going]]
        left = [queue[head:count] for queue, head, count in zip(self.queues, self.heads, self.counts, strict=True)]
        return packs, np.concatenate(left)

    def _fill_in_order(self, going: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """How many rows from its head each lane takes, and the tokens that its pack then has room for."""
        window = self.heads[going, None] + np.arange(self.max_sentences)
        sums = np.cumsum(self.sizes[self.queues[going[:, None], window]], axis=1)
        # The first pair always goes in: a pair as long as the budget is a pack of its own, and none waits forever.
        bulk = np.maximum(1, (sums <= self.limits * _BULK_SHARE).all(axis=2).sum(axis=1))
        return bulk, self.limits - sums[np.arange(len(going)), bulk - 1]

    def _tilt(self, tokens: np.ndarray) -> np.ndarray:
        """By how much more of the source budget than of the target budget are `tokens`."""
        return tokens[..., 0] / self.limits[0] - tokens[..., 1] / self.limits[1]

    def _complete(
        self, going: np.ndarray, bulk: np.ndarray, room: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Rows picked from the look-ahead (lane, pick), the look-ahead then, and the first row beyond it."""
        first = self.heads[going] + bulk
        pool = self.queues[going[:, None], first[:, None] + np.arange(LOOK_AHEAD)]
        source, target, tilts = self.sizes[pool, 0], self.sizes[pool, 1], self.tilts[pool]
        ends = np.minimum(first + LOOK_AHEAD, self.counts[going])
        places = self.max_sentences - bulk
        picks: list[np.ndarray] = []
        while True:
            fits = (source <= room[:, :1]) & (target <= room[:, 1:])
            # What stays is even when the pair tilts as the room does.
            costs = np.where(fits, np.abs(tilts - self._tilt(room)[:, None]), np.inf)
            best = costs.argmin(axis=1)
            can = (costs[np.arange(len(going)), best] < np.inf) & (places > len(picks))
            if not can.any():
                break
            lanes, best = np.flatnonzero(can), best[can]
            chosen = pool[lanes, best]
            picks.append(np.full(len(going), self.nothing))
            picks[-1][lanes] = chosen
            room[lanes] -= self.sizes[chosen]
            following = self.queues[going[lanes], ends[lanes]]
            ends[lanes] += following != self.nothing
            pool[lanes, best] = following
            source[lanes, best], target[lanes, best] = self.sizes[following].T
            tilts[lanes, best] = self.tilts[following]
        return np.array(picks, dtype=np.int64).reshape(len(picks), len(going)).T, pool, ends

    def _drop_packed(self, lanes: np.ndarray, pool: np.ndarray, ends: np.ndarray) -> None:
        """Passed-over rows move up to the lanes' new heads, in their order."""
        self.heads[lanes] = ends - (pool != self.nothing).sum(axis=1)
        self.queues[lanes[:, None], self.heads[lanes, None] + np.arange(LOOK_AHEAD)] = np.sort(pool, axis=1)
