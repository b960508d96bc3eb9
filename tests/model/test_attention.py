"""Packed attention against torch's own, computed sentence by sentence from the same projections."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch.nn import functional

from dist_transformer.config.settings import ModelConfig
from dist_transformer.model.attention import AttentionLayout, Kernel, MultiHeadAttention, _similar_lengths
from dist_transformer.model.packed import PackedTokens, pack_side
from tests.variants import DistantAttention

CAP, WIDTH, HEADS = 40, 16, 2
KINDS = pytest.mark.parametrize("kind", ["self", "causal", "cross"])
KERNELS = pytest.mark.parametrize("kernel", ["groups", "packed"])


def pack(lengths: Sequence[int], *, tail: int = 0, cap: int = CAP) -> PackedTokens:
    """Pack sentences with as many offsets as a tail of up to 100 tokens needs; both sides have equally many."""
    used = sum(lengths)
    ids = np.arange(used, dtype=np.int64)
    offsets = len(lengths) + -(-100 // cap) + 2
    return pack_side(ids, np.array(lengths, dtype=np.int64), size=used + tail, offset_count=offsets, max_length=cap)


def make_attention(seed: int = 0, *, head_width: int = 8, dropout: float = 0.0) -> MultiHeadAttention:
    torch.manual_seed(seed)
    config = ModelConfig(width=WIDTH, heads=HEADS, head_width=head_width, attention_dropout=dropout)
    attention = MultiHeadAttention(config, "encoder")
    attention.reset_parameters()
    with torch.no_grad():
        attention.qkv_bias.normal_(std=0.5)
        attention.output.bias.normal_(std=0.5)
    return attention


def reference(
    attention: MultiHeadAttention,
    x_TD: torch.Tensor,
    memory_SD: torch.Tensor,
    query_lengths: Sequence[int],
    key_lengths: Sequence[int],
    causal: bool,
    masks: Sequence[torch.Tensor] | None = None,
) -> torch.Tensor:
    """Real rows only; additive masks of the sentences take the place of the causal one."""
    (w_q, w_k, w_v), (b_q, b_k, b_v) = attention.qkv_weight.chunk(3), attention.qkv_bias.chunk(3)

    def project(rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return functional.linear(rows, weight, bias).view(len(rows), HEADS, -1).transpose(0, 1)

    outputs = []
    for x, memory, mask in zip(
        x_TD[: sum(query_lengths)].split(list(query_lengths)),
        memory_SD[: sum(key_lengths)].split(list(key_lengths)),
        masks or [None] * len(query_lengths),
        strict=True,
    ):
        mixed = functional.scaled_dot_product_attention(
            project(x, w_q, b_q), project(memory, w_k, b_k), project(memory, w_v, b_v), mask, is_causal=causal
        )
        outputs.append(attention.output(mixed.transpose(0, 1).flatten(1)))
    return torch.cat(outputs)


class Case:
    """Random rows for a layout; in self-attention the memory is `x_TD`."""

    def __init__(
        self, kind: str, lengths: Sequence[tuple[int, int]], tail: int, seed: int = 0, *, kernel: Kernel = "groups"
    ) -> None:
        self.kind, self.causal = kind, kind == "causal"
        self.query_lengths = [pair[0] for pair in lengths]
        self.key_lengths = [pair[1] for pair in lengths] if kind == "cross" else self.query_lengths
        self.real = sum(self.query_lengths)
        queries = pack(self.query_lengths, tail=tail)
        # Another tail on the other side: the two buffers have nothing to do with each other.
        keys = pack(self.key_lengths, tail=tail // 2) if kind == "cross" else queries
        self.layout = AttentionLayout(queries, keys, causal=self.causal, kernel=kernel)
        generator = torch.Generator().manual_seed(seed)
        self.x_TD = torch.randn(len(queries.tokens_T), WIDTH, generator=generator, requires_grad=True)
        self.memory_SD = torch.randn(len(keys.tokens_T), WIDTH, generator=generator, requires_grad=True)
        # The gradient that comes from above; dummy rows get none, as from the loss.
        self.up_TD = torch.randn(self.real, WIDTH, generator=generator)

    @property
    def inputs(self) -> list[torch.Tensor]:
        return [self.x_TD, self.memory_SD] if self.kind == "cross" else [self.x_TD]

    def run(self, attention: MultiHeadAttention) -> torch.Tensor:
        """Real and dummy rows."""
        return attention(self.x_TD, self.memory_SD if self.kind == "cross" else None, self.layout)

    def reference(self, attention: MultiHeadAttention, masks: Sequence[torch.Tensor] | None = None) -> torch.Tensor:
        memory_SD = self.memory_SD if self.kind == "cross" else self.x_TD
        lengths, causal = (self.query_lengths, self.key_lengths), self.causal and masks is None
        return reference(attention, self.x_TD, memory_SD, *lengths, causal, masks)

    def gradients(self, attention: MultiHeadAttention, real_rows: torch.Tensor) -> dict[str, torch.Tensor]:
        named = dict(attention.named_parameters()) | dict(zip(("x", "memory"), self.inputs, strict=False))
        found = torch.autograd.grad(real_rows, list(named.values()), self.up_TD)
        return dict(zip(named, found, strict=True))


def check_against_reference(case: Case) -> None:
    attention = make_attention()
    out_TD, expected_TD = case.run(attention), case.reference(attention)
    assert out_TD.isfinite().all()
    worst = (out_TD[: case.real] - expected_TD).abs().max().item()
    assert worst < 1e-5, f"forward differs by {worst:.2e}"
    found, expected = case.gradients(attention, out_TD[: case.real]), case.gradients(attention, expected_TD)
    for name, gradient in found.items():
        # A parameter's gradient sums over all tokens: relative to its size where that is above 1.
        worst = ((gradient - expected[name]).abs().max() / expected[name].abs().max().clamp(min=1)).item()
        assert worst < 1e-5, f"gradient of {name} differs by {worst:.2e}"
    for name in found.keys() & {"x", "memory"}:
        real = case.real if name == "x" else sum(case.key_lengths)
        assert (found[name][real:] == 0).all(), f"dummy rows of {name} have a gradient"


SENTENCES = st.lists(st.tuples(st.integers(1, CAP), st.integers(1, CAP)), min_size=1, max_size=10)


@KERNELS
@KINDS
@settings(max_examples=60)
@example(lengths=[(1, 1)], tail=0)
@example(lengths=[(1, 40), (40, 1)], tail=1)
@example(lengths=[(16, 16), (17, 15), (32, 33)], tail=41)
@example(lengths=[(7, 9)] * 10, tail=80)
@given(lengths=SENTENCES, tail=st.integers(0, 100))
def test_equals_scaled_dot_product_attention(
    kind: str, kernel: Kernel, lengths: list[tuple[int, int]], tail: int
) -> None:
    check_against_reference(Case(kind, lengths, tail, seed=len(lengths) + tail, kernel=kernel))


@KINDS
def test_adjusted_scores_are_those_of_an_additive_mask(kind: str) -> None:
    """Sentence by sentence, with torch's own attention and its gradient, that of the variant's parameter included."""
    case = Case(kind, [(5, 9), (12, 3), (1, 1), (7, 30), (40, 18)], tail=11)
    attention = DistantAttention(ModelConfig(width=WIDTH, heads=HEADS), "cross" if kind == "cross" else "encoder")
    attention.reset_parameters()
    assert not attention.is_plain

    def mask(queries: int, keys: int) -> torch.Tensor:
        q, k = torch.arange(queries)[:, None], torch.arange(keys)[None]
        allowed = (k <= q) if case.causal else torch.ones(queries, keys, dtype=torch.bool)
        bias = -attention.slopes_H.view(-1, 1, 1) * (q - k).abs() + torch.cos(k.float())
        return bias.masked_fill(~allowed, -torch.inf)

    expected = case.reference(
        attention, [mask(*sizes) for sizes in zip(case.query_lengths, case.key_lengths, strict=True)]
    )
    found = case.run(attention)[: case.real]
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    wanted = case.gradients(attention, expected)
    for name, gradient in case.gradients(attention, found).items():
        torch.testing.assert_close(gradient, wanted[name], rtol=1e-4, atol=1e-5)
    assert wanted["slopes_H"].abs().min() > 1e-2
    plain = case.reference(attention)
    assert (found - plain).abs().max() > 0.01, "the adjustment should matter"


@KERNELS
def test_head_width_need_not_be_width_over_heads(kernel: Kernel) -> None:
    attention, case = make_attention(head_width=3), Case("causal", [(5, 5), (12, 12)], tail=4, kernel=kernel)
    torch.testing.assert_close(case.run(attention)[: case.real], case.reference(attention), rtol=0, atol=1e-5)


@KERNELS
@KINDS
def test_dummy_rows_have_no_influence(kind: str, kernel: Kernel) -> None:
    attention, case = make_attention(), Case(kind, [(9, 4), (3, 11), (8, 8)], tail=50, kernel=kernel)
    out = case.run(attention)[: case.real]
    gradients = case.gradients(attention, out)
    with torch.no_grad():
        case.x_TD[case.real :] = 1e4
        case.memory_SD[sum(case.key_lengths) :] = -1e4
    wild_out = case.run(attention)[: case.real]
    assert torch.equal(wild_out, out)
    for name, gradient in case.gradients(attention, wild_out).items():
        torch.testing.assert_close(gradient, gradients[name], rtol=1e-6, atol=1e-6)


@KERNELS
@KINDS
def test_pack_without_sentences(kind: str, kernel: Kernel) -> None:
    attention, case = make_attention(), Case(kind, [], tail=50, kernel=kernel)
    out_TD = case.run(attention)
    assert out_TD.shape == case.x_TD.shape
    assert out_TD.isfinite().all()
    # What the loss does with a pack of dummies: it selects no row.
    selected = torch.where(torch.zeros(len(out_TD), 1, dtype=torch.bool), out_TD, 0).sum()
    for gradient in torch.autograd.grad(selected, [*attention.parameters(), *case.inputs]):
        assert (gradient == 0).all()


def test_the_bias_of_keys_has_no_gradient() -> None:
    """In exact arithmetic it has none; with its rounding, Adam would make it wander differently on each world."""
    case = Case("cross", [(3, 5), (4, 2)], tail=3)
    attention = make_attention()
    query, key, value = case.gradients(attention, case.run(attention)[: case.real])["qkv_bias"].chunk(3)
    assert not key.any()
    assert query.abs().max() > 1e-2
    assert value.abs().max() > 1e-2
    with torch.no_grad():
        before = case.run(attention)[: case.real]
        attention.qkv_bias.chunk(3)[1].add_(0.7)
        assert (case.run(attention)[: case.real] - before).abs().max() < 1e-5


def test_reset_is_xavier_uniform_for_each_matrix() -> None:
    torch.manual_seed(0)
    attention = MultiHeadAttention(ModelConfig(width=96, heads=4, head_width=8), "encoder")
    attention.reset_parameters()
    bound = (6 / (96 + 32)) ** 0.5
    for weight in (*attention.qkv_weight.chunk(3), attention.output.weight):
        assert bound * 0.99 < weight.abs().max().item() <= bound
        assert weight.std().item() == pytest.approx(bound / 3**0.5, rel=0.05)
    assert not attention.qkv_bias.any()
    assert not attention.output.bias.any()


def test_dropout_falls_on_the_weights_in_training_only() -> None:
    attention, case = make_attention(dropout=0.5), Case("self", [(9, 9), (4, 4)], tail=3)
    exact = case.reference(attention)
    torch.testing.assert_close(case.run(attention.eval())[: case.real], exact, rtol=0, atol=1e-5)
    attention.train()
    torch.manual_seed(0)
    draws = torch.stack([case.run(attention)[: case.real].detach() for _ in range(1500)])
    assert (draws[0] - draws[1]).abs().max() > 0.01
    # Weights keep their expectation, and the output is linear in them.
    error = draws.std(0) / len(draws) ** 0.5
    assert ((draws.mean(0) - exact).abs() < 5 * error + 1e-5).all()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="the fused kernel needs CUDA")
@KINDS
@pytest.mark.parametrize("kernel", ["packed", "varlen"])
def test_fused_kernel_equals_groups(kernel: Kernel, kind: str) -> None:
    if torch.cuda.get_device_capability()[0] < 8:
        pytest.skip("the fused kernel needs compute capability 8")
    rng = np.random.default_rng(0)
    query_lengths = rng.integers(1, CAP + 1, 50).tolist()
    key_lengths = rng.integers(1, CAP + 1, 50).tolist() if kind == "cross" else query_lengths
    device, width = torch.device("cuda"), 128
    torch.manual_seed(0)
    attention = MultiHeadAttention(ModelConfig(width=width, heads=2, head_width=64), "encoder")
    attention.reset_parameters()
    attention.to(device, torch.bfloat16)
    queries, keys = pack(query_lengths, tail=70).to(device), pack(key_lengths, tail=30).to(device)
    if kind != "cross":
        keys = queries
    x_TD = torch.randn(len(queries.tokens_T), width, device=device, dtype=torch.bfloat16, requires_grad=True)
    memory_SD = torch.randn(len(keys.tokens_T), width, device=device, dtype=torch.bfloat16, requires_grad=True)
    inputs = [x_TD, memory_SD] if kind == "cross" else [x_TD]
    real = sum(query_lengths)
    up_TD = torch.randn(real, width, device=device, dtype=torch.bfloat16)
    results = []
    for computed_by in (kernel, "groups"):
        layout = AttentionLayout(queries, keys, causal=kind == "causal", kernel=computed_by)
        out_TD = attention(x_TD, memory_SD if kind == "cross" else None, layout)
        assert out_TD.isfinite().all(), "a row that no sentence covers is uninitialised"
        found = torch.autograd.grad(out_TD[:real], [*inputs, *attention.parameters()], up_TD)
        results.append([out_TD[:real].float(), *(gradient.float() for gradient in found)])
    names = [*["x", "memory"][: len(inputs)], *(name for name, _ in attention.named_parameters())]
    for name, fused, grouped in zip(["output", *names], *results, strict=True):
        difference = ((fused - grouped).norm() / grouped.norm()).item()
        assert difference < 0.02, f"{name}: {difference:.3f}"


def test_sentences_of_at_least_half_the_longest_share_a_group() -> None:
    """Computed by hand, target and source together: 80 takes those of 40 and more, 30 is alone, 14 takes 10."""
    queries = np.array([5, 20, 40, 15, 7, 30])
    groups = [members.tolist() for members in _similar_lengths(queries, queries)]
    assert groups == [[2, 5, 1], [3], [4, 0]]
