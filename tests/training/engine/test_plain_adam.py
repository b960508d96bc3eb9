import math

import pytest
import torch
from torch import nn

from dist_transformer.training.engine.plain_adam import PlainAdam

SETTINGS = {"lr": 0.5, "fused": True, "betas": (0.9, 0.98), "eps": 1e-9, "weight_decay": 0.0}


def make(values: list[float], **settings: float) -> tuple[nn.Parameter, PlainAdam]:
    weight = nn.Parameter(torch.tensor(values))
    return weight, PlainAdam([{"params": [weight]}], **{"max_grad_norm": 0.0, **SETTINGS, **settings})


def test_the_first_step_is_the_rate_against_the_sign() -> None:
    """Adam's first update is lr · g / (|g| + ε) whatever the size of g (Kingma and Ba, algorithm 1)."""
    weight, adam = make([1.0, 2.0])
    weight.grad = torch.tensor([3.0, -4.0])
    adam.step()
    assert weight.tolist() == pytest.approx([0.5, 2.5])
    assert adam._global_grad_norm == pytest.approx(5.0)
    assert adam.found_inf == 0


def test_a_rounded_model_is_updated_in_fp32() -> None:
    """Steps of 2^-12 are lost in bf16, which has 8 bits; sixteen of them move the rounded weight by one unit."""
    weight, adam = make([1.0], lr=2**-12)
    adam.keep_masters()
    assert weight.dtype == torch.bfloat16
    for _ in range(16):
        (weight.float() * 2).sum().backward()
        adam.step()
        weight.grad = None
    assert adam.masters[0].item() == pytest.approx(1 - 16 * 2**-12, rel=1e-6)
    assert weight.item() == 1 - 2**-8
    assert adam.masters[0].grad is None


def test_bf16_gradients_are_accumulated_in_fp32() -> None:
    """256 + 1 is 256 in bf16."""
    weight, adam = make([1.0])
    adam.keep_masters()
    for factor in (256.0, 1.0):
        (weight * factor).sum().backward()
    assert weight.grad is not None
    assert (weight.grad.dtype, weight.grad.item()) == (torch.float32, 257.0)


@pytest.mark.parametrize("rounded", [False, True])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_step_that_is_not_finite_changes_nothing(value: float, rounded: bool) -> None:
    weight, adam = make([1.0, 2.0])
    if rounded:
        adam.keep_masters()
    weight.grad = torch.tensor([0.0, value])
    adam.step()
    assert adam.found_inf == 1
    assert weight.tolist() == [1.0, 2.0]
    (state,) = adam.state.values()
    assert all(not state[key].any() for key in ("step", "exp_avg", "exp_avg_sq"))
    weight.grad = torch.tensor([1.0, 1.0])
    adam.step()
    assert adam.found_inf == 0
    assert weight.tolist() == pytest.approx([0.5, 1.5])


def test_longer_gradients_are_clipped() -> None:
    weight, adam = make([0.0, 0.0], max_grad_norm=1.0)
    weight.grad = torch.tensor([3.0, 4.0])
    adam.step()
    assert adam._global_grad_norm == pytest.approx(5.0)
    # The first moment is (1 - β1) · clipped gradient.
    assert adam.state[weight]["exp_avg"].tolist() == pytest.approx([0.06, 0.08], rel=1e-5)
