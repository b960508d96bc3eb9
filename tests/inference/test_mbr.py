"""Utilities against sacreBLEU's own classes, pair by pair, and the choice against its definition."""

import random
from pathlib import Path

import numpy as np
import pytest
from sacrebleu.metrics.bleu import BLEU
from sacrebleu.metrics.chrf import CHRF

import dist_transformer
from dist_transformer.base.errors import UserError
from dist_transformer.inference import mbr
from dist_transformer.inference.decoding import Decoding
from dist_transformer.inference.mbr import choose, pairwise_utilities

Lines = tuple[list[str], list[str]]
TEXTS = [
    "Der alte Mann sieht den kleinen Hund.",
    "Der alte Mann sieht einen Hund.",
    "der Hund",
    "Hund",
    "H",
    "",
    "   ",
    "aaaaaaaa aaa aaaa",
    "aaaa aaa aaaaaaaa a",
    "3,5 % — „so“, sagt's (er).",
    "Ein ganz anderer Satz ohne Bezug",
    "x y x y x y",
    "y x y x  y x ",
]
CHINESE = ["北京很大。", "北京 很大", "大北京", "我 在 Berlin 3 号。", ""]


def texts_of(language: str) -> list[str]:
    rng = random.Random(3)
    base = TEXTS if language == "de" else CHINESE
    mixed = [" ".join(rng.choices(" ".join(base).split(), k=rng.randrange(1, 30))) for _ in range(20)]
    return [*base, *mixed]


@pytest.mark.parametrize("language", ["de", "zh"])
def test_chrf_is_that_of_sacrebleu(language: str, monkeypatch: pytest.MonkeyPatch) -> None:
    texts, metric = texts_of(language), CHRF()
    expected = [[metric.sentence_score(one, [other]).score for other in texts] for one in texts]
    found = pairwise_utilities(texts, "chrf", language=language)
    np.testing.assert_allclose(found, expected, rtol=1e-12, atol=1e-12)
    # In many blocks of n-grams, and in one.
    monkeypatch.setattr(mbr, "_BLOCK", 7)
    np.testing.assert_array_equal(pairwise_utilities(texts, "chrf", language=language), found)


@pytest.mark.parametrize(("language", "tokenizer"), [("de", "13a"), ("zh", "zh")])
def test_bleu_is_that_of_sacrebleu(language: str, tokenizer: str) -> None:
    texts, metric = texts_of(language), BLEU(tokenize=tokenizer, effective_order=True)
    expected = [[metric.sentence_score(one, [other]).score for other in texts] for one in texts]
    np.testing.assert_array_equal(pairwise_utilities(texts, "bleu", language=language), expected)


@pytest.mark.parametrize("utility", ["chrf", "bleu"])
def test_the_choice_has_the_highest_mean_over_all_samples(utility: str) -> None:
    """A text that was drawn three times counts three times, and has the place of its first."""
    texts = ["ein Hund", "der alte Mann sieht", "ein Hund", "der alte Mann", "ein Hund bellt", "ein Hund"]
    metric = CHRF() if utility == "chrf" else BLEU(effective_order=True)
    expected = [sum(metric.sentence_score(one, [other]).score for other in texts) / len(texts) for one in texts]
    found = choose(texts, Decoding(mbr=6, utility=utility, nbest=6), language="de")  # type: ignore[arg-type]
    assert [place for place, _ in found] == sorted((0, 1, 3, 4), key=lambda i: -expected[i])
    assert [value for _, value in found] == pytest.approx([expected[place] for place, _ in found])
    # Equal utilities are in the order of the samples.
    assert choose(["b", "a"], Decoding(mbr=2, nbest=2), language="de") == [(0, 50.0), (1, 50.0)]


def test_of_a_model(model_folder: Path, toy_lines: Lines) -> None:
    model = dist_transformer.load(model_folder, device="cpu")
    lines, way = [*toy_lines[0][:3], "", " ".join(toy_lines[0][:20])], {"max_extra_tokens": 3, "split_over": "no"}
    with pytest.warns(UserWarning, match="translated in parts") as warned:
        found = model.mbr(lines, samples=8, nbest=2, epsilon=0.01, **way)
    # The warning names the line of the caller.
    assert warned[0].filename == __file__
    drawn = model.sample(lines[:3], samples=8, epsilon=0.01, **way)
    settings = Decoding(mbr=8, nbest=2)
    for chosen, samples in zip(found, drawn, strict=False):
        texts = [one.text for one in samples]
        expected = choose(texts, settings, language="de")
        assert [(one.text, one.score) for one in chosen] == [(texts[place], value) for place, value in expected]
    assert [one.text for one in found[3]] == [""]
    assert found[4][0].text
    (with_prefix,) = model.mbr(lines[:1], samples=4, prefixes=["der"], **way)
    assert with_prefix[0].text.startswith("der")
    assert model.mbr(lines[0], samples=4, **way) == model.mbr(lines[:1], samples=4, **way)
    with pytest.raises(UserError, match=r"^in mbr, utilty is not a setting here: did you mean utility\?$"):
        model.mbr(lines, samples=4, utilty="bleu")
    with pytest.raises(
        UserError, match=r"^beam has no effect with mbr, which draws samples without a search: leave beam or mbr"
    ):
        model.mbr(lines, samples=4, beam=2)
