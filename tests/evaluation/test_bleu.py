import pytest

from dist_transformer.errors import UserError
from dist_transformer.evaluation.bleu import bleu_tokenizer, score

HYPOTHESES = ["The dog bit the man.", "It was not unexpected.", "The man bit him first."]
REFERENCES = ["The dog had bit the man.", "No one was surprised.", "The man had bitten the dog."]


def test_english_by_hand() -> None:
    scores = score(HYPOTHESES, REFERENCES, target_language="en")
    # n-gram matches 11/17, 5/14, 2/11, 1/8; brevity penalty exp(1 - 19/17).
    assert scores.bleu == pytest.approx(23.9326, abs=1e-4)
    # 1 + 4 + 4 edits of 6 + 4 + 6 words.
    assert scores.ter == 56.25
    assert scores.chrf == pytest.approx(36.3762, abs=1e-4)
    assert scores.bleu_signature.startswith("nrefs:1|case:mixed|eff:no|tok:13a|smooth:exp|version:")
    assert scores.signatures == {
        "bleu": scores.bleu_signature,
        "chrf": scores.chrf_signature,
        "ter": scores.ter_signature,
    }
    assert f"BLEU  23.93  {scores.bleu_signature}" in str(scores)


def test_chinese_by_hand() -> None:
    scores = score(["我喜欢狗。"], ["我喜欢猫。"], target_language="zh")
    # Characters: 4/5, 2/4, 1/3, and 0/2 smoothed to 1/4.
    assert scores.bleu == pytest.approx(100 * (4 / 5 * 2 / 4 * 1 / 3 * 1 / 4) ** 0.25, abs=1e-4)
    assert scores.ter == pytest.approx(20.0)
    assert "tok:zh" in scores.bleu_signature
    assert "asian:yes" in scores.ter_signature


def test_case_counts_unless_asked() -> None:
    upper = [line.upper() for line in REFERENCES]
    assert score(upper, REFERENCES, target_language="de").bleu < 20
    scores = score(upper, REFERENCES, target_language="de", lowercase=True)
    assert scores.bleu == pytest.approx(100)
    assert scores.chrf == pytest.approx(100)
    assert "case:lc" in scores.bleu_signature


@pytest.mark.parametrize(
    ("language", "name"),
    [("de", "13a"), ("zh", "zh"), ("zh-CN", "zh"), ("zh_Hant", "zh"), ("ZH", "zh"), ("ja", "char"), ("ko", "char")],
)
def test_the_tokeniser_follows_the_language(language: str, name: str) -> None:
    assert bleu_tokenizer(language) == name
    assert f"tok:{name}" in score(["一 a"], ["一 a"], target_language=language).bleu_signature


def test_counts_must_agree() -> None:
    with pytest.raises(UserError, match="2 hypotheses and 3 references"):
        score(HYPOTHESES[:2], REFERENCES, target_language="en")
    with pytest.raises(UserError, match="no references"):
        score([], [], target_language="en")
