"""Muon's update against its definition in float64, computed by numpy."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from dist_transformer.config.settings import ModelConfig
from dist_transformer.model.transformer import Transformer
from dist_transformer.training.engine.muon import Muon, orthogonalised
from dist_transformer.training.engine.plain_adam import PlainAdam

SHAPES = [(4, 4), (6, 3), (3, 6), (12, 4), (6, 3)]
RATE, DECAY = 0.01, 0.1


def newton_schulz(matrix: Any) -> Any:
    """Jordan's five iterations of x ← a·x + (b·(xxᵀ) + c·(xxᵀ)²)·x, on a matrix with norm 1."""
    x = matrix / np.linalg.norm(matrix)
    for _ in range(5):
        gram = x @ x.T
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x


def optimizer(
    matrices: list[nn.Parameter], others: list[nn.Parameter], kind: type = Muon, momentum: float = 0.95, **more: Any
) -> Muon:
    groups = [
        {"params": matrices, "momentum": momentum, "weight_decay": DECAY},
        {"params": others, "weight_decay": 0.0},
    ]
    muon: Muon = kind(groups, lr=RATE, betas=(0.9, 0.98), eps=1e-9, **more)
    muon.state.update({p: {"exp_avg": torch.zeros_like(p)} for p in muon.param_groups[0]["params"]})
    return muon


@pytest.mark.parametrize("momentum", [0.95, 0.0])
def test_two_updates_are_those_of_the_definition(momentum: float) -> None:
    torch.manual_seed(1)
    matrices = [nn.Parameter(torch.randn(shape)) for shape in SHAPES]
    vector, alone = nn.Parameter(torch.randn(5)), nn.Parameter(torch.randn(5))
    alone.data.copy_(vector)
    muon = optimizer(matrices, [vector], momentum=momentum)
    adam = torch.optim.AdamW([alone], lr=RATE, betas=(0.9, 0.98), eps=1e-9, weight_decay=0.0)
    wanted = [p.detach().double().numpy() for p in matrices]
    means = [np.zeros_like(w) for w in wanted]
    for _ in range(2):
        gradients = [torch.randn(shape) for shape in SHAPES]
        for p, gradient in zip(matrices, gradients, strict=True):
            p.grad = gradient.clone()
        vector.grad = torch.randn(5)
        alone.grad = vector.grad.clone()
        muon.step()
        adam.step()
        for i, gradient in enumerate(gradients):
            g = gradient.double().numpy()
            means[i] = momentum * means[i] + (1 - momentum) * g
            ahead = momentum * means[i] + (1 - momentum) * g
            update = 0.2 * math.sqrt(max(g.shape)) * newton_schulz(ahead)
            wanted[i] = wanted[i] * (1 - RATE * DECAY) - RATE * update
    for p, expected in zip(matrices, wanted, strict=True):
        np.testing.assert_allclose(p.detach().numpy(), expected, rtol=0, atol=2e-6)
    assert vector.equal(alone)


def test_an_update_has_the_size_of_one_of_adam() -> None:
    """About 0.2 for each number at a rate of 1, whatever the shape (Liu et al. 2025, section 2.2)."""
    torch.manual_seed(1)
    for shape in ((64, 64), (64, 256), (256, 64)):
        (update,) = orthogonalised([1e-6 * torch.randn(shape)], torch.float32)
        assert float(update.square().mean().sqrt()) == pytest.approx(0.2, rel=0.15)
    assert not orthogonalised([torch.zeros(3, 5)], torch.bfloat16)[0].any()


def test_a_step_that_is_not_finite_changes_nothing() -> None:
    torch.manual_seed(1)
    matrix, vector = nn.Parameter(torch.randn(2, 3)), nn.Parameter(torch.randn(2))
    muon = optimizer([matrix], [vector], PlainAdam, max_grad_norm=1.0, fused=True)
    for value in (1.0, math.nan):
        matrix.grad, vector.grad = value * torch.randn(2, 3), torch.randn(2)
        before = [matrix.detach().clone(), vector.detach().clone(), muon.state[matrix]["exp_avg"].clone()]
        muon.step()
    assert muon.found_inf == 1
    assert before[2].all()
    for was, now in zip(before, (matrix, vector, muon.state[matrix]["exp_avg"]), strict=True):
        assert was.equal(now)


def test_the_matrices_of_encoder_and_decoder() -> None:
    config = ModelConfig(
        width=8, heads=2, ffn_width=16, encoder_layers=1, decoder_layers=1, vocab_size=20, tie_embeddings="none"
    )
    shapes = [tuple(p.shape) for p in Transformer(config).hidden_matrices().values()]
    # An attention has queries, keys and values in one matrix, and its output; a feed-forward has two.
    assert sorted(shapes) == sorted([(24, 8), (8, 8)] * 3 + [(16, 8), (8, 16)] * 2)
