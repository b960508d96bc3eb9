"""Attention on a CPU, beyond what `test_attention` holds it to: types, long sentences, threads, other processors."""

import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from dist_transformer.base.native import load_native
from dist_transformer.model import cpu_kernels
from dist_transformer.model.packed_attention import cross_attention, self_attention
from tests.model import test_dropout, test_loss, test_products, test_residual


def offsets(*lengths: int) -> torch.Tensor:
    return torch.tensor(np.cumsum([0, *lengths]), dtype=torch.int32)


def exact(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool) -> torch.Tensor:
    """One sentence in float64, by the formula of section 3.2.1. Shapes: (T, H, K)."""
    scores = torch.einsum("qhd,khd->hqk", q, k) / math.sqrt(q.shape[-1])
    if causal:
        scores = scores.masked_fill(torch.ones(scores.shape[1:], dtype=torch.bool).triu(1), -torch.inf)
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1), v)


def rounded(rows: torch.Tensor) -> float:
    """Relative rounding of a type, times what the products of a row may gather."""
    return 2e-6 if rows.dtype == torch.float32 else 1e-2


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("dtype", "width"), [(torch.float32, 64), (torch.float32, 20), (torch.bfloat16, 32)])
def test_self_attention_of_long_and_short_sentences(dtype: torch.dtype, width: int, causal: bool) -> None:
    """Blocks of 16 and of 64 queries, several of each, and rests; queries, keys and values lie in one tensor."""
    torch.manual_seed(0)
    lengths = (1, 17, 300, 64, 2)
    qkv = torch.randn(sum(lengths), 3, 2, width).to(dtype).requires_grad_()
    up = torch.randn(sum(lengths), 2, width).to(dtype)
    found = self_attention(qkv, offsets(*lengths), causal=causal)
    (gradient,) = torch.autograd.grad(found, qkv, up)
    double = qkv.detach().double().requires_grad_()
    wanted = torch.cat([exact(*rows.unbind(1), causal=causal) for rows in double.split(lengths)])
    (wanted_gradient,) = torch.autograd.grad(wanted, double, up.double())
    assert found.dtype == gradient.dtype == dtype
    assert (found - wanted).norm() <= rounded(qkv) * wanted.norm()
    assert (gradient - wanted_gradient).norm() <= rounded(qkv) * wanted_gradient.norm()


def test_cross_attention_where_one_side_is_empty() -> None:
    """A dummy sentence may have queries and no keys, or keys and no queries: zeros, and nothing is read or written
    elsewhere."""
    torch.manual_seed(1)
    q, kv = torch.randn(9, 2, 16, requires_grad=True), torch.randn(11, 2, 2, 16, requires_grad=True)
    out = cross_attention(q, kv, offsets(4, 5, 0, 0), offsets(6, 0, 5, 0))
    grad_q, grad_kv = torch.autograd.grad(out.sum(), (q, kv))
    wanted = exact(q[:4].double(), *kv[:6].double().unbind(1), causal=False)
    assert (out[:4] - wanted).abs().max() < 1e-6
    for rows in (out[4:], grad_q[4:], grad_kv[6:]):
        assert (rows == 0).all()


def test_attention_does_not_import_the_compiler() -> None:
    """It takes longer than the translation of a line."""
    program = (
        "import sys, torch\n"
        "from dist_transformer.model.packed_attention import self_attention\n"
        "qkv = torch.zeros(2, 3, 1, 16, requires_grad=True)\n"
        "self_attention(qkv, torch.tensor([0, 2], dtype=torch.int32), causal=True).sum().backward()\n"
        "print('torch._dynamo' in sys.modules)\n"
    )
    # In a new interpreter: forks of this one have it.
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True, text=True)
    assert found.stdout == "False\n"


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_not_finite_is_not_hidden(bad: float) -> None:
    """A diverging run must be seen. Other sentences and heads stay as they are."""
    torch.manual_seed(2)
    qkv = torch.randn(24, 3, 2, 16)
    clean = self_attention(qkv, offsets(20, 4), causal=False)
    qkv[3, 1, 0, 5] = bad
    found = self_attention(qkv, offsets(20, 4), causal=False)
    # An infinite score with a negative sign is a weight of zero: no harm.
    harmed = exact(*qkv[:20].double().unbind(1), causal=False)[:, 0].isnan()
    assert harmed.any()
    assert torch.equal(found[:20, 0].isnan(), harmed)
    assert torch.equal(found[:20, 1], clean[:20, 1])
    assert torch.equal(found[20:], clean[20:])


BEAMS = pytest.mark.parametrize(("dtype", "width"), [(torch.float32, 96), (torch.float32, 20), (torch.bfloat16, 32)])


@BEAMS
def test_hypotheses_see_their_own_past(dtype: torch.dtype, width: int) -> None:
    """Compared with float64 over all entries and a mask. Queries, and entries within a longer cache, have strides."""
    torch.manual_seed(4)
    sentences, heads, beam, steps, room = 5, 3, 4, 37, 40
    q = torch.randn(sentences * beam, 3, heads, width).to(dtype)[:, 1].unflatten(0, (-1, beam)).transpose(1, 2)
    k, v = torch.randn(2, sentences, heads, room, beam, width).to(dtype)[:, :, :, :steps].flatten(3, 4)
    ancestors = torch.randint(0, beam, (sentences, beam, steps))
    mask = torch.full((sentences, beam, steps, beam), -torch.inf).scatter_(3, ancestors.unsqueeze(3), 0.0).flatten(2)
    found = cpu_kernels.attend_beams(q, k, v, mask.to(dtype))
    scores = q.double() @ k.double().transpose(2, 3) / math.sqrt(width) + mask.double().unsqueeze(1)
    wanted = (scores.softmax(-1) @ v.double()).transpose(1, 2).reshape(sentences * beam, heads * width)
    assert found.dtype == dtype
    assert (found - wanted).norm() <= rounded(q) * wanted.norm()


def test_hypotheses_of_a_sentence_share_its_memory() -> None:
    torch.manual_seed(5)
    q, (k, v) = torch.randn(2, 2, 3, 16), torch.randn(2, 2, 2, 6, 16)
    mask = torch.zeros(2, 1, 6)
    mask[1, 0, 2:] = -torch.inf
    found = cpu_kernels.attend_beams(q, k, v, mask)
    first = exact(q[0].transpose(0, 1), k[0].transpose(0, 1), v[0].transpose(0, 1), causal=False)
    second = exact(q[1].transpose(0, 1), k[1, :, :2].transpose(0, 1), v[1, :, :2].transpose(0, 1), causal=False)
    torch.testing.assert_close(found, torch.cat([first, second]).flatten(1), rtol=1e-5, atol=1e-6)


def test_a_hypothesis_that_sees_nothing_gets_zeros() -> None:
    q, k = torch.randn(1, 2, 2, 16), torch.randn(1, 2, 4, 16)
    mask = torch.zeros(1, 2, 4)
    mask[0, 1] = -torch.inf
    found = cpu_kernels.attend_beams(q, k, k, mask)
    assert found[0].abs().min() > 0
    assert (found[1] == 0).all()


def test_any_number_of_threads_gives_the_same_bits() -> None:
    torch.manual_seed(3)
    lengths = tuple(np.random.default_rng(0).integers(1, 60, 40).tolist())
    qkv = torch.randn(sum(lengths), 3, 4, 32, requires_grad=True)
    results = []
    for count in (1, 3):
        torch.set_num_threads(count)
        out = self_attention(qkv, offsets(*lengths), causal=True)
        mask = torch.zeros(9, 1, 50)
        beams = cpu_kernels.attend_beams(
            *torch.randn(3, 9, 2, 50, 16, generator=torch.Generator().manual_seed(4)), mask
        )
        results.append((out, torch.autograd.grad(out.square().sum(), qkv)[0], beams))
    assert all(torch.equal(*pair) for pair in zip(*results, strict=True))


def test_processors_without_wide_vectors(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The same source for plain x86-64, or for whatever this machine is without a vector extension of that name."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CXX", "g++ -mno-avx" if os.uname().machine == "x86_64" else "g++")
    library = load_native(cpu_kernels.__file__, slower="it")
    assert library is not None
    monkeypatch.setattr(cpu_kernels, "_library", lambda: library)
    test_self_attention_of_long_and_short_sentences(torch.float32, 20, True)
    test_self_attention_of_long_and_short_sentences(torch.bfloat16, 32, False)
    test_hypotheses_see_their_own_past(torch.float32, 20)
    test_hypotheses_see_their_own_past(torch.bfloat16, 32)
    for dtype in (torch.float32, torch.bfloat16):
        test_residual.test_output_and_gradients_are_those_of_the_equation(True, 0.3, dtype, 130, 20, monkeypatch)
        test_products.test_training_computes_the_equation(dtype, True, True, monkeypatch)
        if test_products.HAS_INT8:
            test_products.test_products_in_int8_are_those_of_the_integers(dtype, 1)
    test_loss.test_gradients_are_those_of_the_formula(0.1)
    test_loss.test_bf16_is_close_to_fp32()
    test_dropout.test_random_bits_are_hashes_of_place_and_seed(3, True, monkeypatch)


@pytest.mark.system
def test_without_a_compiler_sentences_are_padded_in_groups(tmp_path: Path) -> None:
    program = (
        "import torch; from dist_transformer.model.attention import kernel_for\n"
        "print([kernel_for(torch.zeros(1), 64, longest=9) for _ in range(2)])"
    )
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path), "CXX": "/nowhere/g++"}
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, check=True, capture_output=True, text=True, timeout=600
    )
    assert done.stdout == "['groups', 'groups']\n"
    assert done.stderr.count("note: cpu_kernels.cpp cannot be compiled") == 1
    assert "/nowhere/g++" in done.stderr
