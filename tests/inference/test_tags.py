"""Tags in decoding: in front of every source, and never part of an output."""

import pytest
import torch

from dist_transformer.base.errors import UserError
from dist_transformer.data.vocabulary.byte_bpe import learn_byte_bpe
from dist_transformer.data.vocabulary.tokenizer import Tokenizer
from dist_transformer.evaluation.samples import make_samples
from dist_transformer.inference import translator as module
from dist_transformer.inference.beam import Hypothesis
from dist_transformer.inference.decoding import Decoding
from dist_transformer.inference.translator import Translator
from dist_transformer.model.transformer import Transformer
from tests.support.tiny import tiny_config

CPU = torch.device("cpu")
TAGS = ("<bt>", "<2de>", "<2en>")


@pytest.fixture(scope="module")
def tokenizer(toy_lines: tuple[list[str], list[str]]) -> Tokenizer:
    return learn_byte_bpe([*toy_lines[0], *toy_lines[1]], vocab_size=400, tags=TAGS)


@pytest.fixture(scope="module")
def model(tokenizer: Tokenizer) -> Transformer:
    """Untrained; 160 positions."""
    torch.manual_seed(3)
    config = tiny_config(max_positions=160, tie_embeddings="none", vocab_size=tokenizer.vocab_size)
    return Transformer(config).eval()


def read_by_the_model(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """Record what a search is given from now on; it returns the source."""
    seen: list[list[int]] = []

    def fake(_, sources, **options):  # type: ignore[no-untyped-def]
        seen.extend(sources)
        return [[Hypothesis(tokens=source[2:], score=-1.0, log_probability=-1.0)] for source in sources]

    monkeypatch.setattr(module, "beam_search", fake)
    return seen


def test_tags_are_in_front_of_every_source_in_their_order(
    model: Transformer, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = read_by_the_model(monkeypatch)
    translator = Translator(model, tokenizer, CPU, Decoding(), tags=("<2de>", "<bt>"))
    lines = ["The cat sleeps.", "", "<2en> <bt> stays text"]
    texts = [translation.text for translation in translator.translate(lines)]
    assert texts == lines
    plain = [tokenizer.encode(line) for line in lines if line]
    assert sorted(seen) == sorted([5, 4, *ids] for ids in plain)
    assert min(map(min, plain)) > 6
    assert translator.source_ids(lines[0]) == [5, 4, *plain[0]]


def test_every_part_of_a_long_line_has_the_tags_and_fits(
    model: Transformer, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = read_by_the_model(monkeypatch)
    plain = Translator(model, tokenizer, CPU, Decoding())
    translator = Translator(model, tokenizer, CPU, Decoding(), tags=("<2en>", "<bt>"))
    assert translator.max_source_tokens == plain.max_source_tokens - 2
    (translation,) = translator.translate(["§" * 200])
    assert translation.split is not None
    assert len(seen) == translation.split.parts > 2
    assert {tuple(source[:2]) for source in seen} == {(6, 4)}
    # Two tags and the `</s>` beside the tokens of a part.
    assert max(map(len, seen)) <= 160 - 1 - 50


def test_tags_count_as_tokens_of_a_long_line(
    model: Transformer, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "A cat. A dog."
    longest = 2 + len(tokenizer.encode(text))
    seen = read_by_the_model(monkeypatch)
    for limit, parts in ((longest, 1), (longest - 1, 2)):
        seen.clear()
        settings = Decoding(split_over=limit)
        Translator(model, tokenizer, CPU, settings, tags=("<2en>", "<bt>")).translate([text])
        assert [source[:2] for source in seen] == [[6, 4]] * parts


def test_no_output_has_a_tag_however_probable(model: Transformer, tokenizer: Tokenizer) -> None:
    """Not even where the model finds nothing else: the output projection of the tags is that of a loud piece."""
    with torch.no_grad():
        kept = model.output_projection.clone()
        model.output_projection[4:7] = 50 * kept[40:41]
        model.output_projection[7:8] = -50 * kept[40:41]
    try:
        translator = Translator(model, tokenizer, CPU, Decoding(nbest=4, max_extra_tokens=5), tags=("<2de>",))
        found = [one for line in translator.translate(["The cat sleeps.", "A dog."]) for one in line.hypotheses]
    finally:
        with torch.no_grad():
            model.output_projection.copy_(kept)
    assert sum(len(one.tokens) for one in found) > 20
    assert not {4, 5, 6}.intersection(token for one in found for token in one.tokens)


def test_an_unknown_tag_is_refused(model: Transformer, tokenizer: Tokenizer) -> None:
    with pytest.raises(UserError, match="no tag <2fr>, its tags are <bt> <2de> <2en>"):
        Translator(model, tokenizer, CPU, Decoding(), tags=("<2fr>",))


def test_attention_is_of_what_the_model_reads(model: Transformer, tokenizer: Tokenizer) -> None:
    translator = Translator(model, tokenizer, CPU, Decoding(), tags=("<2de>",))
    (sample,) = make_samples(translator, ["A dog."], ["Ein Hund."], ["Ein Hund."], count=1, with_attention=1)
    assert sample.source_tokens[0] == "<2de>"
    assert len(sample.source_tokens) == len(tokenizer.encode("A dog.")) + 2
