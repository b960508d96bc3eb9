import pytest
import torch
from torch.nn import functional

from dist_transformer.model import cpu_kernels, products
from dist_transformer.model.products import ComputedBy, FusedLinear, Products
from dist_transformer.runtime.device import multiplies_int8

HAS_INT8 = multiplies_int8(torch.device("cpu")) and cpu_kernels.takes(torch.bfloat16)
IN_INT8 = pytest.mark.skipif(not HAS_INT8, reason="no instructions for int8, or no compiler")
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


def exact_in_int8(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """In float64: rows as integers of at most 127 times a factor, whose products are added up exactly."""
    (x, x_factors), (weight, weight_factors) = (
        ((127 * rows / most).round(), most / 127)
        for rows in (x.double(), weight.double())
        for most in (rows.abs().amax(1, keepdim=True).clamp(min=1e-30),)
    )
    found = x @ weight.t() * x_factors * weight_factors.t()
    return found if bias is None else found + bias.double()


@IN_INT8
@pytest.mark.parametrize("threads_used", [1, 3])
@pytest.mark.parametrize("dtype", TOLERANCES)
def test_products_in_int8_are_those_of_the_integers(dtype: torch.dtype, threads_used: int) -> None:
    """Slices of a weight, with and without a bias, for rows of zeros or tiny numbers; a row alone is the same."""
    torch.set_num_threads(threads_used)
    torch.manual_seed(1)
    weight, bias = torch.randn(120, 72).to(dtype), torch.randn(120).to(dtype)
    x, linear = torch.randn(33, 72).to(dtype), Products(in_int8=True)
    x[3], x[4] = 0, 1e-35
    # The widest of a row has no neighbour that rounds to a higher integer.
    x[5, 7], weight[9, 8] = -40, 30
    with torch.inference_mode():
        for _ in range(2):
            for cut, added in ((slice(None), bias), (slice(40, None), bias), (slice(None), None)):
                part = None if added is None else added[cut]
                found = linear(x, weight[cut], part)
                assert found.dtype == dtype
                exact = exact_in_int8(x, weight[cut], part)
                # An integer that float32 rounds the other way moves a sum by one factor of x times one of W.
                assert (found - exact).norm() <= (1e-4 if dtype == torch.float32 else 4e-3) * exact.norm()
                assert torch.equal(linear(x[7:8], weight[cut], part), found[7:8])
        close = x.double() @ weight.double().t() + bias.double()
        assert (linear(x, weight, bias) - close).norm() < 0.02 * close.norm()
    assert len(linear._packed) == 2


@IN_INT8
@pytest.mark.parametrize("number", [torch.nan, torch.inf, -torch.inf])
def test_int8_does_not_hide_what_is_not_finite(number: float) -> None:
    x, linear = torch.ones(3, 40), Products(in_int8=True)
    x[1, 33] = number
    found = linear(x, torch.ones(20, 40), torch.zeros(20))
    assert not found[1].isfinite().any()
    assert (found[[0, 2]] == 40).all()


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("relu", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_training_computes_the_equation(
    dtype: torch.dtype, relu: bool, fused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows with a rest of a block, widths with a rest of a vector, and two uses of a layer, whose gradients add up."""
    if not fused:
        monkeypatch.setattr(products, "_supported", lambda: ())
    torch.manual_seed(2)
    layer = FusedLinear(40, 36).to(dtype)
    x, up = torch.randn(150, 40).to(dtype).requires_grad_(), torch.randn(150, 36).to(dtype)
    y = layer(x, relu=relu)
    # Not every processor has products in bf16.
    in_one = fused and dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    assert ("LinearInOneDNN" in str(y.grad_fn)) == in_one
    gradients = torch.autograd.grad([y, layer(x, relu=relu)], [x, layer.weight, layer.bias], [up, up])
    exact = [tensor.detach().double().requires_grad_() for tensor in (x, layer.weight, layer.bias)]
    wanted = exact[0] @ exact[1].t() + exact[2]
    wanted = wanted.clamp(min=0) if relu else wanted
    exact_gradients = torch.autograd.grad(wanted, exact, 2 * up.double())
    for found, true in zip((y, *gradients), (wanted, *exact_gradients), strict=True):
        assert found.dtype == dtype
        assert (found - true).norm() <= (1e-2 if dtype == torch.bfloat16 else 1e-6) * true.norm()


@pytest.mark.skipif(not cpu_kernels.takes(torch.bfloat16), reason="no compiler")
@pytest.mark.parametrize("threads_used", [1, 3])
@pytest.mark.parametrize("size", [(1, 1), (8, 8), (33, 65), (40, 200), (1030, 70)])
def test_a_transpose_is_exact(size: tuple[int, int], threads_used: int) -> None:
    """Whole squares and tiles, with rests in both directions."""
    torch.set_num_threads(threads_used)
    x = torch.randn(size).bfloat16()
    assert torch.equal(cpu_kernels.transposed(x), x.t())


@pytest.mark.skipif(not cpu_kernels.takes(torch.bfloat16), reason="no compiler")
@pytest.mark.parametrize("has_amx", [True, False])
@pytest.mark.parametrize(("width", "inner"), [(96, 160), (160, 96)])
def test_the_gradient_of_a_large_weight_is_that_of_the_equation(
    width: int, inner: int, has_amx: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Either factor may be the narrower one; it is transposed only for AMX."""
    monkeypatch.setattr(products, "_has_amx", lambda: has_amx)
    monkeypatch.setattr(products, "_LARGE_ROWS", 100)
    monkeypatch.setattr(products, "_LARGE_WEIGHT", width * inner)
    calls: list[tuple[int, ...]] = []
    transposed = cpu_kernels.transposed
    monkeypatch.setattr(cpu_kernels, "transposed", lambda x: (calls.append(tuple(x.shape)), transposed(x))[1])
    torch.manual_seed(4)
    gradient, x = torch.randn(100, inner).bfloat16(), torch.randn(100, width).bfloat16()
    exact = gradient.double().t() @ x.double()
    found = products._weight_gradient(gradient, x)
    assert found.shape == (inner, width)
    assert found.is_contiguous()
    assert (found - exact).norm() <= 1e-2 * exact.norm()
    assert calls[:1] == ([(100, min(width, inner))] if has_amx else [])
    # One token fewer is a small product.
    calls.clear()
    products._weight_gradient(gradient[:99], x[:99])
    assert not calls


def test_the_gradient_of_a_bias_has_the_same_bits_for_any_number_of_threads() -> None:
    torch.manual_seed(3)
    layer, x = FusedLinear(16, 48).bfloat16(), torch.randn(1000, 16).bfloat16()
    found = []
    for count in (1, 3):
        torch.set_num_threads(count)
        found.append(torch.autograd.grad(layer(x, relu=True).sum(), layer.bias)[0])
    assert torch.equal(*found)


def test_a_gradient_through_nan_is_seen() -> None:
    layer = FusedLinear(8, 8).bfloat16()
    x = torch.ones(3, 8).bfloat16()
    x[1, 2] = torch.nan
    gradient = torch.autograd.grad(layer(x, relu=True).sum(), layer.weight)[0]
    assert gradient.isnan().any()


def test_this_torch_has_the_operators() -> None:
    """Without them decoding would be slower, and no other test would fail."""
    if not torch.backends.mkldnn.is_available():
        pytest.skip("this torch has no oneDNN")
    for name in ("_reorder_linear_weight", "_linear_pointwise", "_is_mkldnn_bf16_supported"):
        assert hasattr(torch.ops.mkldnn, name)
    assert hasattr(torch, "_int_mm")


def test_a_change_of_a_weight_in_place_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    if not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        pytest.skip("this torch has no packed weights")
    monkeypatch.setattr(products, "_gains", lambda _: True)
    for linear in (Products(), Products(in_int8=True)):
        weight, x = torch.randn(512, 256), torch.randn(8, 256)
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
