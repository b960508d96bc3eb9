import random

import pytest

from dist_transformer.inference.batches import Batch, make_batches


def batch_lengths(lengths: list[int], budget: int, *, refills: bool = False) -> list[Batch]:
    return make_batches(range(len(lengths)), lengths, beam_size=4, max_tokens=budget, refills=refills)


@pytest.fixture
def lengths() -> list[int]:
    rng = random.Random(1)
    return [rng.randint(8, 60) for _ in range(300)]


@pytest.mark.parametrize("refills", [False, True])
def test_each_sentence_is_in_one_batch_longest_first(lengths: list[int], refills: bool) -> None:
    batches = batch_lengths(lengths, 600, refills=refills)
    places = [i for batch in batches for i in batch.places]
    assert places == sorted(range(300), key=lambda i: (-lengths[i], i))
    shuffled = random.Random(2).sample(range(300), 300)
    assert make_batches(shuffled, lengths, beam_size=4, max_tokens=600, refills=refills) == batches
    assert make_batches([], lengths, beam_size=4, max_tokens=600, refills=refills) == []


def test_batches_fit_the_budget(lengths: list[int]) -> None:
    batches = batch_lengths(lengths, 600)
    padded = [max(lengths[i] for i in batch.places) * len(batch.places) * 4 for batch in batches]
    assert 300 < max(padded) <= 600
    # As few as if each took all that fits.
    left, fewest = sorted(lengths, reverse=True), 0
    while left:
        left, fewest = left[600 // (4 * left[0]) :], fewest + 1
    assert len(batches) == fewest
    assert all(len(batch.places) == 1 for batch in batch_lengths(lengths, 1))


def test_no_batch_is_left_with_a_few_sentences() -> None:
    """Four beams of 11 tokens are 44: six sentences fit 300, and eight are 4 and 4, not 6 and 2."""
    assert [len(batch.places) for batch in batch_lengths([11] * 8, 300)] == [4, 4]
    assert [len(batch.places) for batch in batch_lengths([11] * 6, 300)] == [6]


def test_slots_are_as_many_as_have_room_for_the_longest_of_a_kind() -> None:
    """At 4 beams 2,048 tokens are 4 sentences of up to 128, 8 of up to 64, 16 of up to 32; a slot gets 8 at most."""
    lengths = [65] * 3 + [64] * 100 + [33] * 2 + [32] * 5 + [1]
    batches = batch_lengths(lengths, 2048, refills=True)
    assert [(len(batch.places), batch.slots) for batch in batches] == [(3, 4), (64, 8), (38, 8), (6, 16)]
    assert [batch.slots for batch in batch_lengths([100, 3], 1, refills=True)] == [1, 1]
