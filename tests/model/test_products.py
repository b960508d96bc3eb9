import pytest
import torch
from torch.nn import functional

from dist_transformer.model import products
from dist_transformer.model.products import ComputedBy, Products

TOLERANCES = {torch.float32: (1e-5, 1e-5), torch.bfloat16: (1e-2, 1e-2)}


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("rows", [1, 3, 64, 257])
def test_products_are_those_of_linear(rows: int, dtype: torch.dtype) -> None:
    """A weight that is packed where the processor gains by it, slices of it, and one that is too small."""
    torch.manual_seed(1)
    weight, bias = (torch.randn(1200, 256) / 16).to(dtype), torch.randn(1200).to(dtype)
    small = torch.randn(40, 256).to(dtype)
    x, linear = torch.randn(rows, 256).to(dtype), Products()
    rtol, atol = TOLERANCES[dtype]
    with torch.inference_mode():
        for _ in range(2):
            for cut in (slice(None), slice(0, 600), slice(600, None)):
                expected = functional.linear(x, weight[cut], bias[cut])
                torch.testing.assert_close(linear(x, weight[cut], bias[cut]), expected, rtol=rtol, atol=atol)
            assert torch.equal(linear(x, small), functional.linear(x, small))
    assert len(linear._packed) in (0, 3)


def test_this_torch_has_the_operators() -> None:
    """Without them decoding would be slower, and no other test would fail."""
    if not torch.backends.mkldnn.is_available():
        pytest.skip("this torch has no oneDNN")
    for name in ("_reorder_linear_weight", "_linear_pointwise", "_is_mkldnn_bf16_supported"):
        assert hasattr(torch.ops.mkldnn, name)


def test_a_change_of_a_weight_in_place_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    if not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        pytest.skip("this torch has no packed weights")
    monkeypatch.setattr(products, "_gains", lambda _: True)
    weight, x, linear = torch.randn(512, 256), torch.randn(8, 256), Products()
    with torch.no_grad():
        before = linear(x, weight)
        weight.mul_(2)
        torch.testing.assert_close(linear(x, weight), 2 * before)
    assert len(linear._packed) == 1


def test_a_processor_without_avx512_keeps_plain_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")
    weight, x, linear = torch.randn(512, 256), torch.randn(8, 256), Products()
    assert torch.equal(linear(x, weight), functional.linear(x, weight))
    assert linear._packed == {}


def test_layers_of_torch_compute_by_the_given_function() -> None:
    """Inside the context only, with and without a bias."""
    calls: list[tuple[int, ...]] = []

    def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        calls.append(tuple(weight.shape))
        return 2 * functional.linear(x, weight, bias)

    x, layer = torch.ones(3, 4), torch.nn.Linear(4, 5)
    plain = layer(x)
    with ComputedBy(linear):
        assert torch.equal(layer(x), 2 * plain)
        assert torch.equal(functional.linear(x, layer.weight), 2 * (x @ layer.weight.t()))
        assert torch.equal(x.relu(), x)
    assert torch.equal(layer(x), plain)
    assert calls == [(5, 4), (5, 4)]
