"""Alignments of translations: the attention that they are read from, and the words and characters that they name."""

import unicodedata
from typing import Any

import pytest
import torch

from dist_transformer.config.settings import ModelConfig
from dist_transformer.data.vocabulary.byte_bpe import learn_byte_bpe
from dist_transformer.data.vocabulary.placeholders import placeholder_tags
from dist_transformer.data.vocabulary.tokenizer import Tokenizer
from dist_transformer.inference import translator as module
from dist_transformer.inference.aligned import alignment
from dist_transformer.inference.aligned.alignment import align, link_tokens
from dist_transformer.inference.attention_maps import attention_maps
from dist_transformer.inference.beam import Hypothesis
from dist_transformer.inference.decoding import Decoding
from dist_transformer.inference.ensemble import Ensemble
from dist_transformer.inference.translation import Translation, count_notes
from dist_transformer.inference.translator import Translator
from dist_transformer.model.transformer import Transformer
from tests.model.small_batches import make_model, make_pairs

PAIRS = make_pairs([(9, 8), (9, 9), (2, 5), (7, 12), (4, 0)])


@pytest.mark.parametrize("guided", [False, True])
@pytest.mark.parametrize("batch_tokens", [4, 100])
def test_a_token_is_linked_where_its_step_attends(guided: bool, batch_tokens: int) -> None:
    """The middle one of three layers, by the maps of each pair alone; the tag in front and `</s>` are left out.

    The step that has read the token if it is guided, otherwise the step that predicts it.
    """
    model = make_model(decoder_layers=3).eval()
    model.is_guided = guided
    wanted = []
    for source, target in PAIRS:
        cross_HTS = attention_maps(model, source, target, "cross")["cross"][1]
        weights_TS = cross_HTS[0, 1:] if guided else cross_HTS.mean(0)[:-1]
        wanted.append((weights_TS[:, 1 : len(source)].argmax(1) + 1).tolist())
    assert link_tokens(model, PAIRS, front=1, batch_tokens=batch_tokens) == wanted
    assert len({place for places in wanted for place in places}) > 1


def test_an_ensemble_adds_what_its_models_attend_to() -> None:
    models = [make_model(1).eval(), make_model(2, heads=4).eval()]
    models[1].is_guided = True
    source, target = PAIRS[0]
    first, second = (attention_maps(model, source, target, "cross")["cross"][1] for model in models)
    wanted = (first.mean(0)[:-1] + second[0, 1:])[:, :-1].argmax(1).tolist()
    assert link_tokens(Ensemble(models), PAIRS[:1], front=0) == [wanted]


def test_a_space_that_is_a_piece_belongs_to_the_word_behind_it(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("dog  77"), tokenizer.encode("dog")
    space = [tokenizer.piece_bytes(token) for token in ids[0]].index(b" ")
    found = align(make_model(), tokenizer, ("dog  77", "dog"), ids, [space] * len(ids[1]))
    assert ({link[:2] for link in found.links}, found.words) == ({(5, 6)}, "1-0")


@pytest.fixture
def tokenizer() -> Tokenizer:
    texts = ["See the house, and the dog. The dog sees houses."] * 5
    return learn_byte_bpe(texts, vocab_size=300, tags=("<2de>", *placeholder_tags(2)))


def translated(monkeypatch: pytest.MonkeyPatch, tokenizer: Tokenizer, line: str, **settings: Any) -> Translation:
    """Translate with a search that gives a source back, and each token linked to itself."""

    def echo(_: object, sources: list[list[int]], **how: object) -> list[list[Hypothesis]]:
        return [
            [Hypothesis(tokens=source[1:][:end], score=-1.0, log_probability=-1.0) for end in (None, 1)]
            for source in sources
        ]

    def same(_: object, pairs: list[tuple[list[int], list[int]]], *, front: int) -> list[list[int]]:
        return [[front + place for place, _ in enumerate(target)] for _, target in pairs]

    monkeypatch.setattr(module, "beam_search", echo)
    monkeypatch.setattr(alignment, "link_tokens", same)
    model = Transformer(
        ModelConfig(width=8, heads=2, ffn_width=8, encoder_layers=1, decoder_layers=1, max_positions=64, vocab_size=400)
    )
    decoding = Decoding(nbest=2, alignment=True, max_extra_tokens=20, **settings)
    (found,) = Translator(model, tokenizer, torch.device("cpu"), decoding, tags=("<2de>",)).translate([line])
    return found


LONG = "See the dog, and the house, and the houses, and the dog and the dogs"


@pytest.mark.parametrize(
    ("line", "settings"),
    [
        ("See the dog .", {}),
        # Several sentences, also cut inside where the model has no more positions, with odd white space.
        ("  See the dog.\u00a0 The   house sees. the dog", {"split_over": 3}),
        (f"{LONG}. {LONG} and {LONG}, ｓee the \ufb01.", {}),
        ("See https://a.example/b, the dog. The 12 dogs", {"protect": ("urls", "numbers"), "split_over": 3}),
        ("SEE THE STRAßE AND THE DOG", {"recase": "auto"}),
    ],
)
def test_links_of_what_is_given_back_are_those_of_the_same_words(
    line: str, settings: dict[str, Any], tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = translated(monkeypatch, tokenizer, line, **settings)
    one = found.hypotheses[0].alignment
    assert one is not None
    assert one.words == " ".join(f"{i}-{i}" for i, _ in enumerate(line.split()))
    for link in one.links:
        source, target = line[link.source_start : link.source_end], found.text[link.target_start : link.target_end]
        # A token may be a part of a ligature.
        assert target.casefold() in unicodedata.normalize("NFKC", source).casefold()
        assert len(source) <= len(target)
    assert (len(line) > 300) <= (found.split is not None)
    second = found.hypotheses[1].alignment
    assert second is not None
    assert len(second.links) <= (found.split.parts if found.split else 1)
    assert any(note.startswith("aligned by attention that no alignments guided") for note in count_notes([found]))
