"""Residual connections in training, compared with the equation in float64. `test_transformer` has those of a layer."""

import math
from dataclasses import replace

import pytest
import torch
from torch.nn import functional

from dist_transformer.config.presets import PRESETS
from dist_transformer.model import cpu_kernels
from dist_transformer.model.layers import Residual
from tests.model.test_dropout import halves_of, words_of_next_seed

WAYS = pytest.mark.parametrize("compiled", [True, False])


def make(width: int, p: float, dtype: torch.dtype = torch.float32, norm: str = "post") -> Residual:
    residual = Residual(replace(PRESETS["tiny"].model, width=width, dropout=p, norm=norm))
    with torch.no_grad():
        residual.norm.weight.normal_()
        residual.norm.bias.normal_()
    return residual.to(dtype).train()


def kept_of(shape: tuple[int, ...], p: float) -> torch.Tensor:
    """Return what the next dropout keeps, with the scale: 16 random bits per element, from the lowest number on."""
    if p == 0:
        return torch.ones(shape, dtype=torch.float64)
    state = torch.get_rng_state()
    bits = halves_of(words_of_next_seed(-(-math.prod(shape) // 2)))[: math.prod(shape)]
    torch.set_rng_state(state)
    dropped = round(p * 65536)
    return (torch.tensor(bits).view(shape) >= dropped).double() * 65536 / (65536 - dropped)


@WAYS
@pytest.mark.parametrize("p", [0.0, 0.3])
@pytest.mark.parametrize(
    ("dtype", "rows", "width"), [(torch.float32, 300, 48), (torch.float32, 1, 20), (torch.bfloat16, 129, 36)]
)
def test_output_and_gradients_are_those_of_the_equation(
    compiled: bool, p: float, dtype: torch.dtype, rows: int, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Widths with and without a rest of a vector; rows with and without a rest of a block."""
    assert cpu_kernels.takes(dtype), "this test needs a compiler"
    if not compiled:
        monkeypatch.setattr(cpu_kernels, "takes", lambda _: False)
    torch.manual_seed(1)
    residual = make(width, p, dtype)
    x, y, up = torch.randn(3, rows, width).mul(2).add(1).to(dtype)
    inputs = [x.requires_grad_(), y.requires_grad_(), residual.norm.weight, residual.norm.bias]
    kept = kept_of((rows, width), p)
    found = residual(x, lambda _: y)
    gradients = torch.autograd.grad(found, inputs, up)
    exact = [tensor.detach().double().requires_grad_() for tensor in inputs]
    wanted = functional.layer_norm(exact[0] + kept * exact[1], (width,), exact[2], exact[3], 1e-5)
    limit = 2e-6 if dtype == torch.float32 else 2e-2
    pairs = [(found, wanted), *zip(gradients, torch.autograd.grad(wanted, exact, up.double()), strict=True)]
    for mine, true in pairs:
        assert mine.dtype == dtype
        assert (mine - true).norm() <= limit * true.norm()


@pytest.mark.parametrize("p", [0.0, 0.1])
def test_compiled_code_rounds_less_than_the_operators_of_torch(p: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """In bf16 torch rounds after each of four operations; the compiled code rounds the result only."""
    torch.manual_seed(2)
    residual = make(128, p, torch.bfloat16)
    x, y = torch.randn(2, 200, 128).bfloat16()
    wanted = functional.layer_norm(
        x.double() + kept_of((200, 128), p) * y.double(),
        (128,),
        residual.norm.weight.double(),
        residual.norm.bias.double(),
        1e-5,
    )
    state = torch.get_rng_state()
    errors = []
    for takes in (cpu_kernels.takes, lambda _: False):
        monkeypatch.setattr(cpu_kernels, "takes", takes)
        torch.set_rng_state(state)
        errors.append((residual(x, lambda _: y) - wanted).norm().item())
    assert errors[0] < errors[1]


@WAYS
def test_pre_norm_drops_what_is_added(compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not compiled:
        monkeypatch.setattr(cpu_kernels, "takes", lambda _: False)
    added = make(16, 0.5, norm="pre")(torch.full((9, 16), 8.0), torch.ones_like) - 8
    assert added.unique().tolist() == [0, 2]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_not_finite_is_not_hidden(bad: float) -> None:
    """A diverging run must be seen. Other rows stay as they are."""
    torch.manual_seed(3)
    residual = make(24, 0.0)
    x, y = torch.randn(2, 5, 24)
    clean = residual(x, lambda _: y)
    y[2, 7] = bad
    found = residual(x, lambda _: y)
    assert found[2].isnan().any()
    others = [0, 1, 3, 4]
    assert torch.equal(found[others], clean[others])


def test_any_number_of_threads_gives_the_same_bits() -> None:
    torch.manual_seed(4)
    residual = make(40, 0.1)
    x, y, up = torch.randn(3, 1000, 40)
    results = []
    for count in (1, 3):
        torch.set_num_threads(count)
        torch.manual_seed(5)
        inputs = [x.requires_grad_(), y.requires_grad_(), *residual.norm.parameters()]
        out = residual(x, lambda _: y)
        results.append((out, *torch.autograd.grad(out, inputs, up)))
    assert all(torch.equal(*pair) for pair in zip(*results, strict=True))


@pytest.mark.parametrize("gradients", [True, False])
def test_evaluation_drops_nothing_and_draws_nothing(gradients: bool) -> None:
    torch.manual_seed(6)
    residual = make(16, 0.5).eval()
    x, y = torch.randn(2, 3, 16)
    state = torch.get_rng_state()
    with torch.set_grad_enabled(gradients):
        found = residual(x, lambda _: y)
    assert torch.equal(torch.get_rng_state(), state)
    torch.testing.assert_close(
        found, functional.layer_norm(x + y, (16,), residual.norm.weight, residual.norm.bias), rtol=1e-5, atol=1e-6
    )
