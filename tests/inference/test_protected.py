"""Protected text and lines in capitals on their way through a translator, whose search gives a source back."""

import io
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import sentencepiece
import torch

from dist_transformer.base.errors import UserError
from dist_transformer.config.settings import ModelConfig
from dist_transformer.data.vocabulary.byte_bpe import learn_byte_bpe
from dist_transformer.data.vocabulary.kinds import wrap_pair
from dist_transformer.data.vocabulary.placeholders import TERM_TAGS, encode_all, placeholder_tags
from dist_transformer.data.vocabulary.sentence_piece import wrap_sentence_piece
from dist_transformer.data.vocabulary.tokenizer import Tokenizer
from dist_transformer.inference import translator as module
from dist_transformer.inference.aligned import alignment
from dist_transformer.inference.beam import Hypothesis
from dist_transformer.inference.decoding import Decoding
from dist_transformer.inference.translation import count_notes, noted
from dist_transformer.inference.translator import Translator
from dist_transformer.model.transformer import Transformer

TEXTS = ["See the house, and the dog.", "The dog sees 12 houses"] * 5
SHAPE = {"width": 8, "heads": 2, "ffn_width": 8, "encoder_layers": 1, "decoder_layers": 1, "max_positions": 64}


def translator_of(tokenizer: Tokenizer, **settings: object) -> Translator:
    model = Transformer(ModelConfig(**SHAPE, vocab_size=tokenizer.vocab_size))  # type: ignore[arg-type]
    return Translator(model, tokenizer, torch.device("cpu"), Decoding(**settings))  # type: ignore[arg-type]


@pytest.fixture
def tokenizer() -> Tokenizer:
    return learn_byte_bpe(TEXTS, vocab_size=300, tags=("<2de>", *placeholder_tags(2)))


def test_spans_are_placeholders_for_the_model_alone(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    seen, never = list[list[int]](), list[list[int]]()

    def echo(_, sources, **how):  # type: ignore[no-untyped-def]
        seen.extend(sources)
        never.append(how["never"])
        # The last placeholder is forgotten.
        outputs = [[token for token in source if token != 6] for source in sources]
        return [[Hypothesis(tokens=tokens, score=-1.0, log_probability=-1.0)] for tokens in outputs]

    monkeypatch.setattr(module, "beam_search", echo)
    lines = ["See https://a.example/b, the dog.", "The 12 dogs (12) see 3.", "the dog"]
    translator = translator_of(tokenizer, protect=("urls", "numbers"))
    found = translator.translate(lines)
    assert [one.text for one in found] == [lines[0], "The 12 dogs () see 3. 12", lines[2]]
    assert sorted(token for source in seen for token in source if token in (5, 6)) == [5, 5, 6]
    assert sorted(map(translator.source_ids, lines)) == sorted(seen)
    # The tag of a language is no placeholder.
    assert never == [[4]]
    assert noted(count_notes(found))[0].startswith("1 line without a place for protected text in the translation")
    left = translator_of(tokenizer, protect=("numbers",), missing_spans="leave").translate(lines)
    assert left[1].text == "The 12 dogs () see 3."
    plain = translator_of(tokenizer).translate(lines)
    assert [one.text for one in plain] == lines
    assert never[-1] == [4, 5, 6]


def test_the_best_hypothesis_that_keeps_most_spans_is_taken(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def search(_, sources, *, settings, **how):  # type: ignore[no-untyped-def]
        # None, the first of two marks, both, both.
        kept = [[7], [7, 5], [7, 5, 6], [6, 5]]
        scored = [Hypothesis(tokens=one, score=-i, log_probability=-1.0) for i, one in enumerate(kept)]
        return [scored[: settings.results] for _ in sources]

    monkeypatch.setattr(module, "beam_search", search)
    lines = ["See 1 or 2", "See 1", "See"]
    found = translator_of(tokenizer, protect=("numbers",)).translate(lines)
    assert [one.hypotheses[0].score for one in found] == [-2, -1, 0]
    (both,) = translator_of(tokenizer, protect=("numbers",), nbest=3).translate(lines[:1])
    assert [(one.score, one.missing_spans) for one in both.hypotheses] == [(-2, 0), (-3, 0), (-1, 1)]
    assert translator_of(tokenizer).translate(lines)[0].hypotheses[0].score == 0


def test_sides_have_placeholders_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    tags = placeholder_tags(2)
    sides = (learn_byte_bpe(TEXTS, vocab_size=300, tags=each) for each in (("<2de>", "<2fr>", *tags), tags))
    pair = wrap_pair(*sides)
    first, second = pair.target.tag_ids(tags)
    assert pair.source.tag_ids(tags) != [first, second]
    kept = [[second], [first]]

    def search(_, sources, *, settings, **how):  # type: ignore[no-untyped-def]
        scored = [Hypothesis(tokens=[*one], score=-i, log_probability=-1.0) for i, one in enumerate(kept)]
        return [scored[: settings.results] for _ in sources]

    monkeypatch.setattr(module, "beam_search", search)
    model = Transformer(ModelConfig(**SHAPE, vocab_size=300, target_vocab_size=300, tie_embeddings="target"))
    settings = Decoding(protect=("numbers", "urls"), alignment=True)
    # It has the id of the targets' second placeholder.
    translator = Translator(model, pair, torch.device("cpu"), settings, tags=("<2fr>",))
    (found,) = translator.translate(["See 12"])
    assert (found.text, found.hypotheses[0].missing_spans) == ("12", 0)
    # A placeholder is linked to that of the source, and so to its span, whatever attention says.
    kept[:] = [[first, second]]
    monkeypatch.setattr(alignment, "link_tokens", lambda _, pairs, **how: [[1, 1]])
    line = "See 12 and https://a.example/b"
    (found,) = translator.translate([line])
    assert found.hypotheses[0].alignment is not None
    links = found.hypotheses[0].alignment.links
    assert [line[link.source_start : link.source_end] for link in links] == ["12", "https://a.example/b"]


@pytest.mark.parametrize(
    ("line", "parts"),
    [
        ("The dog sees on 3. May the house. See", ["The dog sees on \ufdd0. May the house.", "See"]),
        ("See paper etc and the dog. See", ["See paper etc \ufffe usw. \uffff and the dog.", "See"]),
    ],
)
def test_what_stands_for_other_text_ends_no_sentence(
    line: str, parts: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "terms").write_text("etc\tusw.\n")
    with_all = learn_byte_bpe(TEXTS, vocab_size=300, tags=(*placeholder_tags(2), *TERM_TAGS))
    seen = list[str]()

    def take(tokenizer: Tokenizer, texts: list[str]) -> list[list[int]]:
        seen.extend(texts)
        return encode_all(tokenizer, texts)

    monkeypatch.setattr(module, "encode_all", take)
    translator_of(with_all, protect=("numbers",), terms=tmp_path / "terms", split_over=1).translate([line])
    assert seen[1:] == parts


def test_a_part_of_which_nothing_is_left_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """The library's own table removes a zero-width space, which is a part on its own behind a full stop."""
    written = io.BytesIO()
    names = {"pad_piece": "<pad>", "pad_id": 0, "unk_id": 1, "bos_id": 2, "eos_id": 3}
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXTS), model_writer=written, vocab_size=60, hard_vocab_limit=False, **names
    )
    vocabulary = wrap_sentence_piece(written.getvalue())

    def echo(_, sources, **how):  # type: ignore[no-untyped-def]
        assert all(sources)
        return [[Hypothesis(tokens=source, score=-1.0, log_probability=-1.0)] for source in sources]

    monkeypatch.setattr(module, "beam_search", echo)
    translator = translator_of(vocabulary, alignment=True, nbest=1, split_over=1)
    lines = ["See the dog. \u200b", "\u200b"]
    assert [one.text for one in translator.translate(lines)] == ["See the dog.", ""]


def test_the_best_hypothesis_that_has_most_terms_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with_terms = learn_byte_bpe(TEXTS, vocab_size=300, tags=TERM_TAGS)
    (tmp_path / "terms").write_text("dog\tHund\nhouse\tHaus\n")

    def search(_, sources, *, settings, **how):  # type: ignore[no-untyped-def]
        texts = ["Tier", "Ein Hund", "Hund, Haus", "Haus, Hund"][: settings.results]
        scored = [
            Hypothesis(tokens=with_terms.encode(text), score=-i, log_probability=-1.0) for i, text in enumerate(texts)
        ]
        return [scored for _ in sources]

    monkeypatch.setattr(module, "beam_search", search)
    found = translator_of(with_terms, terms=tmp_path / "terms").translate(["dog. house", "dog", "See"])
    assert [one.text for one in found] == ["Hund, Haus", "Ein Hund", "Tier"]


def test_a_line_in_capitals_is_read_in_the_usual_case(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = list[str]()

    def echo(_, sources, **how):  # type: ignore[no-untyped-def]
        seen.extend(map(tokenizer.decode, sources))
        return [[Hypothesis(tokens=source, score=-1.0, log_probability=-1.0)] for source in sources]

    monkeypatch.setattr(module, "beam_search", echo)
    lines = ["SEE THE HOUSE. THE DOG SEES 12.", "See the dog", "DOG"]
    assert [one.text for one in translator_of(tokenizer, recase="auto").translate(lines)] == lines
    assert sorted(seen) == ["DOG", "See the dog", "See the house. The dog sees 12."]
    # But not for a prefix.
    assert tokenizer.decode(translator_of(tokenizer, recase="auto").source_ids("SEE THE DOG", "Der")) == "SEE THE DOG"


def test_capitals_are_those_of_the_languages(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = list[Any]()

    def echo(_, sources, **how):  # type: ignore[no-untyped-def]
        seen.append(how["prefixes"])
        return [[Hypothesis(tokens=source, score=-1.0, log_probability=-1.0)] for source in sources]

    monkeypatch.setattr(module, "beam_search", echo)
    model = Transformer(ModelConfig(**SHAPE, vocab_size=tokenizer.vocab_size))  # type: ignore[arg-type]
    languages = {"source_language": "tr", "target_language": "az"}
    info: Any = SimpleNamespace(direction=SimpleNamespace(tags=()), longest_source=9, split_over=None, **languages)
    translator = Translator(model, tokenizer, torch.device("cpu"), Decoding(recase="auto"), info)
    assert translator.translate(["IŞIK İYİ"])[0].text == "IŞIK İYİ"
    # And a prefix has no marks of ours.
    translator.translate(["See"], prefixes=["\ufdd0"])
    assert seen[1].rows[0].rest == "\ufffd".encode()


def test_terms_are_in_the_source_and_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with_terms = learn_byte_bpe(TEXTS, vocab_size=300, tags=TERM_TAGS)
    (tmp_path / "terms").write_text("dog\tHund\nhouse\tHaus\n")
    seen, never = list[list[str]](), list[list[int]]()

    def search(_, sources, **how):  # type: ignore[no-untyped-def]
        seen.extend([with_terms.tag_of(token) or with_terms.decode([token]) for token in source] for source in sources)
        never.append(how["never"])
        return [[Hypothesis(tokens=with_terms.encode("Das HAUS"), score=-1.0, log_probability=-1.0)] for _ in sources]

    monkeypatch.setattr(module, "beam_search", search)
    found = translator_of(with_terms, terms=tmp_path / "terms").translate(["the dog and the house", "See"])
    texts = sorted("".join(tokens) for tokens in seen)
    assert texts == ["See", "the dog<term> Hund<term-end> and the house<term> Haus<term-end>"]
    assert never == [with_terms.tag_ids(TERM_TAGS)]
    assert noted(count_notes(found))[-1] == "1 of 2 terms are in the translations"
    assert noted(count_notes(translator_of(with_terms).translate(["the dog"]))) == []


def test_an_unknown_kind() -> None:
    with pytest.raises(UserError, match="protect is 'dates': choose among urls, emails, numbers, placeholders"):
        Decoding(protect=("urls", "dates"))


def test_a_model_without_placeholders() -> None:
    with pytest.raises(UserError, match="protect needs a model whose vocabulary has placeholders"):
        translator_of(learn_byte_bpe(TEXTS, vocab_size=300), protect=("urls",))


def test_a_model_that_knows_no_terms(tmp_path: Path) -> None:
    (tmp_path / "terms").write_text("dog\tHund\n")
    with pytest.raises(UserError, match="terms needs a model that was trained on them"):
        translator_of(learn_byte_bpe(TEXTS, vocab_size=300), terms=tmp_path / "terms")
