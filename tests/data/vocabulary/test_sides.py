"""Every reader of a vocabulary uses the tokenizer of its side, which joint vocabularies cannot show."""

import pytest
import torch

from dist_transformer.config.settings import ModelConfig
from dist_transformer.data.vocabulary.byte_bpe import learn_byte_bpe
from dist_transformer.data.vocabulary.kinds import VocabularyPair, wrap_pair
from dist_transformer.data.vocabulary.tokenizer import EOS_ID
from dist_transformer.inference.decoding import Decoding
from dist_transformer.inference.scoring import score_pairs
from dist_transformer.inference.translator import Translator
from dist_transformer.model.transformer import Transformer

SOURCE, TARGET = "the cat and the hat are here", "die Katze und der Hut sind da"


@pytest.fixture(scope="module")
def pair() -> VocabularyPair:
    return wrap_pair(*(learn_byte_bpe([text] * 3, vocab_size=280) for text in (SOURCE, TARGET)))


@pytest.fixture(scope="module")
def model() -> Transformer:
    torch.manual_seed(1)
    size = {"width": 16, "heads": 2, "ffn_width": 32, "encoder_layers": 1, "decoder_layers": 1, "vocab_size": 280}
    model = Transformer(ModelConfig(**size, tie_embeddings="all")).eval()  # type: ignore[arg-type]
    # The single bytes have the same ids on both sides, so outputs are made of merged pieces.
    model.embedding.data[:260] = 0
    return model


def test_the_sides_differ(pair: VocabularyPair) -> None:
    for text in (SOURCE, TARGET):
        assert pair.source.encode(text) != pair.target.encode(text)


def test_scores(pair: VocabularyPair, model: Transformer) -> None:
    (score,) = score_pairs(model, pair, [SOURCE], [TARGET], device=torch.device("cpu"))
    assert list(score.tokens) == [*pair.target.encode(TARGET), EOS_ID]


def test_translation(pair: VocabularyPair, model: Transformer) -> None:
    translator = Translator(model, pair, torch.device("cpu"), Decoding())
    assert translator.source_ids(SOURCE) == pair.source.encode(SOURCE)
    (translation,) = translator.translate([SOURCE])
    (found, *_) = translation.hypotheses
    assert pair.source.decode(list(found.tokens)) != pair.target.decode(list(found.tokens))
    assert translation.text == " ".join(pair.target.decode(list(found.tokens)).splitlines())
