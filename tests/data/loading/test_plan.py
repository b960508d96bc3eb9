import dataclasses
import itertools
import json
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import example, given, settings

from dist_transformer.base.errors import UserError
from dist_transformer.config.settings import BatchConfig
from dist_transformer.data.loading.packing import Budgets, Pack
from dist_transformer.data.loading.plan import Plan, Position, Step, resolve_budgets


@dataclasses.dataclass(frozen=True)
class Corpus:
    """Lengths drawn from a seed, for shards of the given sizes, and how to plan them."""

    shard_sizes: tuple[int, ...]
    """Shards of each segmentation."""
    segmentations: int
    max_source_tokens: int
    max_target_tokens: int
    max_sentences: int
    window_shards: int
    seed: int
    longest: int
    packs_per_step: int

    @property
    def lengths(self) -> np.ndarray:
        size = (self.segmentations * sum(self.shard_sizes), 2)
        return np.random.default_rng(self.seed).integers(1, self.longest + 1, size=size).astype(np.uint16)

    def plan(self, **changes: Any) -> Plan:
        budgets = Budgets(
            max_source_tokens=self.max_source_tokens,
            max_target_tokens=self.max_target_tokens,
            max_sentences=self.max_sentences,
        )
        options = {"budgets": budgets, "window_shards": self.window_shards, "seed": self.seed, **changes}
        options["segmentations"] = self.segmentations
        starts = np.concatenate([[0], np.cumsum(self.shard_sizes * self.segmentations)])
        return Plan(self.lengths, starts, **options)

    def fits(self) -> np.ndarray:
        """Whether each pair fits in all its segmentations."""
        fits = (self.lengths <= [self.max_source_tokens, self.max_target_tokens]).all(axis=1)
        return fits.reshape(self.segmentations, -1).all(axis=0)


corpora = st.builds(
    Corpus,
    # Empty shards and shards of one pair; up to a few hundred pairs, so that windows are both shorter and longer than
    # the pool of 64.
    shard_sizes=st.lists(st.one_of(st.sampled_from([0, 1, 2]), st.integers(0, 150)), min_size=1, max_size=7).map(tuple),
    segmentations=st.integers(1, 3),
    max_source_tokens=st.integers(1, 120),
    max_target_tokens=st.integers(1, 120),
    max_sentences=st.integers(1, 20),
    window_shards=st.integers(1, 4),
    seed=st.integers(0, 2**31),
    longest=st.integers(1, 40),
    packs_per_step=st.integers(1, 5),
).filter(lambda corpus: corpus.fits().any())

HAND_MADE = Corpus(
    shard_sizes=(0, 1, 0, 140, 1, 70),
    segmentations=1,
    max_source_tokens=60,
    max_target_tokens=64,
    max_sentences=9,
    window_shards=2,
    seed=3,
    longest=20,
    packs_per_step=4,
)
quick = settings(max_examples=40, deadline=None)


def epoch(plan: Plan, packs_per_step: int, number: int = 0) -> list[Step]:
    steps = plan.steps(Position(epoch=number), packs_per_step)
    return list(itertools.takewhile(lambda step: step.epoch == number, steps))


def packs_of(steps: list[Step]) -> list[Pack]:
    return [pack for step in steps for pack in step.packs if pack is not None]


def pairs_of(steps: list[Step]) -> list[int]:
    return [int(pair) for pack in packs_of(steps) for pair in pack.pair_ids]


def contents(step: Step) -> tuple[Any, ...]:
    packs = [None if pack is None else pack.pair_ids.tolist() for pack in step.packs]
    return step.epoch, packs, step.position, step.source_tokens, step.target_tokens


@quick
@given(corpora)
@example(HAND_MADE)
def test_every_pair_that_fits_comes_once_in_every_epoch(corpus: Corpus) -> None:
    plan, fitting = corpus.plan(), np.flatnonzero(corpus.fits()).tolist()
    assert plan.skipped == sum(corpus.shard_sizes) - len(fitting)
    for number in range(corpus.segmentations + 1):
        first = number % corpus.segmentations * sum(corpus.shard_sizes)
        assert sorted(pairs_of(epoch(plan, corpus.packs_per_step, number))) == [first + pair for pair in fitting]


@quick
@given(corpora)
@example(HAND_MADE)
def test_no_pack_is_above_a_budget_and_its_counts_are_right(corpus: Corpus) -> None:
    for pack in packs_of(epoch(corpus.plan(), corpus.packs_per_step)):
        assert 1 <= len(pack.pair_ids) <= corpus.max_sentences
        source, target = corpus.lengths[pack.pair_ids].astype(int).sum(axis=0)
        assert (pack.source_tokens, pack.target_tokens) == (source, target)
        assert source <= corpus.max_source_tokens
        assert target <= corpus.max_target_tokens


@quick
@given(corpora)
@example(HAND_MADE)
def test_a_step_has_all_its_packs_but_at_the_end_of_an_epoch(corpus: Corpus) -> None:
    steps = epoch(corpus.plan(), corpus.packs_per_step)
    for step in steps:
        assert len(step.packs) == corpus.packs_per_step
        assert next(iter(step.packs)) is not None
        assert step.source_tokens == sum(pack.source_tokens for pack in step.packs if pack)
        assert step.target_tokens == sum(pack.target_tokens for pack in step.packs if pack)
    assert not any(pack is None for step in steps[:-1] for pack in step.packs)
    last = [pack is None for pack in steps[-1].packs]
    assert last == sorted(last), "packs of weight zero come last"


@pytest.mark.system
@settings(max_examples=15, deadline=None)
@given(corpora.filter(lambda corpus: sum(corpus.shard_sizes) <= 300))
@example(HAND_MADE)
def test_a_new_plan_continues_from_any_step(corpus: Corpus) -> None:
    """Over the end of an epoch too; the position went through JSON."""
    count = min(40, len(epoch(corpus.plan(), corpus.packs_per_step)) + 3)
    through = list(itertools.islice(corpus.plan().steps(Position(), corpus.packs_per_step), count))
    for done, step in enumerate(through, 1):
        position = Position.from_json(json.loads(json.dumps(step.position.to_json())))
        assert position == step.position
        following = itertools.islice(corpus.plan().steps(position, corpus.packs_per_step), count - done)
        assert [contents(step) for step in following] == [contents(step) for step in through[done:]]


def test_windows_hand_pairs_on() -> None:
    """The hand-made corpus has what the resume test must meet: steps inside a window with a carry-over."""
    steps = epoch(HAND_MADE.plan(), HAND_MADE.packs_per_step)
    assert any(step.position.carry_over and step.position.packs_consumed for step in steps)
    assert max(step.position.window for step in steps) == 2


def test_epochs_differ_in_order_and_in_packs() -> None:
    plan = HAND_MADE.plan()
    first, second = (pairs_of(epoch(plan, 4, number)) for number in (0, 1))
    assert sorted(first) == sorted(second)
    assert first != second
    sets = [{frozenset(pack.pair_ids.tolist()) for pack in packs_of(epoch(plan, 4, number))} for number in (0, 1)]
    assert len(sets[0] & sets[1]) < len(sets[0]) / 4


@pytest.mark.parametrize(("seed", "number"), [(3, 1), (4, 0)], ids=["another epoch", "another seed"])
def test_both_the_shards_and_the_pairs_inside_a_window_are_shuffled(seed: int, number: int) -> None:
    one_shard = dataclasses.replace(HAND_MADE, shard_sizes=(200,))
    orders = [pairs_of(epoch(one_shard.plan(seed=s), 4, n)) for s, n in ((3, 0), (seed, number))]
    # Two random orders of 200 agree in about one place.
    assert sum(a == b for a, b in zip(*orders, strict=True)) < 10

    shard_by_shard = dataclasses.replace(HAND_MADE, shard_sizes=(100,) * 8, window_shards=1)
    orders = [pairs_of(epoch(shard_by_shard.plan(seed=s), 4, n)) for s, n in ((3, 0), (seed, number))]
    begun = [list(dict.fromkeys(pair // 100 for pair in order)) for order in orders]
    assert sorted(begun[0]) == sorted(begun[1]) == list(range(8))
    assert begun[0] != begun[1]


def test_an_epoch_mixes_the_shards() -> None:
    """A corpus sorted by domain: every tenth of the epoch has pairs of every shard of the window."""
    corpus = dataclasses.replace(HAND_MADE, shard_sizes=(200,) * 4, window_shards=4, longest=8)
    order = np.array(pairs_of(epoch(corpus.plan(), 4))) // 200
    for tenth in np.array_split(order, 10):
        assert set(tenth.tolist()) == {0, 1, 2, 3}


def test_steps_do_not_depend_on_how_many_packs_a_step_has() -> None:
    """The batch size cuts one sequence of packs."""
    ids = [[pack.pair_ids.tolist() for pack in packs_of(epoch(HAND_MADE.plan(), size))] for size in (1, 2, 7)]
    assert ids[0] == ids[1] == ids[2]


def hand_plan(lengths: list[tuple[int, int]], source: int, target: int, sentences: int) -> Plan:
    budgets = Budgets(max_source_tokens=source, max_target_tokens=target, max_sentences=sentences)
    table = np.array(lengths, dtype=np.uint16).reshape(-1, 2)
    return Plan(table, np.array([0, len(lengths)]), budgets=budgets, window_shards=1, seed=0)


@pytest.mark.parametrize("lengths", [[], [(11, 1)], [(11, 1), (1, 9), (99, 99)]])
def test_a_corpus_of_which_nothing_fits_is_refused(lengths: list[tuple[int, int]]) -> None:
    message = (
        f"none of the {len(lengths)} pairs fits a pack of 10 source and 8 target tokens: "
        "raise --batch.max-target-tokens"
    )
    with pytest.raises(UserError, match=message):
        hand_plan(lengths, source=10, target=8, sentences=9)


def test_a_pair_as_long_as_the_budgets_is_a_pack() -> None:
    plan = hand_plan([(10, 8)] * 3, source=10, target=8, sentences=9)
    assert [pack.pair_ids.size for pack in packs_of(epoch(plan, 1))] == [1, 1, 1]


def test_the_cap_on_sentences_closes_a_pack() -> None:
    plan = hand_plan([(1, 1)] * 7, source=100, target=100, sentences=3)
    assert [pack.pair_ids.size for pack in packs_of(epoch(plan, 1))] == [3, 3, 1]


def test_the_last_step_of_an_epoch_by_hand() -> None:
    """Five packs of one pair, two a step: the third step has one pack, and the position is the next epoch's start."""
    plan = hand_plan([(4, 4)] * 5, source=5, target=5, sentences=9)
    steps = list(itertools.islice(plan.steps(Position(), 2), 4))
    assert [[pack is not None for pack in step.packs] for step in steps] == [[True, True]] * 2 + [
        [True, False],
        [True, True],
    ]
    assert [step.epoch for step in steps] == [0, 0, 0, 1]
    assert [step.target_tokens for step in steps] == [8, 8, 4, 8]
    assert steps[2].position == Position(epoch=1)


@pytest.mark.parametrize(("max_target_tokens", "fill"), [(4096, 0.99), (392, 0.985)])
def test_packs_of_realistic_lengths_are_full(max_target_tokens: int, fill: float) -> None:
    """Both budgets, where the corpus' own ratio resolves the source budget; the tail of the epoch is left out."""
    rng = np.random.default_rng(0)
    target = rng.lognormal(mean=3.1, sigma=0.55, size=30_000)
    ratio = rng.lognormal(mean=np.log(0.9), sigma=0.18, size=30_000)
    lengths = np.stack([np.clip(np.rint(side), 2, 250) for side in (target * ratio, target)], axis=1).astype(np.uint16)
    source_tokens, target_tokens = (int(total) for total in lengths.astype(int).sum(axis=0))
    assert source_tokens / target_tokens == pytest.approx(0.9, abs=0.03)
    batch = BatchConfig(max_target_tokens=max_target_tokens)
    budgets = resolve_budgets(batch, source_tokens=source_tokens, target_tokens=target_tokens)
    plan = Plan(lengths, np.arange(0, 30_001, 5_000), budgets=budgets, window_shards=3, seed=1)
    packs = packs_of(epoch(plan, 1))[:-5]
    assert np.mean([pack.source_tokens for pack in packs]) >= fill * budgets.max_source_tokens
    assert np.mean([pack.target_tokens for pack in packs]) >= fill * budgets.max_target_tokens
    assert max(len(pack.pair_ids) for pack in packs) < budgets.max_sentences


@pytest.mark.parametrize(
    ("batch", "source_tokens", "target_tokens", "expected"),
    [
        # 4096 · 0.9 = 3686.4.
        ({"max_target_tokens": 4096}, 900, 1000, (3687, 4096, 512)),
        ({"max_target_tokens": 4096}, 1000, 1000, (4096, 4096, 512)),
        ({"max_target_tokens": 1000}, 3, 1, (3000, 1000, 125)),
        ({"max_target_tokens": 7}, 1, 1, (7, 7, 1)),
        ({"max_target_tokens": 4096, "max_source_tokens": 100, "max_sentences": 5}, 900, 1000, (100, 4096, 5)),
        # Totals of a large corpus: exact in integers.
        ({"max_target_tokens": 4096}, 4 * 10**15, 4 * 10**15 - 1, (4097, 4096, 512)),
    ],
)
def test_budgets_by_hand(
    batch: dict[str, int], source_tokens: int, target_tokens: int, expected: tuple[int, int, int]
) -> None:
    budgets = resolve_budgets(BatchConfig(**batch), source_tokens=source_tokens, target_tokens=target_tokens)
    assert dataclasses.astuple(budgets) == expected
