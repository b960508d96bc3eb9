"""Samples against the distributions that they are drawn from."""

import numpy as np
import pytest
import torch

from dist_transformer.base.errors import UserError
from dist_transformer.config.settings import ModelConfig
from dist_transformer.inference import sampling
from dist_transformer.inference.sampling import SamplingSettings, draw, sample
from dist_transformer.model.transformer import Transformer
from tests.inference.test_beam import BOS, EOS, PAD, UNK, make_model, make_sources, packed

SEARCH = {"max_extra_tokens": 8, "length_penalty": 0.6}


def keys_of(count: int) -> list[tuple[int, int]]:
    return [(line, 0) for line in range(count)]


@torch.no_grad()
def next_logp(model: Transformer, source: list[int], tokens: list[int]) -> torch.Tensor:
    """Compute the log-probabilities of the next token without caches."""
    memory_SD = model.encode(packed([[*source, EOS]]))
    hidden_TD = model.decode(packed([[BOS, *tokens]]), memory_SD, packed([[*source, EOS]]))
    return torch.log_softmax(model.logits(hidden_TD[-1]), dim=-1)


def greedy(model: Transformer, source: list[int], extra: int) -> tuple[list[int], float]:
    tokens: list[int] = []
    total = 0.0
    while True:
        logp = next_logp(model, source, tokens)
        allowed = logp.clone()
        allowed[[PAD, UNK, BOS]] = -torch.inf
        token = EOS if len(tokens) == len(source) + extra else int(allowed.argmax())
        total += float(logp[token])
        if token == EOS:
            return tokens, total
        tokens.append(token)


@pytest.mark.parametrize("output_bias", [False, True])
def test_the_most_probable_token_alone_is_greedy(output_bias: bool) -> None:
    model, sources = make_model(output_bias=output_bias), make_sources(12)
    found = sample(model, sources, keys_of(12), settings=SamplingSettings(top_k=1), **SEARCH)  # type: ignore[arg-type]
    expected = [greedy(model, source, 8) for source in sources]
    assert [one.tokens for one in found] == [tokens for tokens, _ in expected]
    assert len({len(one.tokens) for one in found}) > 3, "sentences end at different steps"
    for one, (tokens, total) in zip(found, expected, strict=True):
        assert one.log_probability == pytest.approx(total, abs=1e-4)
        assert one.score == pytest.approx(total / ((5 + len(tokens) + 1) / 6) ** 0.6, abs=1e-4)


def test_a_sample_does_not_depend_on_its_batch() -> None:
    model, sources = make_model(), make_sources(20)
    settings = SamplingSettings(seed=7)
    keys = [(line, line % 3) for line in range(20)]
    together = sample(model, sources, keys, settings=settings, **SEARCH)  # type: ignore[arg-type]
    for place in (0, 7, 19):
        (alone,) = sample(model, [sources[place]], [keys[place]], settings=settings, **SEARCH)  # type: ignore[arg-type]
        assert alone.tokens == together[place].tokens
    one = [sources[5]] * 4
    drawn = sample(model, one, [(0, 0), (0, 1), (1, 0), (0, 0)], settings=settings, **SEARCH)  # type: ignore[arg-type]
    assert drawn[0].tokens == drawn[3].tokens
    assert len({tuple(each.tokens) for each in drawn}) == 3
    other = sample(model, one[:1], [(0, 0)], settings=SamplingSettings(seed=8), **SEARCH)  # type: ignore[arg-type]
    assert other[0].tokens != drawn[0].tokens
    assert sample(model, [], [], settings=settings, **SEARCH) == []  # type: ignore[arg-type]


@pytest.mark.parametrize(("top_k", "temperature"), [(None, 1.0), (5, 1.0), (None, 2.0), (3, 0.5)])
def test_first_tokens_are_as_frequent_as_they_are_probable(top_k: int | None, temperature: float) -> None:
    model, source, count = make_model(sharpness=1.5), [5, 6, 7], 4000
    settings = SamplingSettings(seed=3, top_k=top_k, temperature=temperature)
    found = sample(model, [source] * count, keys_of(count), settings=settings, max_extra_tokens=0, length_penalty=0.0)
    logp = next_logp(model, source, []).double()
    logp[[PAD, UNK, BOS]] = -torch.inf
    if top_k is not None:
        logp[logp < logp.topk(top_k).values[-1]] = -torch.inf
    expected = torch.softmax(logp / temperature, dim=0).numpy()
    counts = np.bincount([one.tokens[0] if one.tokens else EOS for one in found], minlength=len(expected))
    assert counts[expected == 0].sum() == 0
    # Of 23 tokens none is further from its mean than this but once in 10,000 tests.
    deviation = np.sqrt(count * expected * (1 - expected))
    assert (np.abs(counts - count * expected) <= 4.5 * deviation + 1e-9).all()
    assert (expected > 0.02).sum() >= 2, "one token takes it all"
    assert max(len(one.tokens) for one in found) <= len(source)


def test_a_number_draws_the_token_whose_share_it_lies_in() -> None:
    """Computed by hand: p = 0.25, 0.5, 0.25; the squares, 1 : 4 : 1; of the best two, 1 : 2, in order of ids."""
    logp_RV = torch.tensor([-torch.inf, 0.25, 0.5, -torch.inf, 0.25]).clamp(min=0).log().expand(5, -1).contiguous()
    numbers_R = torch.tensor([0.0, 0.2, 0.3, 0.7, 1 - 2**-53], dtype=torch.float64)
    assert draw(logp_RV, numbers_R, SamplingSettings()).tolist() == [1, 1, 2, 2, 4]
    assert draw(logp_RV, numbers_R, SamplingSettings(temperature=0.5)).tolist() == [1, 2, 2, 2, 4]
    assert draw(logp_RV, numbers_R, SamplingSettings(top_k=2)).tolist() == [1, 1, 1, 2, 2]
    assert draw(logp_RV, numbers_R, SamplingSettings(temperature=1e-6)).tolist() == [2, 2, 2, 2, 2]


def test_a_large_vocabulary_is_drawn_from_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    model, sources = make_model(), make_sources(9)
    whole = sample(model, sources, keys_of(9), settings=SamplingSettings(), **SEARCH)  # type: ignore[arg-type]
    monkeypatch.setattr(sampling, "_ELEMENTS", {"cpu": 2 * 23})
    parts = sample(model, sources, keys_of(9), settings=SamplingSettings(), **SEARCH)  # type: ignore[arg-type]
    assert [one.tokens for one in parts] == [one.tokens for one in whole]


def test_a_model_whose_numbers_are_not_finite_comes_to_an_end() -> None:
    model = Transformer(ModelConfig(width=16, heads=2, ffn_width=32, vocab_size=23, max_positions=64)).eval()
    with torch.no_grad():
        model.embedding.fill_(torch.nan)
    (found,) = sample(model, [[5]], [(0, 0)], settings=SamplingSettings(), **SEARCH)  # type: ignore[arg-type]
    assert len(found.tokens) <= 9


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"seed": -1}, "seed is -1"),
        ({"top_k": 0}, "top_k is 0: give 1"),
        ({"temperature": 0.0}, "temperature is 0.0: give a number above 0"),
    ],
)
def test_settings_that_make_no_sense_are_refused(settings: dict[str, float], said: str) -> None:
    with pytest.raises(UserError, match=said):
        SamplingSettings(**settings)  # type: ignore[arg-type]
