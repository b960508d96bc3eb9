"""Lanes: what packing side by side must not change. Budgets and order are tested through the plan too."""

import numpy as np
import pytest

from dist_transformer.data.loading.packing import LOOK_AHEAD, Budgets, pack_queue

BUDGETS = Budgets(max_source_tokens=256, max_target_tokens=256, max_sentences=64)


def realistic(pairs: int, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    target = rng.lognormal(mean=2.5, sigma=0.5, size=pairs)
    ratio = rng.lognormal(mean=0.0, sigma=0.15, size=pairs)
    return np.stack([np.clip(np.rint(side), 2, 120) for side in (target * ratio, target)], axis=1).astype(np.int64)


@pytest.mark.parametrize("is_last", [False, True])
@pytest.mark.parametrize("pairs", [0, 1, 63, 64, 65, 700, 20_000])
def test_every_row_is_packed_once_or_left(pairs: int, is_last: bool) -> None:
    sizes = realistic(pairs)
    packs, left = pack_queue(sizes, BUDGETS, is_last=is_last)
    assert sorted(np.concatenate([left, *packs]).tolist()) == list(range(pairs))
    assert left.tolist() == sorted(left.tolist())
    assert all((sizes[rows].sum(axis=0) <= BUDGETS.tokens).all() and 0 < len(rows) <= 64 for rows in packs)
    if is_last:
        assert len(left) == 0
    else:
        # A pack and what it may be chosen from.
        assert len(left) <= BUDGETS.max_sentences + 2 * LOOK_AHEAD


def test_a_queue_of_many_lanes_is_packed_as_full_as_one_lane() -> None:
    """20,000 pairs fill about 1,000 packs, in 62 lanes; 300 pairs, in one."""
    sizes = realistic(20_000)
    many, _ = pack_queue(sizes, BUDGETS, is_last=True)
    one = [pack_queue(part, BUDGETS, is_last=True)[0] for part in np.array_split(sizes, 70)]
    fill = sizes.sum() / (len(many) * 512)
    assert fill > 0.97
    assert fill >= sizes.sum() / (sum(map(len, one)) * 512)


def test_packs_follow_the_queue() -> None:
    """What stands early in the queue is not packed late: no pair is passed over for ever. One lane."""
    sizes = realistic(400)
    packs, _ = pack_queue(sizes, BUDGETS, is_last=True)
    waited = [number - rows.min() * len(packs) / len(sizes) for number, rows in enumerate(packs)]
    assert max(waited) < 8


def test_the_pair_that_evens_the_budgets_completes_a_pack() -> None:
    """By hand: 95% of 100 is 95. The first pair leaves 20 source and 10 target tokens; (12, 2) evens them best."""
    sizes = np.array([(80, 90), (15, 9), (9, 9), (12, 2), (6, 6)])
    packs, left = pack_queue(
        sizes, Budgets(max_source_tokens=100, max_target_tokens=100, max_sentences=9), is_last=True
    )
    # (12, 2) leaves 8 and 8: then (6, 6) fits, nothing else does.
    assert [rows.tolist() for rows in packs] == [[0, 3, 4], [1, 2]]
    assert len(left) == 0
