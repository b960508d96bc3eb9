"""Batches of sentences, and the best extensions of their hypotheses against a stable sort of the whole softmax."""

import random
import shutil

import numpy as np
import pytest
import torch
from torch.nn import functional

from dist_transformer.inference import batches as module
from dist_transformer.inference.batches import Batch, best_extensions, largest, make_batches
from dist_transformer.model import cpu_kernels
from dist_transformer.model.transformer import Transformer
from tests.support.tiny import tiny_config

EOS = 3


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


@pytest.mark.parametrize("width", [8, 40, 64 * 40, 64 * 40 + 23])
def test_equal_values_go_by_place(width: int) -> None:
    """Against a stable sort: few distinct values, none equal, and some of -inf; rows of whole blocks and of a rest."""
    rng = np.random.default_rng(0)
    values = torch.from_numpy(rng.integers(-3, 3, (200, width)).astype(np.float32))
    values[::3] += torch.from_numpy(rng.normal(size=(67, width)).astype(np.float32))
    values[::5, ::7] = -torch.inf
    expected = values.sort(dim=1, descending=True, stable=True)
    for rows in (slice(None), slice(0, None, 3)):
        found_values, found_places = largest(values[rows], 8)
        assert torch.equal(found_values, expected.values[rows, :8])
        assert torch.equal(found_places, expected.indices[rows, :8])


def test_the_largest_may_share_a_block_or_lie_in_the_rest() -> None:
    values = torch.zeros(4, 64 * 40 + 5) - torch.rand(4, 64 * 40 + 5)
    values[0, 70:78] = torch.arange(1.0, 9.0)
    values[1, -5:-1] = torch.arange(1.0, 5.0)
    values[2, ::400] = 1.0 + torch.arange(7.0)
    # A later block has the larger maximum, an earlier one the first of equal values.
    values[3, [130, 140, 330, 340]] = torch.tensor([8.0, 3.0, 9.0, 3.0])
    found_values, found_places = largest(values, 6)
    expected = values.sort(dim=1, descending=True, stable=True)
    assert torch.equal(found_values, expected.values[:, :6])
    assert torch.equal(found_places, expected.indices[:, :6])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocabulary", [5, 15, 16, 64, 65, 1000, 64 * 40 + 23])
def test_compiled_selection_is_that_of_a_stable_sort(vocabulary: int, dtype: torch.dtype) -> None:
    """Few distinct values, or none equal, or some of -inf; in one case fewer tokens are left than are asked for."""
    if shutil.which("g++") is None:
        pytest.skip("no compiler")
    rng = np.random.default_rng(vocabulary)
    logits = torch.from_numpy(rng.integers(-3, 3, (60, vocabulary)).astype(np.float32))
    logits[::3] += torch.from_numpy(rng.normal(size=(20, vocabulary), scale=20).astype(np.float32))
    logits[::5, 4::7] = -torch.inf
    logits = logits.to(dtype)
    never, count = torch.tensor([0, 1, 2]), min(8, vocabulary)
    values, tokens, ends = cpu_kernels.best_tokens(logits, count=count, never=never, end=EOS)
    logp = torch.log_softmax(logits.double(), dim=-1)
    torch.testing.assert_close(ends.double(), logp[:, EOS], rtol=1e-6, atol=1e-5)
    order = logits.float().index_fill(1, never, -torch.inf).sort(dim=1, descending=True, stable=True)
    is_left = order.values[:, :count] > -torch.inf
    assert torch.equal(tokens[is_left], order.indices[:, :count][is_left])
    assert torch.equal(values > -torch.inf, is_left)
    torch.testing.assert_close(values.double()[is_left], logp.gather(1, tokens)[is_left], rtol=1e-6, atol=1e-5)


def test_numbers_that_are_not_finite_stay_so() -> None:
    """Search ends by them: a sentence without a comparable score is done."""
    if shutil.which("g++") is None:
        pytest.skip("no compiler")
    logits = torch.full((2, 40), torch.nan)
    logits[1, 7] = torch.inf
    values, _, ends = cpu_kernels.best_tokens(logits, count=4, never=torch.tensor([0]), end=EOS)
    assert not values.isfinite().any()
    assert not ends.isfinite().any()


@pytest.mark.parametrize("compiles", [False, True])
@pytest.mark.parametrize("elements", [1, 23 * 5, 2**19])
def test_extensions_against_the_whole_softmax(elements: int, compiles: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """However few rows are computed at a time; the second sentence may only end."""
    if compiles and shutil.which("g++") is None:
        pytest.skip("no compiler")
    monkeypatch.setattr(module, "_ELEMENTS", {"cpu": elements, "compiled": elements})
    monkeypatch.setattr(module, "_compiles", lambda _: compiles)
    torch.manual_seed(1)
    model = Transformer(tiny_config(vocab_size=23)).eval()
    hidden_BD = torch.randn(9, model.config.width)
    alive_logp_Nk = -torch.rand(3, 3)
    never = torch.tensor([0, 1, 2])
    with torch.no_grad():
        value, hypothesis, token, _ = best_extensions(
            model,
            hidden_BD,
            alive_logp_Nk,
            linear=functional.linear,
            count=4,
            never=never,
            ends_only_N=torch.tensor([False, True, False]),
        )
        total = torch.log_softmax(hidden_BD @ model.embedding.T, dim=-1).view(3, 3, 23) + alive_logp_Nk.unsqueeze(2)
    total[:, :, :3] = -torch.inf
    total[1, :, torch.arange(23) != EOS] = -torch.inf
    expected = total.flatten(1).sort(dim=1, descending=True, stable=True)
    finite = expected.values[:, :4] > -torch.inf
    assert finite.sum(1).tolist() == [4, 3, 4]
    torch.testing.assert_close(value, expected.values[:, :4])
    assert torch.equal((hypothesis * 23 + token)[finite], expected.indices[:, :4][finite])
