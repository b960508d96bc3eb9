"""A plan without shards that cannot be read, and its records of epochs that end."""

import itertools
import json
from collections.abc import Mapping
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from dist_transformer.base.errors import UserError
from dist_transformer.data.loading.mixture import Mixture, position_from_json
from dist_transformer.data.loading.packing import Budgets, EpochSummary, LeftOut, Totals
from dist_transformer.data.loading.plan import Plan, Position, Step, Window

SHARDS, PAIRS, WINDOW_SHARDS = 7, 160, 3
BUDGETS = Budgets(max_source_tokens=240, max_target_tokens=200, max_sentences=36)
# Pairs of 1 to 20 tokens a side; three in shard 0 are longer than any pack.
LENGTHS = np.random.default_rng(5).integers(1, 21, size=(SHARDS * PAIRS, 2)).astype(np.uint16)
LENGTHS[[3, 10, 11]] = 999
STARTS = np.arange(0, SHARDS * PAIRS + 1, PAIRS)
FITTING = {pair for pair in range(len(LENGTHS)) if pair not in (3, 10, 11)}


class Store:
    """Shards that go bad; records what the plan asks for."""

    def __init__(self) -> None:
        self.bad: set[int] = set()
        self.asked: list[Window] = []

    def admit(self, window: Window) -> Mapping[int, int]:
        self.asked.append(window)
        return dict.fromkeys(self.bad & {*window.shards}, window.packs_consumed)


def plan(admit: Any = lambda _: {}, budgets: Budgets = BUDGETS) -> Plan:
    return Plan(LENGTHS, STARTS, budgets=budgets, window_shards=WINDOW_SHARDS, seed=2, admit=admit)


def replay(records: list[LeftOut]) -> Plan:
    """Leaves out what is recorded, all of it known from the start of each window."""

    def admit(window: Window) -> Mapping[int, int]:
        mine = [r for r in records if (r.epoch, r.window) == (window.epoch, window.number)]
        return {record.shard: record.packs for record in mine}

    return plan(admit)


def through_json(position: Any) -> Any:
    return position_from_json(json.loads(json.dumps(position.to_json())))


def contents(steps: list[Step]) -> list[Any]:
    """All that a ledger or a checkpoint holds of steps."""
    return [
        (step.epoch, [None if p is None else p.pair_ids.tolist() for p in step.packs], step.position.to_json())
        for step in steps
    ]


def pairs_of(steps: list[Step], epoch: int) -> list[int]:
    return [int(i) for step in steps if step.epoch == epoch for pack in step.packs if pack for i in pack.pair_ids]


def shard_of(pair: int) -> int:
    return pair // PAIRS


def test_a_bad_shard_is_missing_from_its_epoch_and_nothing_else_is() -> None:
    store = Store()
    store.bad = {4}
    steps = list(itertools.islice(plan(store.admit).steps(Position(), 2), 40))
    assert sorted(pairs_of(steps, 0)) == sorted(pair for pair in FITTING if shard_of(pair) != 4)
    (record,) = [event for step in steps for event in step.left_out if event.epoch == 0]
    first = next(window for window in store.asked if 4 in window.shards)
    assert record == LeftOut(corpus=0, shard=4, epoch=0, window=first.number, packs=0)
    said_at = next(i for i, step in enumerate(steps) if step.left_out)
    before = contents(list(itertools.islice(plan().steps(Position(), 2), said_at)))
    assert contents(steps[:said_at]) == before


@settings(max_examples=8, deadline=None)
@given(
    stops=st.lists(st.tuples(st.integers(1, 20), st.sets(st.integers(0, SHARDS - 1), max_size=2)), max_size=3),
    packs_per_step=st.integers(1, 3),
)
def test_shards_that_go_bad_between_resumptions(stops: list[tuple[int, set[int]]], packs_per_step: int) -> None:
    """Earlier steps stay, no pair comes twice, none of a bad shard comes again, and the records give the same plan."""
    store, steps, position = Store(), [], Position()
    for count, bad in [*stops, (30, set())]:
        more = list(itertools.islice(plan(store.admit).steps(position, packs_per_step), count))
        used = {shard_of(int(i)) for step in more for pack in step.packs if pack for i in pack.pair_ids}
        assert not used & store.bad
        steps += more
        position = through_json(steps[-1].position)
        # Never all of them: what is left must make an epoch.
        store.bad = (store.bad | bad) - {6}
    last = steps[-1].epoch
    for epoch in range(last + 1):
        pairs = pairs_of(steps, epoch)
        assert len(pairs) == len(set(pairs))
        gone = {event.shard for step in steps for event in step.left_out if event.epoch == epoch}
        if epoch < last:
            assert {pair for pair in FITTING if shard_of(pair) not in gone} <= {*pairs} <= FITTING
    records = [event for step in steps for event in step.left_out]
    again = list(itertools.islice(replay(records).steps(Position(), packs_per_step), len(steps)))
    assert contents(again) == contents(steps)
    assert [step.left_out for step in again] == [step.left_out for step in steps]


def test_a_shard_goes_bad_inside_its_window() -> None:
    """Every shard of the window in turn, after its third pack, by what must hold."""
    sound = list(itertools.islice(plan().steps(Position(), 1), 80))
    first_window = [step for step in sound if step.position.epoch == 0 and step.position.window == 0]
    shards = {shard_of(i) for i in pairs_of(first_window, 0)}
    assert len(shards) == WINDOW_SHARDS
    for shard in shards:
        store = Store()
        store.bad = {shard}
        rest = list(itertools.islice(plan(store.admit).steps(through_json(sound[2].position), 1), 70))
        assert rest[0].left_out == (LeftOut(corpus=0, shard=shard, epoch=0, window=0, packs=3),)
        used = pairs_of(sound[:3], 0)
        wanted = {pair for pair in FITTING if shard_of(pair) != shard} - {*used}
        assert sorted(pairs_of(rest, 0)) == sorted(wanted)


def test_pairs_that_were_carried_over_go_with_their_shard() -> None:
    """The shard's window is past; what it left for the next one cannot be read any more."""
    sound = list(itertools.islice(plan().steps(Position(), 1), 80))
    at = next(i for i, step in enumerate(sound) if step.position.carry_over)
    position = sound[at - 1].position
    assert position.window == 0
    store = Store()
    store.bad = {shard_of(sound[at].position.carry_over[0])}
    rest = list(itertools.islice(plan(store.admit).steps(through_json(position), 1), 70))
    assert not store.bad & {shard_of(pair) for pair in pairs_of(rest, 0)}
    # The last pack of the window was past, so the shard is missing first where its pairs were carried to.
    assert {event.shard for step in rest for event in step.left_out if event.epoch == 0} == store.bad
    second = next(window for window in store.asked if window.number == 1)
    assert {shard_of(pair) for pair in sound[at].position.carry_over} - store.bad <= {*second.shards}


def test_a_corpus_that_cannot_be_read_at_all_ends_in_words() -> None:
    """Not in an endless loop over empty epochs."""
    store = Store()
    store.bad = {*range(SHARDS)}
    with pytest.raises(UserError, match=r"epoch 1 has no sentence pair, because every shard of data folder 1 was left"):
        next(plan(store.admit).steps(Position(), 2))


def summaries(steps: list[Step]) -> list[tuple[int, EpochSummary]]:
    return [(number, summary) for number, step in enumerate(steps) for summary in step.ended]


@pytest.mark.parametrize("packs_per_step", [1, 2, 5])
def test_an_epoch_is_summed_up_by_its_last_step(packs_per_step: int) -> None:
    """Sums over the lengths, apart from the plan."""
    steps = list(itertools.islice(plan().steps(Position(), packs_per_step), 250 // packs_per_step))
    found = summaries(steps)
    assert len(found) >= 2
    source, target = LENGTHS[sorted(FITTING)].astype(int).sum(axis=0).tolist()
    for epoch, (number, summary) in enumerate(found):
        packs = sum(pack is not None for step in steps if step.epoch == epoch for pack in step.packs)
        assert summary.totals == Totals(packs=packs, pairs=1117, source_tokens=source, target_tokens=target)
        assert (summary.corpus, summary.epoch, summary.unfit_pairs, summary.left_out_pairs) == (0, epoch, 3, 0)
        assert summary.source_fill == source / (240 * packs)
        assert summary.target_fill == target / (200 * packs)
        assert summary.fill == (source + target) / (440 * packs)
        assert steps[number].epoch == epoch
        assert steps[number].position == Position(epoch=epoch + 1)
        assert steps[number + 1].epoch == epoch + 1


def test_a_resumed_epoch_is_summed_up_whole_and_once() -> None:
    through = list(itertools.islice(plan().steps(Position(), 2), 50))
    for done in range(1, 45, 9):
        position = through_json(through[done - 1].position)
        assert position.totals == through[done - 1].position.totals
        resumed = list(itertools.islice(plan().steps(position, 2), 50 - done))
        assert summaries([*through[:done], *resumed]) == summaries(through)


def test_a_summary_counts_what_was_left_out() -> None:
    store = Store()
    store.bad = {0}
    steps = list(itertools.islice(plan(store.admit).steps(Position(), 2), 60))
    summary = summaries(steps)[0][1]
    # Shard 0 has 160 pairs, three of them too long.
    assert (summary.unfit_pairs, summary.left_out_pairs, summary.totals.pairs) == (3, 157, 960)


def test_an_epoch_whose_last_window_cannot_be_read_is_summed_up_too() -> None:
    """Its last pack was not known to be the last: the next step shows it.

    A window has more packs than a pair may wait for, so the last one gets no pairs of the first.
    """
    small = Budgets(max_source_tokens=60, max_target_tokens=50, max_sentences=9)
    through = list(itertools.islice(plan(budgets=small).steps(Position(), 1), 300))
    windows = {step.position.window for step in through}
    last = max(windows)
    order = np.random.default_rng([2, 0]).permutation(SHARDS)
    store = Store()
    store.bad = {*order[last * WINDOW_SHARDS :].tolist()}
    begins = next(i for i, step in enumerate(through) if step.position.window == last and step.epoch == 0)
    carried = through[begins].position.carry_over
    store.bad |= {shard_of(pair) for pair in carried}
    position = through_json(through[begins - 1].position)
    steps = list(itertools.islice(plan(store.admit, small).steps(position, 1), 5))
    (found,) = summaries(steps)
    assert found[0] == 0
    assert found[1].epoch == 0
    assert steps[0].epoch == 1
    assert found[1].totals.pairs + found[1].left_out_pairs == 1117


def test_an_epoch_that_was_begun_without_counting_is_not_summed_up() -> None:
    """Rather than wrongly."""
    values = next(plan().steps(Position(), 2)).position.to_json()
    del values["totals"]
    steps = list(itertools.islice(plan().steps(Position.from_json(values), 2), 60))
    assert summaries(steps)[0][1].epoch == 1


def test_each_corpus_of_a_mixture_has_its_own_epochs() -> None:
    plans = [
        Plan(LENGTHS[:size], np.array([0, size]), budgets=BUDGETS, window_shards=1, seed=2, corpus=number)
        for number, size in enumerate((400, 160))
    ]
    mixture = Mixture(plans, (0.5, 0.5))
    through = list(itertools.islice(mixture.steps(mixture.start(), 3), 60))
    found = summaries(through)
    assert {summary.corpus for _, summary in found} == {0, 1}
    for corpus, pairs in ((0, 397), (1, 157)):
        own = [summary for _, summary in found if summary.corpus == corpus]
        assert [summary.epoch for summary in own] == list(range(len(own)))
        assert {summary.totals.pairs for summary in own} == {pairs}
    # The smaller one comes round more often.
    assert found[0][1].corpus == 1
    again = list(itertools.islice(mixture.steps(through_json(through[20].position), 3), 39))
    assert summaries(again) == [(number - 21, summary) for number, summary in found if number > 20]


def test_a_position_of_another_rule_is_refused() -> None:
    with pytest.raises(UserError, match="packs sentences in another order: finish the run with that version"):
        Position.from_json({**Position().to_json(), "rule": 1})


def test_the_json_of_a_position() -> None:
    assert json.loads(json.dumps(Position().to_json())) == {
        "rule": 3,
        "epoch": 0,
        "window": 0,
        "packs_consumed": 0,
        "carry_over": [],
        "left_out": [],
        "totals": {"packs": 0, "pairs": 0, "source_tokens": 0, "target_tokens": 0},
    }
