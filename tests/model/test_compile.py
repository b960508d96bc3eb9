"""Compiled and eager are the same model, with one graph per kind of layer. `test_gpu_branch` has it on a CPU."""

import numpy as np
import pytest
import torch
from torch._dynamo.utils import counters

from dist_transformer.model import cpu_kernels
from dist_transformer.model.packed import PackedBatch
from dist_transformer.model.transformer import Transformer
from dist_transformer.run.ledger import batch_hash
from tests.model.small_batches import make_batch, make_model, make_pairs

CUDA = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] >= 8
SIZE, CAP, SENTENCES = 256, 40, 12


def batch_of(seed: int, *, lengths_seed: int) -> PackedBatch:
    """Other words in every batch; lengths of `lengths_seed`."""
    lengths = np.random.default_rng(lengths_seed).integers(3, 20, SENTENCES).tolist()
    return make_batch(make_pairs([(size, size) for size in lengths], 50, seed), cap=CAP, size=SIZE)


def model_of() -> Transformer:
    return make_model(width=32, ffn_width=64, vocab_size=50, max_positions=CAP)


def losses_and_gradient(
    model: Transformer, batches: list[PackedBatch], alpha: float = 0.0
) -> tuple[list[float], torch.Tensor]:
    losses = []
    for batch in batches:
        sums = model(batch, 0.1, alpha)
        sums.loss.backward()
        losses.append(sums.loss.item())
    return losses, torch.cat([p.grad.flatten().float() for p in model.parameters() if p.grad is not None])


def graphs() -> int:
    return int(counters["stats"]["unique_graphs"])


def test_shapes_are_fixed_with_kernels_that_read_offsets_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    assert model_of().has_fixed_shapes
    monkeypatch.setattr(cpu_kernels, "takes", lambda _: False)
    assert not model_of().has_fixed_shapes


@pytest.mark.gpu
@pytest.mark.skipif(not CUDA, reason="needs a GPU of compute capability 8")
@pytest.mark.parametrize("alpha", [0.0, 5.0])
def test_on_a_gpu_other_lengths_need_no_other_graph(alpha: float) -> None:
    """The same losses as without compiling, to bf16's rounding."""
    device = torch.device("cuda")
    batches = [batch_of(seed, lengths_seed=seed).to(device) for seed in range(6)]
    eager, compiled = (model_of().to(device).cast_parameters(torch.bfloat16) for _ in range(2))
    assert compiled.has_fixed_shapes
    compiled.compile_layers()
    first, _ = losses_and_gradient(compiled, batches[:2], alpha)
    before = graphs()
    more, gradient = losses_and_gradient(compiled, batches[2:], alpha)
    assert graphs() == before
    wanted, wanted_gradient = losses_and_gradient(eager, batches, alpha)
    assert [*first, *more] == pytest.approx(wanted, rel=0.01)
    assert ((gradient - wanted_gradient).norm() / wanted_gradient.norm()).item() < 0.02


@pytest.mark.gpu
@pytest.mark.skipif(not CUDA, reason="needs a GPU of compute capability 8")
def test_on_a_gpu_a_step_does_not_wait_for_the_device() -> None:
    """Copy, forward, backward, hash and update, once all is warm."""
    device = torch.device("cuda")
    model = model_of().to(device).cast_parameters(torch.bfloat16)
    model.compile_layers()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    batches = [batch_of(seed, lengths_seed=seed).pin_memory() for seed in range(6)]

    def step(host: PackedBatch) -> torch.Tensor:
        batch = host.to(device)
        torch.manual_seed(1)
        sums = model(batch, 0.1)
        (sums.loss * 0.01).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return batch_hash(batch) + sums.tokens

    for batch in batches[:3]:
        step(batch)
    torch.cuda.set_sync_debug_mode("error")
    try:
        found = [step(batch) for batch in batches[3:]]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert len({int(value) for value in found}) == 3
