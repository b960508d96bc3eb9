import shutil

import numpy as np
import pytest
import torch
from torch.nn import functional

from dist_transformer.config.settings import ModelConfig
from dist_transformer.inference import candidates
from dist_transformer.inference.candidates import best_extensions, largest
from dist_transformer.model.transformer import Transformer

EOS = 3


@pytest.mark.parametrize("width", [8, 40, 64 * 40, 64 * 40 + 23])
def test_equal_values_go_by_place(width: int) -> None:
    """Against a stable sort: few distinct values, none equal, and some of -inf; rows of whole blocks and of a rest."""
    rng = np.random.default_rng(0)
    values = torch.from_numpy(rng.integers(-3, 3, (200, width)).astype(np.float32))
    values[::3] += torch.from_numpy(rng.normal(size=(67, width)).astype(np.float32))
    values[::5, ::7] = -torch.inf
    expected = values.sort(dim=1, descending=True, stable=True)
    for rows in (slice(None), slice(0, None, 3)):
        found_values, found_places = largest(values[rows], 8)
        assert torch.equal(found_values, expected.values[rows, :8])
        assert torch.equal(found_places, expected.indices[rows, :8])


def test_the_largest_may_share_a_block_or_lie_in_the_rest() -> None:
    values = torch.zeros(4, 64 * 40 + 5) - torch.rand(4, 64 * 40 + 5)
    values[0, 70:78] = torch.arange(1.0, 9.0)
    values[1, -5:-1] = torch.arange(1.0, 5.0)
    values[2, ::400] = 1.0 + torch.arange(7.0)
    # A later block has the larger maximum, an earlier one the first of equal values.
    values[3, [130, 140, 330, 340]] = torch.tensor([8.0, 3.0, 9.0, 3.0])
    found_values, found_places = largest(values, 6)
    expected = values.sort(dim=1, descending=True, stable=True)
    assert torch.equal(found_values, expected.values[:, :6])
    assert torch.equal(found_places, expected.indices[:, :6])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocabulary", [5, 15, 16, 64, 65, 1000, 64 * 40 + 23])
def test_compiled_selection_is_that_of_a_stable_sort(vocabulary: int, dtype: torch.dtype) -> None:
    """Few distinct values, or none equal, or some of -inf; in one case fewer tokens are left than are asked for."""
    if shutil.which("g++") is None:
        pytest.skip("no compiler")
    rng = np.random.default_rng(vocabulary)
    logits = torch.from_numpy(rng.integers(-3, 3, (60, vocabulary)).astype(np.float32))
    logits[::3] += torch.from_numpy(rng.normal(size=(20, vocabulary), scale=20).astype(np.float32))
    logits[::5, 4::7] = -torch.inf
    logits = logits.to(dtype)
    never, count = torch.tensor([0, 1, 2]), min(8, vocabulary)
    values, tokens, ends = candidates._select_compiled(logits, count, never)
    logp = torch.log_softmax(logits.double(), dim=-1)
    torch.testing.assert_close(ends.double(), logp[:, EOS], rtol=1e-6, atol=1e-5)
    order = logits.float().index_fill(1, never, -torch.inf).sort(dim=1, descending=True, stable=True)
    is_left = order.values[:, :count] > -torch.inf
    assert torch.equal(tokens[is_left], order.indices[:, :count][is_left])
    assert torch.equal(values > -torch.inf, is_left)
    torch.testing.assert_close(values.double()[is_left], logp.gather(1, tokens)[is_left], rtol=1e-6, atol=1e-5)


def test_numbers_that_are_not_finite_stay_so() -> None:
    """Search ends by them: a sentence without a comparable score is done."""
    if shutil.which("g++") is None:
        pytest.skip("no compiler")
    logits = torch.full((2, 40), torch.nan)
    logits[1, 7] = torch.inf
    values, _, ends = candidates._select_compiled(logits, 4, torch.tensor([0]))
    assert not values.isfinite().any()
    assert not ends.isfinite().any()


@pytest.mark.parametrize("compiles", [False, True])
@pytest.mark.parametrize("elements", [1, 23 * 5, 2**19])
def test_extensions_against_the_whole_softmax(elements: int, compiles: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """However few rows are computed at a time; the second sentence may only end."""
    if compiles and shutil.which("g++") is None:
        pytest.skip("no compiler")
    monkeypatch.setattr(candidates, "_ELEMENTS", {"cpu": elements, "compiled": elements})
    monkeypatch.setattr(candidates, "_compiles", lambda _: compiles)
    torch.manual_seed(1)
    model = Transformer(
        ModelConfig(width=16, heads=2, ffn_width=32, encoder_layers=1, decoder_layers=1, vocab_size=23)
    ).eval()
    hidden_BD = torch.randn(9, model.config.width)
    alive_logp_Nk = -torch.rand(3, 3)
    never = torch.tensor([0, 1, 2])
    with torch.no_grad():
        value, hypothesis, token, _ = best_extensions(
            model,
            hidden_BD,
            alive_logp_Nk,
            linear=functional.linear,
            count=4,
            never=never,
            ends_only_N=torch.tensor([False, True, False]),
        )
        total = torch.log_softmax(hidden_BD @ model.embedding.T, dim=-1).view(3, 3, 23) + alive_logp_Nk.unsqueeze(2)
    total[:, :, :3] = -torch.inf
    total[1, :, torch.arange(23) != EOS] = -torch.inf
    expected = total.flatten(1).sort(dim=1, descending=True, stable=True)
    finite = expected.values[:, :4] > -torch.inf
    assert finite.sum(1).tolist() == [4, 3, 4]
    torch.testing.assert_close(value, expected.values[:, :4])
    assert torch.equal((hypothesis * 23 + token)[finite], expected.indices[:, :4][finite])
