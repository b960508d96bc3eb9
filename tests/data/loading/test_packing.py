"""Packing keeps its promises, and its compiled form does the same. Budgets are tested through the plan too."""

import shutil

import numpy as np
import pytest

from dist_transformer.data.loading import packing
from dist_transformer.data.loading.packing import POOL, Budgets, compiled_loops, pack_queue

BUDGETS = Budgets(max_source_tokens=256, max_target_tokens=256, max_sentences=64)


def realistic(pairs: int, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    target = rng.lognormal(mean=2.5, sigma=0.5, size=pairs)
    ratio = rng.lognormal(mean=0.0, sigma=0.15, size=pairs)
    return np.stack([np.clip(np.rint(side), 2, 120) for side in (target * ratio, target)], axis=1).astype(np.int64)


def packs_of(sizes: np.ndarray, budgets: Budgets, *, is_last: bool) -> tuple[list[np.ndarray], np.ndarray]:
    found, left = pack_queue(sizes, budgets, is_last=is_last)
    assert len(found.pair_ids) == (found.stops[-1] if len(found.stops) else 0)
    packs = np.split(found.pair_ids, found.stops[:-1]) if len(found.stops) else []
    for side, tokens in enumerate((found.source_tokens, found.target_tokens)):
        assert tokens.tolist() == [sizes[rows, side].sum() for rows in packs]
    return packs, left


def as_lists(sizes: np.ndarray, budgets: Budgets, *, is_last: bool) -> list[list[int]]:
    packs, left = packs_of(sizes, budgets, is_last=is_last)
    return [*(rows.tolist() for rows in packs), left.tolist()]


@pytest.mark.parametrize("is_last", [False, True])
@pytest.mark.parametrize("pairs", [0, 1, 63, 64, 65, 700, 40_000])
def test_every_row_is_packed_once_or_left(pairs: int, is_last: bool) -> None:
    sizes = realistic(pairs)
    packs, left = packs_of(sizes, BUDGETS, is_last=is_last)
    assert sorted(np.concatenate([left, *packs]).tolist()) == list(range(pairs))
    assert left.tolist() == sorted(left.tolist())
    assert all((sizes[rows].sum(axis=0) <= BUDGETS.tokens).all() and 0 < len(rows) <= 64 for rows in packs)
    if is_last:
        assert len(left) == 0
    else:
        # A pack and what it may be chosen from.
        assert len(left) < BUDGETS.max_sentences + POOL


def test_packs_follow_the_queue() -> None:
    """A pair at the front of the queue is not packed late: it waits for 64 packs at most."""
    sizes = realistic(4000)
    packs, _ = packs_of(sizes, BUDGETS, is_last=True)
    pack_of = np.empty(len(sizes), dtype=int)
    for number, rows in enumerate(packs):
        pack_of[rows] = number
    # When the last of the pairs before it was packed, and its own pack.
    assert (np.maximum.accumulate(pack_of) - pack_of).max() <= POOL
    due = np.arange(len(sizes)) * len(packs) / len(sizes)
    assert (pack_of - due).max() <= POOL


def test_the_pair_that_evens_the_budgets_completes_a_pack() -> None:
    """Computed by hand: the oldest pair leaves 20 source and 10 target tokens; (12, 2) evens them best."""
    sizes = np.array([(80, 90), (15, 9), (9, 9), (12, 2), (6, 6)])
    budgets = Budgets(max_source_tokens=100, max_target_tokens=100, max_sentences=9)
    packs, left = packs_of(sizes, budgets, is_last=True)
    # (12, 2) leaves 8 and 8: (6, 6) then leaves 2 and 2. The second pack begins with the next of the pool.
    assert [rows.tolist() for rows in packs] == [[0, 3, 4], [1, 2]]
    assert len(left) == 0


def test_a_pair_that_fills_the_budgets_comes_before_one_that_evens_them() -> None:
    """Computed by hand: 20 and 20 are left. (10, 10) is even and leaves 10; (18, 17) is not, and leaves 2 and 3."""
    sizes = np.array([(80, 80), (10, 10), (18, 17)])
    budgets = Budgets(max_source_tokens=100, max_target_tokens=100, max_sentences=9)
    packs, _ = packs_of(sizes, budgets, is_last=True)
    assert [rows.tolist() for rows in packs] == [[0, 2], [1]]


@pytest.mark.parametrize("is_last", [False, True])
@pytest.mark.parametrize("budgets", [(256, 256, 64), (120, 120, 3), (2900, 3136, 392), (2**30, 2**40, 2**40)])
def test_compiled_packs_are_the_same(
    budgets: tuple[int, int, int], is_last: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if shutil.which("g++") is None:
        pytest.skip("no compiler")
    sizes, limits = realistic(3000, seed=1), Budgets(**dict(zip(Budgets.__slots__, budgets, strict=True)))
    in_python = as_lists(sizes, limits, is_last=is_last)
    monkeypatch.setattr(packing, "_WORTH_COMPILING", 0)
    # Otherwise this would compare Python with itself.
    assert compiled_loops() is not None
    assert as_lists(sizes, limits, is_last=is_last) == in_python


def test_without_a_compiler_packs_are_made_in_python(monkeypatch: pytest.MonkeyPatch) -> None:
    """A queue that is long enough for the compiled loop."""
    monkeypatch.setattr(packing, "_WORTH_COMPILING", 0)
    sizes, limits = realistic(500, seed=1), Budgets(max_source_tokens=256, max_target_tokens=256, max_sentences=64)
    wanted = as_lists(sizes, limits, is_last=True)
    monkeypatch.setattr(packing, "compiled_loops", lambda: None)
    assert as_lists(sizes, limits, is_last=True) == wanted
