"""The way that a GPU computes a model, on a CPU: kernels that read offsets, fixed shapes, compiled layers.

Only the kernels themselves are replaced: by plain products, sentence by sentence, that know offsets alone. The formulas
of their gradients are written out, so that autograd does not work them out for both sides.
"""

from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.attention import varlen

from dist_transformer.model import attention, packed_attention, transformer
from dist_transformer.model.packed import IGNORED, PackedBatch
from dist_transformer.model.transformer import Transformer
from tests.model.small_batches import gradients, make_batch, make_model, make_pairs

CAP = 12


def spans(query_offsets: torch.Tensor, key_offsets: torch.Tensor) -> Iterator[tuple[slice, slice]]:
    assert query_offsets.dtype == key_offsets.dtype == torch.int32
    assert len(query_offsets) == len(key_offsets)
    starts = zip(query_offsets[:-1].tolist(), query_offsets[1:].tolist(), strict=True)
    keys = zip(key_offsets[:-1].tolist(), key_offsets[1:].tolist(), strict=True)
    return ((slice(*query), slice(*key)) for query, key in zip(starts, keys, strict=True))


def weights_of(q: torch.Tensor, k: torch.Tensor, causal: bool) -> torch.Tensor:
    scores = torch.einsum("qhd,khd->hqk", q, k) * q.shape[-1] ** -0.5
    if causal:
        scores = scores.masked_fill(torch.ones(len(q), len(k), dtype=torch.bool).triu(1), -torch.inf)
    return scores.softmax(-1).nan_to_num()


def forward(inputs: Any, offsets: Any, *, causal: bool) -> tuple[torch.Tensor, torch.Tensor]:
    q, k, v = inputs
    # Rows that no sentence covers would be NaN.
    out = torch.full(q.shape, torch.nan)
    for rows, keys in spans(*offsets):
        out[rows] = torch.einsum("hqk,khd->qhd", weights_of(q[rows], k[keys], causal), v[keys])
    return out, torch.zeros(q.shape[1], len(q))


def backward(gradient: Any, inputs: Any, out: Any, sums: Any, results: Any, offsets: Any, *, causal: bool) -> None:
    (q, k, v), (dq, dk, dv) = inputs, results
    for result in results:
        result.fill_(torch.nan)
    for rows, keys in spans(*offsets):
        p, g = weights_of(q[rows], k[keys], causal), gradient[rows]
        dp = torch.einsum("qhd,khd->hqk", g, v[keys])
        ds = p * (dp - (p * dp).sum(-1, keepdim=True)) * q.shape[-1] ** -0.5
        dv[keys] = torch.einsum("hqk,qhd->khd", p, g)
        dq[rows] = torch.einsum("hqk,khd->qhd", ds, k[keys])
        dk[keys] = torch.einsum("hqk,qhd->khd", ds, q[rows])


class Varlen(torch.autograd.Function):
    """`torch.nn.attention.varlen.varlen_attn`."""

    @staticmethod
    def forward(ctx: Any, q: Any, k: Any, v: Any, query_offsets: Any, key_offsets: Any, causal: bool) -> torch.Tensor:
        ctx.save_for_backward(q, k, v, query_offsets, key_offsets)
        ctx.causal = causal
        return forward((q, k, v), (query_offsets, key_offsets), causal=causal)[0]

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        *inputs, query_offsets, key_offsets = ctx.saved_tensors
        results = [torch.empty_like(x) for x in inputs]
        backward(gradient, inputs, None, None, results, (query_offsets, key_offsets), causal=ctx.causal)
        return *results, None, None, None


def varlen_attn(
    q: Any, k: Any, v: Any, cu_seq_q: Any, cu_seq_k: Any, max_q: int, max_k: int, *, window_size: tuple[int, int]
) -> torch.Tensor:
    assert (cu_seq_q.diff() <= max_q).all()
    assert (cu_seq_k.diff() <= max_k).all()
    return Varlen.apply(q, k, v, cu_seq_q, cu_seq_k, window_size == (-1, 0))


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_attention, "_forward", forward)
    monkeypatch.setattr(packed_attention, "_backward", backward)
    monkeypatch.setattr(varlen, "varlen_attn", varlen_attn)


def batch_of(seed: int) -> PackedBatch:
    """Make a batch as the collator does: two tails of different lengths, whose dummies have no partner."""
    lengths = np.random.default_rng(seed).integers(0, CAP, (6, 2)).tolist()
    batch = make_batch(make_pairs(lengths, 60, seed), cap=CAP, size=80)
    # Every second token is linked to the first or last token of its source.
    links = np.full(len(batch.labels_T), IGNORED)
    places = np.repeat(batch.source.lengths - 1, batch.target.lengths)
    links[: len(places)] = np.where(
        np.arange(len(places)) % 2, np.where(np.arange(len(places)) % 4 == 1, places, 0), -1
    )
    return replace(batch, links_T=torch.from_numpy(links))


def loss_and_gradients(model: Transformer, batch: PackedBatch, alpha: float) -> tuple[float, dict[str, torch.Tensor]]:
    loss = model(batch, 0.1, alpha, 0.5).loss
    return loss.item(), gradients(model, loss)


@pytest.mark.system
@pytest.mark.parametrize(
    ("kernel", "compiled", "norm", "alpha"),
    [
        *(
            (kernel, compiled, norm, 0.0)
            for kernel, compiled in (("packed", False), ("packed", True), ("varlen", False))
            for norm in ("post", "pre")
        ),
        ("packed", True, "post", 5.0),
        ("varlen", False, "pre", 5.0),
    ],
)
@pytest.mark.usefixtures("kernels")
def test_loss_and_gradients_are_those_of_groups(
    norm: str, kernel: attention.Kernel, compiled: bool, alpha: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_model(3, width=32, ffn_width=48, vocab_size=60, norm=norm)
    batches = [batch_of(seed) for seed in range(4)]
    monkeypatch.setattr(Transformer, "_kernel", lambda *_: "groups")
    expected = [loss_and_gradients(model, batch, alpha) for batch in batches]
    used: list[str] = []
    make_layout = transformer.AttentionLayout

    def noted(*sides: Any, kernel: attention.Kernel, **options: Any) -> attention.AttentionLayout:
        used.append(kernel)
        return make_layout(*sides, kernel=kernel, **options)

    monkeypatch.setattr(transformer, "AttentionLayout", noted)
    monkeypatch.setattr(Transformer, "_kernel", lambda *_: kernel)
    assert model.has_fixed_shapes
    if compiled:
        model.compile_layers(backend="aot_eager")
        torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    found = [loss_and_gradients(model, batch, alpha) for batch in batches]
    assert used == [kernel] * 3 * len(batches)
    for (loss, computed), (wanted_loss, wanted) in zip(found, expected, strict=True):
        assert loss == pytest.approx(wanted_loss, rel=1e-6)
        for name, gradient in computed.items():
            assert (gradient - wanted[name]).norm() <= 1e-5 * wanted[name].norm() + 1e-7, name
    if compiled:
        # In evaluation shapes change, and nothing is compiled.
        model.eval()(make_batch(make_pairs([(3, 4)], 60), cap=CAP), 0.1)
        counters = torch._dynamo.utils.counters
        # One of the encoder's layers, one of the decoder's, and one of the guided layer; the loss has its own.
        assert counters["stats"]["unique_graphs"] == 4
        assert not counters["graph_break"]


def test_without_a_compiler_it_is_said_once_and_flash_attention_takes_over(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = torch.zeros

    def fails(*_: Any, **__: Any) -> None:
        raise RuntimeError("Failed to find C compiler.\nmore")

    monkeypatch.setattr(packed_attention.importlib.util, "find_spec", lambda _: True)
    monkeypatch.setattr(packed_attention, "_forward", fails)
    on_cpu = {"device": "cpu"}
    monkeypatch.setattr(torch, "zeros", lambda *shape, **options: real(*shape, **{**options, **on_cpu}))
    monkeypatch.setattr(torch, "tensor", lambda values, **_: real(len(values)))
    # The choice reads the weight's device and type alone.
    weight = SimpleNamespace(device=torch.device("cuda"), dtype=torch.bfloat16)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    packed_attention._compiles.cache_clear()
    try:
        assert [attention.kernel_for(weight, 64, longest=100) for _ in range(2)] == ["varlen"] * 2
    finally:
        packed_attention._compiles.cache_clear()
    said = "".join(capsys.readouterr())
    assert said.count("cannot be compiled (Failed to find C compiler.), so attention is slower: install a ") == 1
