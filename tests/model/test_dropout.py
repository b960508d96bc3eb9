"""Bounds are five standard deviations: a right implementation fails one seed in two million."""

import math

import pytest
import torch

from dist_transformer.model import cpu_kernels
from dist_transformer.model.dropout import dropout, random_bits

COUNT = 200_000


def deviation(rate: float, count: int) -> float:
    return math.sqrt(rate * (1 - rate) / count)


def words_of_next_seed(count: int) -> list[int]:
    """Compute the random words of the next dropout in integers of Python: two hashes of the place and the seed."""
    seed = int(torch.empty((), dtype=torch.int64).random_(-(2**63), None)) % 2**64
    return [hash_of((hash_of(place ^ (seed % 2**32)) + (seed >> 32)) % 2**32) for place in range(count)]


def hash_of(x: int) -> int:
    x = (x ^ (x >> 16)) * 0x7FEB352D % 2**32
    x = (x ^ (x >> 15)) * 0x846CA68B % 2**32
    return x ^ (x >> 16)


def halves_of(words: list[int]) -> list[int]:
    """Return two numbers per word, the lower one first, 0 for the lowest signed number."""
    return [(half + 32768) % 65536 for word in words for half in (word % 65536, word >> 16)]


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("seed", range(5))
def test_random_bits_are_hashes_of_place_and_seed(seed: int, compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    assert cpu_kernels.takes(torch.float32), "this test needs a compiler"
    if not compiled:
        monkeypatch.setattr(cpu_kernels, "takes", lambda _: False)
    torch.manual_seed(seed)
    expected = halves_of(words_of_next_seed(51))[:101]
    torch.manual_seed(seed)
    assert (random_bits(torch.Size((101,))).int() + 32768).tolist() == expected


@pytest.mark.parametrize("p", [0.05, 0.1, 0.3, 0.5, 0.9])
def test_keep_rate_and_scale(p: float) -> None:
    torch.manual_seed(1)
    out = dropout(torch.ones(COUNT), p, True)
    kept = out[out != 0]
    # p is rounded to 1/65536.
    assert abs(len(kept) / COUNT - (1 - p)) < 5 * deviation(p, COUNT) + 2**-16
    assert kept.min() == kept.max()
    assert kept[0].item() == pytest.approx(65536 / (65536 - round(p * 65536)), rel=1e-7)
    # The expectation is that of the input.
    assert abs(out.mean().item() - 1) < 5 * deviation(p, COUNT) / (1 - p)


@pytest.mark.parametrize(("p", "training"), [(0.0, True), (0.3, False), (0.0, False)])
def test_identity_without_dropout(p: float, training: bool) -> None:
    x = torch.randn(7, 5)
    state = torch.get_rng_state()
    assert torch.equal(dropout(x, p, training), x)
    assert torch.equal(torch.get_rng_state(), state)


def test_same_seed_same_mask_and_another_call_another_mask() -> None:
    x = torch.ones(1000)
    torch.manual_seed(5)
    first, second = dropout(x, 0.5, True), dropout(x, 0.5, True)
    torch.manual_seed(5)
    assert torch.equal(dropout(x, 0.5, True), first)
    # Two masks of 1,000 agree on half: 420 to 580 within five deviations.
    assert 420 < (first == second).sum() < 580


@pytest.mark.parametrize("shape", [(), (1,), (3,), (4,), (5, 7), (2, 3, 5)])
def test_any_shape(shape: tuple[int, ...]) -> None:
    torch.manual_seed(6)
    x = torch.randn(shape)
    out = dropout(x, 0.4, True)
    assert out.shape == x.shape
    kept = out != 0
    torch.testing.assert_close(out[kept], x[kept] / 0.6, rtol=1e-4, atol=0)


def test_view_that_is_not_contiguous() -> None:
    torch.manual_seed(7)
    x = torch.randn(40, 30).t()
    out = dropout(x, 0.5, True)
    kept = out != 0
    assert torch.equal(out[kept], 2 * x[kept])
    assert 400 < kept.sum() < 800


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_dtype_stays(dtype: torch.dtype) -> None:
    torch.manual_seed(8)
    out = dropout(torch.ones(COUNT, dtype=dtype), 0.1, True)
    assert out.dtype == dtype
    # bf16 holds three digits: 1.1111 is 1.1094.
    assert out.max().item() == pytest.approx(1 / 0.9, rel=2e-3)
    assert abs((out != 0).double().mean().item() - 0.9) < 5 * deviation(0.1, COUNT)


def test_gradient_is_the_mask_times_the_scale() -> None:
    torch.manual_seed(9)
    x = torch.randn(50, 20, requires_grad=True)
    up = torch.randn(50, 20)
    out = dropout(x, 0.3, True)
    out.backward(up)
    factor = out.detach() / x.detach()
    assert x.grad is not None
    torch.testing.assert_close(x.grad, up * factor)
    # Dropped elements get a gradient of exactly zero.
    assert torch.equal(x.grad == 0, out == 0)
