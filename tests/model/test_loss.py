"""The loss in blocks and its hand-written gradient against the formula in double precision and against torch's own."""

import math

import pytest
import torch
from torch.nn import functional

from dist_transformer.model import cpu_kernels
from dist_transformer.model import loss as module
from dist_transformer.model.loss import rdrop_cross_entropy, smoothed_cross_entropy
from dist_transformer.model.packed import IGNORED

ROWS, WIDTH, WORDS = 23, 12, 37
SMOOTHINGS = pytest.mark.parametrize("smoothing", [0.0, 0.1, 0.4])


@pytest.fixture(autouse=True, params=["compiled", "torch"])
def softmax(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Run each test with the compiled softmax of a CPU, and with the one for machines without a compiler."""
    assert cpu_kernels.takes(torch.float32), "these tests need a compiler"
    if request.param == "torch":
        monkeypatch.setattr(cpu_kernels, "takes", lambda _: False)
    return str(request.param)


def make_case(
    seed: int = 0, *, ignored: tuple[int, ...] = (2, 3, 21, 22)
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    hidden_TD = torch.randn(ROWS, WIDTH, generator=generator)
    weight_VD = torch.randn(WORDS, WIDTH, generator=generator)
    labels_T = torch.randint(0, WORDS, (ROWS,), generator=generator)
    labels_T[list(ignored)] = IGNORED
    return hidden_TD.requires_grad_(), weight_VD.requires_grad_(), labels_T


def plain_formula(
    hidden_TD: torch.Tensor, weight_VD: torch.Tensor, labels_T: torch.Tensor, smoothing: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Loss and nll, word by word: the target distribution has 1 - ε + ε/V at the label and ε/V elsewhere."""
    real = labels_T != IGNORED
    logits = hidden_TD.double()[real] @ weight_VD.double().t()
    logp = logits - logits.exp().sum(1, keepdim=True).log()
    wanted = torch.full_like(logp, smoothing / logp.shape[1])
    rows = torch.arange(len(logp))
    wanted[rows, labels_T[real]] += 1 - smoothing
    return -(wanted * logp).sum(), -logp[rows, labels_T[real]].sum()


def gradients(loss: torch.Tensor, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return torch.autograd.grad(loss, inputs)


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    return ((found.double() - expected.double()).norm() / expected.double().norm()).item()


def test_two_words_by_hand() -> None:
    # Logits (ln 3, 0): p = (3/4, 1/4).
    hidden_TD, weight_VD = torch.tensor([[math.log(3.0)]]), torch.tensor([[1.0], [0.0]])
    sums = smoothed_cross_entropy(hidden_TD, weight_VD, torch.tensor([0]), 0.1)
    assert sums.nll.item() == pytest.approx(math.log(4 / 3))
    assert sums.loss.item() == pytest.approx(0.95 * math.log(4 / 3) + 0.05 * math.log(4))
    assert sums.tokens.item() == 1


@SMOOTHINGS
def test_value_is_the_formula(smoothing: float) -> None:
    hidden_TD, weight_VD, labels_T = make_case()
    sums = smoothed_cross_entropy(hidden_TD, weight_VD, labels_T, smoothing)
    loss, nll = plain_formula(hidden_TD, weight_VD, labels_T, smoothing)
    assert sums.loss.item() == pytest.approx(loss.item(), rel=1e-6)
    assert sums.nll.item() == pytest.approx(nll.item(), rel=1e-6)
    assert sums.tokens.item() == ROWS - 4
    assert (sums.loss.dtype, sums.nll.dtype, sums.tokens.dtype) == (torch.float32, torch.float32, torch.int64)
    assert sums.loss.requires_grad
    assert not sums.nll.requires_grad


@SMOOTHINGS
def test_gradients_are_those_of_the_formula(smoothing: float) -> None:
    hidden_TD, weight_VD, labels_T = make_case(2)
    # A factor above the loss, as the engine puts one there, must reach both gradients.
    found = gradients(
        smoothed_cross_entropy(hidden_TD, weight_VD, labels_T, smoothing).loss * 0.37, hidden_TD, weight_VD
    )
    expected = gradients(plain_formula(hidden_TD, weight_VD, labels_T, smoothing)[0] * 0.37, hidden_TD, weight_VD)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
        assert relative(one, other) < 1e-5


@pytest.mark.parametrize("limit", ["_BLOCK_ELEMENTS", "_SOFTMAX_ELEMENTS"])
@pytest.mark.parametrize("rows", [0, 1, 2, 7, ROWS - 1, ROWS, ROWS + 1])
def test_block_size_changes_nothing(rows: int, limit: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A limit below the vocabulary, which has room for no row, gives single rows."""
    hidden_TD, weight_VD, labels_T = make_case(3)
    whole = smoothed_cross_entropy(hidden_TD, weight_VD, labels_T, 0.1)
    whole_gradients = gradients(whole.loss, hidden_TD, weight_VD)
    monkeypatch.setattr(module, "_ROWS_PER_WIDTH", 0)
    # One element less than the next row needs: division rounds down.
    monkeypatch.setitem(getattr(module, limit), "cpu", (rows + 1) * WORDS - 1)
    counts = {"_BLOCK_ELEMENTS": count_products(monkeypatch), "_SOFTMAX_ELEMENTS": count_softmax(monkeypatch)}[limit]
    in_blocks = smoothed_cross_entropy(hidden_TD, weight_VD, labels_T, 0.1)
    rows = max(rows, 1)
    assert counts == [min(rows, ROWS - start) for start in range(0, ROWS, rows)]
    torch.testing.assert_close(in_blocks, whole, rtol=1e-6, atol=0)
    for found, expected in zip(gradients(in_blocks.loss, hidden_TD, weight_VD), whole_gradients, strict=True):
        assert relative(found, expected) < 1e-6


def count_products(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Rows of the products from now on that give logits."""
    counts, mm = [], torch.mm

    def counting(x: torch.Tensor, y: torch.Tensor, *, out: torch.Tensor) -> torch.Tensor:
        if out.shape[1] == WORDS:
            counts.append(len(out))
        return mm(x, y, out=out)

    monkeypatch.setattr(torch, "mm", counting)
    return counts


def count_softmax(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Rows that pass through the softmax at a time."""
    counts: list[int] = []
    for name in ("_softmax_rows", "_softmax_rows_in_one_pass"):
        softmax = getattr(module, name)
        monkeypatch.setattr(
            module, name, lambda rows, *rest, softmax=softmax: counts.append(len(rows)) or softmax(rows, *rest)
        )
    return counts


@pytest.mark.parametrize("elements", [1, 3 * WIDTH, 36 * WIDTH, 37 * WIDTH])
def test_the_sums_of_words_may_be_taken_in_parts(elements: int, monkeypatch: pytest.MonkeyPatch) -> None:
    case = make_case(11)
    expected = gradients(smoothed_cross_entropy(*case, 0.1).loss, *case[:2])
    monkeypatch.setitem(module._SUMMED_ELEMENTS, "cpu", elements)
    for found, whole in zip(gradients(smoothed_cross_entropy(*case, 0.1).loss, *case[:2]), expected, strict=True):
        assert relative(found, whole) < 1e-6


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_not_finite_is_not_hidden(bad: float) -> None:
    hidden_TD, weight_VD, labels_T = make_case(12)
    with torch.no_grad():
        hidden_TD[0, 0] = bad
    sums = smoothed_cross_entropy(hidden_TD, weight_VD, labels_T, 0.1)
    assert not sums.loss.isfinite()
    assert not gradients(sums.loss, weight_VD)[0].isfinite().all()


def test_the_softmax_has_the_same_bits_for_any_number_of_threads() -> None:
    torch.manual_seed(13)
    logits, labels = torch.randn(50, 37), torch.randint(37, (50, 1))
    results = []
    for count in (1, 3):
        torch.set_num_threads(count)
        rows = logits.clone()
        results.append((*module._softmax_rows_in_one_pass(rows, labels, 0.1, True), rows))
    assert all(torch.equal(*pair) for pair in zip(*results, strict=True))


def test_a_wide_model_takes_more_rows_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(module._BLOCK_ELEMENTS, "cpu", 1)
    monkeypatch.setattr(module, "_ROWS_PER_WIDTH", 1)
    counts = count_products(monkeypatch)
    smoothed_cross_entropy(*make_case(4), 0.1)
    assert counts == [WIDTH, ROWS - WIDTH]


def test_ignored_rows_do_not_count_whatever_they_hold() -> None:
    hidden_TD, weight_VD, labels_T = make_case(5)
    wild_TD = hidden_TD.detach().clone()
    wild_TD[labels_T == IGNORED] = 1e30
    wild_TD.requires_grad_()
    quiet, wild = (smoothed_cross_entropy(rows, weight_VD, labels_T, 0.1) for rows in (hidden_TD, wild_TD))
    assert wild == quiet
    wild_hidden, wild_weight = gradients(wild.loss, wild_TD, weight_VD)
    quiet_hidden, quiet_weight = gradients(quiet.loss, hidden_TD, weight_VD)
    assert (wild_hidden[labels_T == IGNORED] == 0).all()
    assert torch.equal(wild_hidden, quiet_hidden)
    torch.testing.assert_close(wild_weight, quiet_weight, rtol=1e-6, atol=1e-6)


def test_nothing_to_count() -> None:
    hidden_TD, weight_VD, labels_T = make_case(6, ignored=tuple(range(ROWS)))
    sums = smoothed_cross_entropy(hidden_TD, weight_VD, labels_T, 0.1)
    assert [value.item() for value in sums] == [0.0, 0.0, 0]
    for gradient in gradients(sums.loss, hidden_TD, weight_VD):
        assert (gradient == 0).all()


@pytest.mark.parametrize("mode", ["no_grad", "constants"])
def test_without_gradients_none_is_computed(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    hidden_TD, weight_VD, labels_T = make_case(7)
    with_gradients = smoothed_cross_entropy(hidden_TD, weight_VD, labels_T, 0.1)
    mm = torch.mm

    def logits_only(x: torch.Tensor, y: torch.Tensor, *, out: torch.Tensor) -> torch.Tensor:
        assert out.shape == (ROWS, WORDS), "a gradient was computed"
        return mm(x, y, out=out)

    monkeypatch.setattr(torch, "mm", logits_only)
    if mode == "no_grad":
        with torch.no_grad():
            sums = smoothed_cross_entropy(hidden_TD, weight_VD, labels_T, 0.1)
    else:
        sums = smoothed_cross_entropy(hidden_TD.detach(), weight_VD.detach(), labels_T, 0.1)
    assert sums == with_gradients
    assert not sums.loss.requires_grad


def test_one_side_may_be_constant() -> None:
    hidden_TD, weight_VD, labels_T = make_case(8)
    both = gradients(smoothed_cross_entropy(hidden_TD, weight_VD, labels_T, 0.1).loss, hidden_TD, weight_VD)
    (alone,) = gradients(smoothed_cross_entropy(hidden_TD.detach(), weight_VD, labels_T, 0.1).loss, weight_VD)
    assert torch.equal(alone, both[1])
    (alone,) = gradients(smoothed_cross_entropy(hidden_TD, weight_VD.detach(), labels_T, 0.1).loss, hidden_TD)
    assert torch.equal(alone, both[0])


def test_bf16_is_close_to_fp32() -> None:
    hidden_TD, weight_VD, labels_T = make_case(9)
    half = [tensor.detach().bfloat16().requires_grad_() for tensor in (hidden_TD, weight_VD)]
    # The same rounded numbers in fp32: what is measured is the arithmetic.
    full = [tensor.detach().float().requires_grad_() for tensor in half]
    found, expected = (smoothed_cross_entropy(*pair, labels_T, 0.1) for pair in (half, full))
    assert found.loss.dtype == torch.float32
    assert found.loss.item() == pytest.approx(expected.loss.item(), rel=0.01)
    assert found.nll.item() == pytest.approx(expected.nll.item(), rel=0.01)
    for one, other in zip(gradients(found.loss, *half), gradients(expected.loss, *full), strict=True):
        assert one.dtype == torch.bfloat16
        assert relative(one, other) < 0.01


def test_softmax_of_bf16_logits_is_in_fp32() -> None:
    hidden_TD, weight_VD, labels_T = make_case(10)
    half = [tensor.detach().bfloat16() for tensor in (hidden_TD, weight_VD)]
    logits = functional.linear(*half).double()
    expected = functional.cross_entropy(logits, labels_T, reduction="sum", ignore_index=IGNORED)
    assert smoothed_cross_entropy(*half, labels_T, 0.1).nll.item() == pytest.approx(expected.item(), rel=1e-6)


def make_passes() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    hidden_TD, weight_VD, labels_T = make_case(14)
    other_TD = hidden_TD.detach() + torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(15))
    return hidden_TD, other_TD.requires_grad_(), weight_VD, labels_T


def rdrop_formula(
    hidden_TD: torch.Tensor, other_TD: torch.Tensor, weight_VD: torch.Tensor, labels_T: torch.Tensor, alpha: float
) -> torch.Tensor:
    """The mean of both losses, and α/2 times the mean of both divergences, from all logits in double precision."""
    losses = [plain_formula(rows, weight_VD, labels_T, 0.1)[0] for rows in (hidden_TD, other_TD)]
    p, q = (
        torch.softmax(rows.double()[labels_T != IGNORED] @ weight_VD.double().t(), 1) for rows in (hidden_TD, other_TD)
    )
    divergences = (p * (p / q).log()).sum() + (q * (q / p).log()).sum()
    return sum(losses) / 2 + alpha / 2 * divergences / 2


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("rows", [2, 6, 2 * ROWS])
def test_rdrop_is_the_formula(compiled: bool, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pass by pass, whether a block holds one pair of rows, several, or all; also in the form that is compiled."""
    monkeypatch.setattr(module, "_ROWS_PER_WIDTH", 0)
    # Room for one more row, which would part a pair.
    monkeypatch.setitem(module._BLOCK_ELEMENTS, "cpu", (rows + 1) * WORDS)
    monkeypatch.setitem(module._SOFTMAX_ELEMENTS, "cpu", 5 * WORDS)
    monkeypatch.setattr(module, "_compiled_softmax_rows", lambda: module._softmax_rows_without_scatter)
    case = make_passes()
    found, expected = rdrop_cross_entropy(*case, 0.1, 5.0, compiled=compiled), rdrop_formula(*case, 5.0)
    assert found.loss.item() == pytest.approx(expected.item(), rel=1e-6)
    assert found.tokens.item() == ROWS - 4
    assert found.nll.item() == pytest.approx(
        sum(plain_formula(rows_TD, *case[2:], 0.1)[1].item() for rows_TD in case[:2]) / 2, rel=1e-6
    )
    wanted = gradients(expected * 0.37, *case[:3])
    for one, other in zip(gradients(found.loss * 0.37, *case[:3]), wanted, strict=True):
        assert relative(one, other) < 2e-6


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("compiled", [False, True])
def test_on_a_gpu_rdrop_is_the_formula(compiled: bool) -> None:
    case = make_passes()
    on_gpu = [x.detach().cuda().requires_grad_() for x in case[:3]]
    found = rdrop_cross_entropy(*on_gpu, case[3].cuda(), 0.1, 5.0, compiled=compiled)
    expected = rdrop_formula(*case, 5.0)
    assert found.loss.item() == pytest.approx(expected.item(), rel=1e-5)
    for one, other in zip(gradients(found.loss, *on_gpu), gradients(expected, *case[:3]), strict=True):
        assert relative(one.cpu(), other) < 1e-5


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("compiled", [False, True])
def test_on_a_gpu_loss_and_gradient_are_the_same(compiled: bool) -> None:
    hidden_TD, weight_VD, labels_T = make_case()
    expected = smoothed_cross_entropy(hidden_TD, weight_VD, labels_T, 0.1)
    on_gpu = [x.detach().cuda().requires_grad_() for x in (hidden_TD, weight_VD)]
    found = smoothed_cross_entropy(*on_gpu, labels_T.cuda(), 0.1, compiled=compiled)
    assert found.tokens.item() == expected.tokens.item()
    for one, other in ((found.loss, expected.loss), (found.nll, expected.nll)):
        assert one.item() == pytest.approx(other.item(), rel=1e-5)
    wanted = gradients(expected.loss, hidden_TD, weight_VD)
    for one, other in zip(gradients(found.loss, *on_gpu), wanted, strict=True):
        assert relative(one.cpu(), other) < 1e-5
