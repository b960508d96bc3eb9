import json
import random

import pytest
import torch

from dist_transformer.base.errors import UserError
from dist_transformer.base.messages import pack, unpack
from dist_transformer.data.text.lines import decode_lines
from dist_transformer.data.vocabulary.tokenizer import Tokenizer
from dist_transformer.inference import translator as module
from dist_transformer.inference.beam import Hypothesis, beam_search
from dist_transformer.inference.decoding import Decoding
from dist_transformer.inference.files.formats import OutputFormat
from dist_transformer.inference.scoring import score_ids
from dist_transformer.inference.translation import Split, count_notes, noted
from dist_transformer.inference.translator import Translator
from dist_transformer.model.transformer import Transformer
from dist_transformer.runtime import distributed

Lines = tuple[list[str], list[str]]


@pytest.fixture(params=["cpu", "cuda"])
def make(
    random_model: Transformer, toy_tokenizer: Tokenizer, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
):
    """Translate with batches of a CPU, which begin together, and with slots of a GPU, which are refilled."""
    monkeypatch.setattr(module, "_REFILLS", {"cpu": module._REFILLS[request.param]})

    def build(**settings: int) -> Translator:
        own = ("split_over", "longest_trained", "max_source_tokens")
        search = {name: value for name, value in settings.items() if name not in own}
        translator = Translator(random_model, toy_tokenizer, torch.device("cpu"), Decoding(**search))
        for name in settings.keys() & {*own}:
            setattr(translator, name, settings[name])
        return translator

    return build


@pytest.mark.system
def test_order_and_count_are_kept(make, toy_lines: Lines) -> None:
    lines = toy_lines[0][:30]
    translations = make(batch_tokens=400, max_extra_tokens=8).translate(lines)
    alone = [make(max_extra_tokens=8).translate([line])[0] for line in lines]
    assert [t.text for t in translations] == [t.text for t in alone]
    assert len({t.text for t in translations}) > 5
    assert [t.hypotheses[0].score for t in translations] == pytest.approx(
        [t.hypotheses[0].score for t in alone], abs=1e-5
    )


def test_blank_lines_stay_blank_and_are_not_decoded(make, toy_lines: Lines, monkeypatch: pytest.MonkeyPatch) -> None:
    decoded: list[int] = []

    def counting(model, sources, **settings):  # type: ignore[no-untyped-def]
        decoded.extend(len(source) for source in sources)
        return beam_search(model, sources, **settings)

    monkeypatch.setattr(module, "beam_search", counting)
    lines = ["", toy_lines[0][0], "   ", "\t", toy_lines[0][1], "\u3000"]
    translations = make(nbest=2).translate(lines)
    assert len(decoded) == 2
    assert [bool(t.text) for t in translations] == [False, True, False, False, True, False]
    assert [len(t.hypotheses) for t in translations] == [1, 2, 1, 1, 2, 1]
    assert all(t.split is None for t in translations)
    assert make().translate([]) == []


INVISIBLE = "\u200b\u00ad\u2060\u200e\ufe0f\x00\u200d"


def test_characters_that_nobody_sees_change_nothing(make, toy_lines: Lines) -> None:
    lines = toy_lines[0][:3]
    translator = make(split_over=20)
    expected = translator.translate([*lines, " ".join(lines)])
    assert expected[-1].split == Split(limit=20, parts=3)
    for sign in (*INVISIBLE, "\ufeff", "\u202a"):
        planted = [sign + lines[0], lines[1].replace("e", f"e{sign}"), lines[2].replace(" ", "\u00a0") + sign]
        assert translator.translate([*planted, f"{sign} ".join(lines) + f" {sign}"]) == expected
    blank = translator.translate([INVISIBLE, *INVISIBLE, f"\t{INVISIBLE} {INVISIBLE}\u3000"])
    assert {(t.text, t.hypotheses[0].tokens) for t in blank} == {("", ())}


def test_an_overlong_line_is_translated_sentence_by_sentence(make, toy_lines: Lines) -> None:
    translator = make(nbest=3)
    assert translator.max_source_tokens == 160 - 1 - 50
    sentences = [line for line in toy_lines[0][:40] if line.endswith(".")][:12]
    assert len(translator.tokenizer.encode(" ".join(sentences))) > 109
    first, whole, last = translator.translate([sentences[0], " ".join(sentences), sentences[1]])
    assert whole.split == Split(limit=109, parts=12)
    assert noted(count_notes([first, whole, last, whole]))[:1] == [
        "2 lines of more than 109 tokens: translated in parts, cut between sentences if possible"
    ]
    alone = translator.translate(sentences)
    assert (first, last) == (alone[0], alone[1])
    for k in range(3):
        assert whole.hypotheses[k].text == " ".join(one.hypotheses[k].text for one in alone if one.hypotheses[k].text)
        assert whole.hypotheses[k].score == pytest.approx(sum(one.hypotheses[k].score for one in alone) / 12, abs=1e-5)
    scores = [one.score for one in whole.hypotheses]
    assert scores == sorted(scores, reverse=True)


def test_a_line_of_the_limit_is_translated_whole(make) -> None:
    translator = make()
    longest = "§" * 54 + "x"  # a sign that the toy text lacks: two bytes, two tokens
    assert len(translator.tokenizer.encode(longest)) == 109
    # White space at the ends is no reason to split a line that is otherwise within the limit.
    whole, spaced, longer = translator.translate([longest, f"{longest}  ", f"{longest}x"])
    assert (whole.split, spaced.split) == (None, None)
    assert spaced.text == whole.text
    assert longer.split == Split(limit=109, parts=2)
    assert longer.text.startswith(whole.text[:10])


def test_a_line_longer_than_any_in_the_training_is_split_at_its_sentences(make, toy_lines: Lines) -> None:
    sentences = [line for line in toy_lines[0][:40] if line.endswith(".") and len(line) < 52][:3]
    several = " ".join(sentences)
    lengths = [len(make().tokenizer.encode(line)) for line in (*sentences, several)]
    longest = max(lengths[:-1])
    assert longest < lengths[-1] < make().max_source_tokens
    alone = make().translate(sentences)
    one_sentence = several.replace(".", ",")

    split, whole, first = make(split_over=longest, longest_trained=longest).translate(
        [several, one_sentence, sentences[0]]
    )
    assert (split.split, split.beyond_training) == (Split(limit=longest, parts=3), False)
    assert split.text == " ".join(one.text for one in alone if one.text)
    # A single sentence is never cut for this.
    assert (whole.split, whole.beyond_training) == (None, True)
    assert first.text == alone[0].text
    assert noted(count_notes([split, whole, first]))[:2] == [
        f"1 line of more than {longest} tokens: translated in parts, cut between sentences if possible",
        "1 line with a sentence that is longer than any in the training: check the translation",
    ]
    # A line as long as the longest of the training, and all lines of a model that does not know it.
    exact, old = make(split_over=lengths[-1], longest_trained=lengths[-1]), make()
    assert [translator.translate([several])[0].split for translator in (exact, old)] == [None, None]
    unsplit = make(longest_trained=longest).translate([several, one_sentence])
    assert [(one.split, one.beyond_training) for one in unsplit] == [(None, True)] * 2
    assert unsplit[1].text == whole.text


def test_every_line_of_several_sentences_is_split_above_0_tokens(make) -> None:
    lines = ["A man. A dog!", "A man.", "", "Mr. Smith"]
    two, *others = make(split_over=0).translate(lines)
    alone = make().translate(["A man.", "A dog!"])
    assert (two.text, two.split) == (" ".join(one.text for one in alone if one.text), Split(limit=0, parts=2))
    assert [one.split for one in others] == [None] * 3
    assert "1 line of several sentences: translated sentence by sentence, as the model was trained" in noted(
        count_notes([two, *others])
    )
    assert make().count_splits(lines, 0) == 1
    assert make(split_over=0).count_splits(lines, 0) == make().count_splits(lines, None) == 0


@pytest.mark.parametrize("how", ["greedy", "samples"])
def test_outputs_that_the_limit_cut_are_counted(
    random_model: Transformer, toy_tokenizer: Tokenizer, toy_lines: Lines, how: str
) -> None:
    """An output was cut if without the limit it is longer; one of just that length was not."""

    def outputs(extra: int):  # type: ignore[no-untyped-def]
        settings = Decoding(beam=1, sample=how == "samples", max_extra_tokens=extra)
        return Translator(random_model, toy_tokenizer, torch.device("cpu"), settings).translate(lines)

    lines = toy_lines[0][:60]
    free = [
        len(one.hypotheses[0].tokens) - len(toy_tokenizer.encode(line))
        for one, line in zip(outputs(90), lines, strict=True)
    ]
    limit = min(extra for extra in free if extra >= 0)
    cut = [extra > limit for extra in free]
    assert True in cut
    assert False in cut
    found = outputs(limit)
    assert [one.hypotheses[0].is_cut for one in found] == cut
    (note,) = noted(count_notes(found))
    assert note.startswith(f"{sum(cut)} lines with a translation that was cut at the limit of source + {limit} tokens")
    written = OutputFormat(nbest="jsonl").text_of(0, found[cut.index(True)])
    assert json.loads(written)["translations"][0]["cut"] is True
    assert "cut" not in OutputFormat(nbest="jsonl").text_of(0, found[cut.index(False)])


def test_a_text_of_100_000_characters_without_a_space(make, monkeypatch: pytest.MonkeyPatch) -> None:
    translator, decoded = make(), list[list[int]]()

    def fake(_, sources, **options):  # type: ignore[no-untyped-def]
        decoded.extend(sources)
        return [[Hypothesis(tokens=source, score=-1.0, log_probability=-1.0)] for source in sources]

    monkeypatch.setattr(module, "beam_search", fake)
    text = "".join(random.Random(1).choices("abcdefghij§猫", k=100_000))
    (translation,) = translator.translate([text])
    assert max(map(len, decoded)) == 109
    assert translation.split is not None
    assert translation.split.parts == len(decoded)
    assert translation.text.replace(" ", "") == text


def test_every_allowed_source_has_positions_for_its_output(make) -> None:
    translator = make(max_extra_tokens=100)
    assert translator.max_source_tokens == 80
    longest = "§" * 79 + "x"
    assert make(max_source_tokens=159).translate([longest])[0].split is None
    with pytest.raises(UserError, match="batch_tokens is 0"):
        make(batch_tokens=0)


@pytest.mark.system
def test_ranks_share_the_batches_of_one_process(make, toy_lines: Lines, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = [*toy_lines[0][10:16], "", "§" * 60, " ".join(toy_lines[0][:10])]
    translator = make(batch_tokens=300, nbest=2, max_source_tokens=60, max_extra_tokens=8)
    expected = translator.translate(lines)
    assert translator.translate_distributed(lines) == expected
    decoded = 6 + sum(one.split.parts for one in expected if one.split is not None)
    assert decoded > 6 + 2 + 2
    monkeypatch.setattr(module, "on_all_ranks", lambda work: work())
    others = dict.fromkeys(range(decoded), module._EMPTY)
    for world in (2, 50):
        shares: list[dict[int, object]] = []
        monkeypatch.setattr(module, "world_size", lambda world=world: world)
        monkeypatch.setattr(
            module, "gather_objects", lambda value, shares=shares: shares.append(value) or [others, value]
        )
        for rank in range(world):
            monkeypatch.setattr(module, "rank", lambda rank=rank: rank)
            translator.translate_distributed(lines)
        assert sum(len(share) for share in shares) == decoded
        monkeypatch.setattr(module, "gather_objects", lambda _, shares=shares: unpack(pack(shares)))
        assert translator.translate_distributed(lines) == expected


def test_every_rank_hears_of_an_error(make, toy_lines: Lines, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distributed, "gather_objects", lambda own, _: [own, "rank 1 has not enough memory"])
    with pytest.raises(UserError, match="rank 1"):
        make().translate_distributed(toy_lines[0][:3])


def test_too_little_memory_names_the_setting(make, toy_lines: Lines, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(module, "beam_search", fail)
    with pytest.raises(UserError, match=r"^out of memory with batch_tokens 500: lower it$"):
        make(batch_tokens=500).translate(toy_lines[0][:3])


def test_line_breaks_in_a_decoded_text_become_spaces(make, toy_lines: Lines, monkeypatch: pytest.MonkeyPatch) -> None:
    translator = make()
    monkeypatch.setattr(translator.tokenizer, "decode", lambda _: "a\nb\r\nc\u2028d", raising=False)
    assert translator.translate(toy_lines[0][:1])[0].text == "a b c d"


def test_only_newlines_end_lines() -> None:
    raw = [b"\xef\xbb\xbfone\n", b"two\r\n", b"\n", "three\x0b\x85\u2028 four\r five".encode()]
    assert list(decode_lines(raw, "stdin")) == ["one", "two", "", "three\x0b\x85\u2028 four\r five"]
    with pytest.raises(UserError, match=r"stdin line 2 is not UTF-8 .byte 0xff at position 1"):
        list(decode_lines([b"good\n", b"b\xff\n"], "stdin"))


def test_numbers_that_are_not_finite_are_an_error(
    make, random_model: Transformer, toy_lines: Lines, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A row of the largest fp32 number is finite, and its products are not."""
    embedding = random_model.embedding.data.clone()
    translator = make()
    ids = translator.source_ids(toy_lines[0][0])
    try:
        random_model.embedding.data[ids[0]] = 3.4e38
        with pytest.raises(UserError, match="the model computes numbers that are not finite for a translation"):
            translator.translate(toy_lines[0][:1])
        with pytest.raises(UserError, match="not finite for a translation"):
            make(sample=True).translate(toy_lines[0][:1])
        with pytest.raises(UserError, match="not finite for a probability"):
            score_ids(random_model, [(ids, ids)], device=torch.device("cpu"))
    finally:
        random_model.embedding.data.copy_(embedding)
