"""Sampled segmentations: their probabilities, their seeds, and without chance those of the libraries."""

import io
import math
from collections import Counter
from random import Random

import pytest
import sentencepiece

from dist_transformer.data.vocabulary.kinds import Learning
from dist_transformer.data.vocabulary.segmentation import draw, merge
from dist_transformer.data.vocabulary.sentence_piece import wrap_sentence_piece
from dist_transformer.data.vocabulary.tokenizer import Tokenizer
from dist_transformer.export.hostile import HOSTILE

Lines = tuple[list[str], list[str]]
DRAWS = 4000


@pytest.fixture(
    scope="module",
    params=["byte-bpe", "sentencepiece", "sentencepiece bytes", "sentencepiece-bpe", "sentencepiece-bpe bytes"],
)
def tokenizer(request: pytest.FixtureRequest, toy_lines: Lines) -> Tokenizer:
    kind, _, more = request.param.partition(" ")
    size = {"byte-bpe": 400, "sentencepiece": 150, "sentencepiece-bpe": 150}[kind] + 256 * bool(more)
    return Learning(kind=kind, vocab_size=size, tags=("<2de>",), byte_fallback=bool(more)).learn(toy_lines[0])


def test_without_chance_it_is_the_encoding(tokenizer: Tokenizer, toy_lines: Lines) -> None:
    texts = [*toy_lines[0][:50], *(() if tokenizer.sampled_by == "alpha" else HOSTILE)]
    strength = {"dropout": 0.0, "alpha": 1e6}[str(tokenizer.sampled_by)]
    for text in texts:
        assert tokenizer.sample(text, strength, [1, 2]) == [tokenizer.encode(text)] * 2, text


def test_every_sample_is_the_text(tokenizer: Tokenizer, toy_lines: Lines) -> None:
    found = set()
    for text in toy_lines[0][:20]:
        samples = tokenizer.sample(text, 0.2, range(20))
        assert {tokenizer.decode(row) for row in samples} == {tokenizer.normalize(text)}
        found.add(len({tuple(row) for row in samples}))
    assert min(found) > 5
    # Everything is left out, or equally probable.
    most = {"dropout": 1.0, "alpha": 0.0}[str(tokenizer.sampled_by)]
    assert max(map(len, tokenizer.sample("hungry", most, range(9)))) > len(tokenizer.encode("hungry"))


def test_a_sample_depends_on_its_seed_alone(tokenizer: Tokenizer, toy_lines: Lines) -> None:
    text = toy_lines[0][3]
    rows = tokenizer.sample(text, 0.2, [5, 6, 7])
    assert rows == [tokenizer.sample(text, 0.2, [seed])[0] for seed in (5, 6, 7)]
    assert tokenizer.sample(text, 0.2, [7, 5]) == [rows[2], rows[0]]


def test_merges_are_left_out_with_their_probability() -> None:
    """Three symbols, by hand: in each step, a pair is left out with probability p."""
    ranks = {("a", "b"): 0, ("b", "c"): 1, ("ab", "c"): 2, ("a", "bc"): 3}
    p = 0.3
    counts = Counter(
        " ".join(merge("abc", lambda *pair: ranks.get(pair), dropout=p, random=Random(seed))) for seed in range(DRAWS)
    )
    expected = {"abc": (1 - p) ** 2 * (1 + p), "ab c": (1 - p) * p, "a bc": p**2 * (1 - p), "a b c": p**2}
    assert math.isclose(sum(expected.values()), 1)
    for found, share in expected.items():
        assert abs(counts[found] / DRAWS - share) < 4 * (share * (1 - share) / DRAWS) ** 0.5, found


def test_draws_follow_the_probabilities_to_the_power_of_alpha() -> None:
    shares = [0.6**0.5, 0.3**0.5, 0.1**0.5]
    logs = [math.log(0.6), math.log(0.3), math.log(0.1)]
    counts = Counter(draw("abc", logs, alpha=0.5, random=Random(seed)) for seed in range(DRAWS))
    for name, share in zip("abc", (one / sum(shares) for one in shares), strict=True):
        assert abs(counts[name] / DRAWS - share) < 4 * (share * (1 - share) / DRAWS) ** 0.5, name


def test_pieces_of_characters_have_one_segmentation(toy_lines: Lines) -> None:

    written = io.BytesIO()
    settings = {"vocab_size": 60, "model_type": "char", "hard_vocab_limit": False, "minloglevel": 2}
    sentencepiece.SentencePieceTrainer.train(sentence_iterator=iter(toy_lines[0]), model_writer=written, **settings)
    assert wrap_sentence_piece(written.getvalue()).sampled_by is None
