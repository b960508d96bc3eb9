"""Samples against the distributions that they are drawn from."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from dist_transformer.base.errors import UserError
from dist_transformer.config.settings import ModelConfig
from dist_transformer.inference import sampling
from dist_transformer.inference.decoding import Decoding
from dist_transformer.inference.sampling import draw, sample, sample_several
from dist_transformer.model.transformer import Transformer
from tests.inference.test_beam import BOS, EOS, PAD, UNK, make_model, make_sources, packed


def drawing(**settings: Any) -> Decoding:
    return Decoding(sample=True, max_extra_tokens=8, **settings)


def keys_of(count: int) -> list[tuple[int, int]]:
    return [(line, 0) for line in range(count)]


@torch.no_grad()
def next_logp(model: Transformer, source: list[int], tokens: list[int]) -> torch.Tensor:
    """Compute the log-probabilities of the next token without caches."""
    memory_SD = model.encode(packed([[*source, EOS]]))
    hidden_TD = model.decode(packed([[BOS, *tokens]]), memory_SD, packed([[*source, EOS]]))
    return torch.log_softmax(model.logits(hidden_TD[-1]), dim=-1)


def truncated(
    p: list[float],
    *,
    top_k: int = 10**6,
    top_p: float = 1.0,
    epsilon: float = 0.0,
    temperature: float = 1.0,
) -> np.ndarray:
    """Return the distribution of samples from p."""
    powers, before = [0.0] * len(p), 0.0
    for rank, token in enumerate(sorted(range(len(p)), key=lambda token: -p[token])):
        if rank == 0 or (rank < top_k and before < top_p and p[token] >= epsilon):
            powers[token] = p[token] ** (1 / temperature)
        before += p[token]
    return np.array(powers) / sum(powers)


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
    found = sample(model, sources, keys_of(12), settings=drawing(top_k=1))
    expected = [greedy(model, source, 8) for source in sources]
    assert [one.tokens for one in found] == [tokens for tokens, _ in expected]
    assert len({len(one.tokens) for one in found}) > 3, "sentences end at different steps"
    for one, (tokens, total) in zip(found, expected, strict=True):
        assert one.log_probability == pytest.approx(total, abs=1e-4)
        assert one.score == pytest.approx(total / ((5 + len(tokens) + 1) / 6) ** 0.6, abs=1e-4)


def test_a_sample_does_not_depend_on_its_batch() -> None:
    model, sources = make_model(), make_sources(20)
    settings = drawing(seed=7)
    keys = [(line, line % 3) for line in range(20)]
    together = sample(model, sources, keys, settings=settings)
    for place in (0, 7, 19):
        (alone,) = sample(model, [sources[place]], [keys[place]], settings=settings)
        assert alone.tokens == together[place].tokens
    one = [sources[5]] * 4
    drawn = sample(model, one, [(0, 0), (0, 1), (1, 0), (0, 0)], settings=settings)
    assert drawn[0].tokens == drawn[3].tokens
    assert len({tuple(each.tokens) for each in drawn}) == 3
    other = sample(model, one[:1], [(0, 0)], settings=drawing(seed=8))
    assert other[0].tokens != drawn[0].tokens
    assert sample(model, [], [], settings=settings) == []


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"top_k": 5},
        {"temperature": 2.0},
        {"top_k": 3, "temperature": 0.5},
        {"top_p": 0.6},
        {"epsilon": 0.05},
        {"epsilon": 0.9},
        {"top_p": 0.8, "epsilon": 0.02, "top_k": 9, "temperature": 1.5},
    ],
    ids=str,
)
def test_first_tokens_are_as_frequent_as_they_are_probable(given: dict[str, Any]) -> None:
    """The truncated distribution is computed in Python, token by token."""
    model, source, count = make_model(sharpness=1.5), [5, 6, 7], 4000
    settings = Decoding(sample=True, seed=3, max_extra_tokens=0, **given)
    found = sample(model, [source] * count, keys_of(count), settings=settings)
    logp = next_logp(model, source, []).double()
    logp[[PAD, UNK, BOS]] = -torch.inf
    expected = truncated(torch.softmax(logp, dim=0).tolist(), **given)
    counts = np.bincount([one.tokens[0] if one.tokens else EOS for one in found], minlength=len(expected))
    assert counts[expected == 0].sum() == 0
    # Of 23 tokens none is further from its mean than this but once in 10,000 tests.
    deviation = np.sqrt(count * expected * (1 - expected))
    assert (np.abs(counts - count * expected) <= 4.5 * deviation + 1e-9).all()
    assert (expected > 0.02).sum() >= 2 or given == {"epsilon": 0.9}, "one token takes it all"
    assert max(len(one.tokens) for one in found) <= len(source)


def test_a_number_draws_the_token_whose_share_it_lies_in() -> None:
    """Computed by hand: p = 0.25, 0.5, 0.25; the squares, 1 : 4 : 1; of the best two, 1 : 2, in order of ids."""
    logp_RV = torch.tensor([-torch.inf, 0.25, 0.5, -torch.inf, 0.25]).clamp(min=0).log().expand(5, -1).contiguous()
    numbers_R = torch.tensor([0.0, 0.2, 0.3, 0.7, 1 - 2**-53], dtype=torch.float64)
    assert draw(logp_RV, numbers_R, Decoding()).tolist() == [1, 1, 2, 2, 4]
    assert draw(logp_RV, numbers_R, Decoding(temperature=0.5)).tolist() == [1, 2, 2, 2, 4]
    assert draw(logp_RV, numbers_R, Decoding(top_k=2)).tolist() == [1, 1, 1, 2, 2]
    assert draw(logp_RV, numbers_R, Decoding(temperature=1e-6)).tolist() == [2, 2, 2, 2, 2]
    # The first token is enough for 0.45; 0.7 takes the first of the two others too, and 0.8 all.
    assert draw(logp_RV, numbers_R, Decoding(top_p=0.45)).tolist() == [2, 2, 2, 2, 2]
    assert draw(logp_RV, numbers_R, Decoding(top_p=0.7)).tolist() == [1, 1, 1, 2, 2]
    assert draw(logp_RV, numbers_R, Decoding(top_p=0.8)).tolist() == [1, 1, 2, 2, 4]
    assert draw(logp_RV, numbers_R, Decoding(epsilon=0.24)).tolist() == [1, 1, 2, 2, 4]
    assert draw(logp_RV, numbers_R, Decoding(epsilon=0.26)).tolist() == [2, 2, 2, 2, 2]
    # The most probable token is left.
    assert draw(logp_RV, numbers_R, Decoding(epsilon=0.9)).tolist() == [2, 2, 2, 2, 2]


def spelled(tokens: Sequence[int]) -> str:
    """Texts of three letters, so that several outputs have the same."""
    return "".join("abc"[token % 3] for token in tokens)


def test_several_samples_of_a_sentence() -> None:
    """The first is that of one sample alone, and the others do not depend on how many there are, nor on the batch."""
    model, sources = make_model(), make_sources(6)
    settings = drawing(seed=7, nbest=5, top_p=0.95)
    found = sample_several(model, sources, keys_of(6), settings=settings, text_of=spelled)
    assert [len(each) for each in found] == [5] * 6
    one = sample(model, sources, keys_of(6), settings=replace(settings, nbest=1))
    assert [each[0].tokens for each in found] == [each.tokens for each in one]
    (alone,) = sample_several(
        model, sources[4:5], keys_of(6)[4:5], settings=replace(settings, nbest=3), text_of=spelled
    )
    assert [each.tokens for each in alone] == [each.tokens for each in found[4][:3]]
    assert all(len({tuple(each.tokens) for each in row}) > 1 for row in found)


def test_distinct_samples_are_the_first_of_their_texts() -> None:
    model, sources = make_model(sharpness=6.0), make_sources(8, longest=4)
    settings = drawing(seed=2, nbest=4)
    many = sample_several(model, sources, keys_of(8), settings=replace(settings, nbest=40), text_of=spelled)
    distinct = replace(settings, distinct=True)
    found = sample_several(model, sources, keys_of(8), settings=distinct, text_of=spelled)
    for row, drawn in zip(found, many, strict=True):
        first = {spelled(each.tokens): each.tokens for each in reversed(drawn)}
        order = list(dict.fromkeys(spelled(each.tokens) for each in drawn))[:4]
        assert [each.tokens for each in row] == [first[text] for text in order]
    assert any(len({spelled(each.tokens) for each in drawn[:4]}) < 4 for drawn in many), "nothing was drawn twice"
    # Of one text there is one sample.
    greedy_ones = sample_several(model, sources, keys_of(8), settings=replace(distinct, top_k=1), text_of=spelled)
    assert [len(row) for row in greedy_ones] == [1] * 8


def test_a_large_vocabulary_is_drawn_from_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    model, sources = make_model(), make_sources(9)
    whole = sample(model, sources, keys_of(9), settings=drawing())
    monkeypatch.setattr(sampling, "_ELEMENTS", {"cpu": 2 * 23})
    parts = sample(model, sources, keys_of(9), settings=drawing())
    assert [one.tokens for one in parts] == [one.tokens for one in whole]


def test_a_model_whose_numbers_are_not_finite_comes_to_an_end() -> None:
    model = Transformer(ModelConfig(width=16, heads=2, ffn_width=32, vocab_size=23, max_positions=64)).eval()
    with torch.no_grad():
        model.embedding.fill_(torch.nan)
    (found,) = sample(model, [[5]], [(0, 0)], settings=drawing())
    assert len(found.tokens) <= 9


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"seed": -1}, "seed is -1"),
        ({"top_k": 0}, "top_k is 0: it must be above 0"),
        ({"top_p": 0.0}, "top_p is 0.0: it must be above 0"),
        ({"top_p": 1.1}, "top_p is 1.1: it must be a probability, up to 1"),
        ({"epsilon": 1.0}, "epsilon is 1.0: it must be 0 or more, and below 1"),
        ({"nbest": 0}, "nbest is 0: it must be above 0"),
        ({"temperature": 0.0}, "temperature is 0.0: it must be above 0"),
        ({"beam": 0}, "beam is 0"),
        ({"sample": False, "mbr": 1}, "mbr is 1: set 2 to 1,000 samples per line"),
        ({"sample": False, "mbr": 4, "nbest": 5}, "nbest is 5: it must be 1 up to the 4 samples of mbr"),
        ({"length_penalty": -0.1}, "length_penalty is -0.1"),
        ({"length_penalty": math.nan}, "length_penalty is nan"),
        ({"max_extra_tokens": -1}, "max_extra_tokens is -1"),
        ({"sample": False, "nbest": 5}, "nbest is 5: it must be 1 up to the 4 hypotheses of beam"),
    ],
)
def test_settings_that_make_no_sense_are_refused(settings: dict[str, float], said: str) -> None:
    with pytest.raises(UserError, match=said):
        Decoding(**{"sample": True, **settings})  # type: ignore[arg-type]
