"""The hypothesis with the best sentence BLEU, by hand."""

from dist_transformer.evaluation.closest import Closest
from dist_transformer.inference.translator import ScoredText, Translation


def chosen(*texts: str, reference: str, language: str = "de", lowercase: bool = False) -> str:
    hypotheses = tuple(ScoredText(text=text, score=-float(rank), tokens=()) for rank, text in enumerate(texts))
    translation = Translation(hypotheses=hypotheses, beyond_training=True)
    found = Closest(language, lowercase=lowercase)(translation, reference)
    (one,) = found.hypotheses
    assert (one, found.beyond_training) == (hypotheses[texts.index(one.text)], True)
    return one.text


def test_the_best_sentence_bleu_wins_and_among_equals_the_model() -> None:
    # 1-, 2-, 3- and 4-gram precisions against five tokens: 5/5 4/4 3/3 2/2; 4/5 2/4 1/3 0.5/2.
    assert chosen("x y z", "a b c x e", "a b c d e", reference="a b c d e") == "a b c d e"
    assert chosen("x", "y", reference="a b") == "x"
    assert chosen("x", "y", reference="") == "x"
    # Without an order that the hypothesis lacks, a short equal text is perfect.
    assert chosen("a c", "a b", reference="a b") == "a b"


def test_case_counts_unless_the_model_writes_no_capitals() -> None:
    texts = ("ein hund rennt hier", "Der Hund läuft dort")
    assert chosen(*texts, reference="Ein Hund rennt dort") == texts[1]
    assert chosen(*texts, reference="Ein Hund rennt dort", lowercase=True) == texts[0]


def test_characters_count_in_chinese() -> None:
    assert chosen("我们你们", "他们都好", reference="他们很好", language="zh") == "他们都好"
