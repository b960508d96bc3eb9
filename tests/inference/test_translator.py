import random

import pytest
import torch

from dist_transformer import distributed
from dist_transformer.data.sources import decode_lines
from dist_transformer.data.tokenizer import Tokenizer
from dist_transformer.errors import UserError
from dist_transformer.inference import translator as module
from dist_transformer.inference.beam import BeamSettings, beam_search
from dist_transformer.inference.translator import Refusal, Translator
from dist_transformer.model.transformer import Transformer

Lines = tuple[list[str], list[str]]


@pytest.fixture(params=["cpu", "cuda"])
def make(
    random_model: Transformer, toy_tokenizer: Tokenizer, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
):
    """With the batches of a CPU, which begin together, and with those of a GPU, slots that are refilled."""
    monkeypatch.setattr(module, "_REFILLS", {"cpu": module._REFILLS[request.param]})

    def build(**settings: int) -> Translator:
        search = {name: settings.pop(name) for name in ("nbest", "max_extra_tokens") if name in settings}
        return Translator(random_model, toy_tokenizer, torch.device("cpu"), BeamSettings(**search), **settings)

    return build


def test_order_and_count_are_kept(make, toy_lines: Lines) -> None:
    lines = toy_lines[0][:30]
    translations = make(max_batch_tokens=400).translate(lines)
    alone = [make().translate([line])[0] for line in lines]
    assert [t.text for t in translations] == [t.text for t in alone]
    assert len({t.text for t in translations}) > 5
    assert [t.hypotheses[0].score for t in translations] == pytest.approx(
        [t.hypotheses[0].score for t in alone], abs=1e-5
    )


def test_input_order_does_not_matter(make, toy_lines: Lines) -> None:
    lines = toy_lines[0][:40]
    shuffled = random.Random(1).sample(range(40), 40)
    straight = make(max_batch_tokens=400).translate(lines)
    mixed = make(max_batch_tokens=400).translate([lines[i] for i in shuffled])
    assert [t.text for t in mixed] == [straight[i].text for i in shuffled]


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
    assert all(t.refusal is None for t in translations)
    assert make().translate([]) == []


def test_an_overlong_line_is_refused_by_number(make, toy_lines: Lines) -> None:
    translator = make()
    assert translator.max_source_tokens == 160 - 1 - 50
    longest = "§" * 54 + "x"  # a sign that the toy text lacks: two bytes, two tokens
    assert len(translator.tokenizer.encode(longest)) == 109
    translations = translator.translate([toy_lines[0][0], longest + "x", longest])
    assert [t.refusal for t in translations] == [None, Refusal(line=2, tokens=110, limit=109), None]
    assert [bool(t.text) for t in translations] == [True, False, True]
    message = str(translations[1].refusal)
    assert "line 2" in message
    assert "109" in message


def test_every_allowed_source_has_positions_for_its_output(make) -> None:
    translator = make(max_extra_tokens=100)
    assert translator.max_source_tokens == 80
    longest = "§" * 79 + "x"
    assert make(max_source_tokens=159).translate([longest])[0].refusal is None
    with pytest.raises(UserError, match="max_source_tokens is 160: give 1 to 159"):
        make(max_source_tokens=160)
    with pytest.raises(UserError, match="max_batch_tokens is 0"):
        make(max_batch_tokens=0)


@pytest.mark.parametrize("world", [2, 50])
def test_ranks_share_the_batches_of_one_process(
    make, toy_lines: Lines, monkeypatch: pytest.MonkeyPatch, world: int
) -> None:
    lines = [*toy_lines[0][:30], "", "§" * 90]
    translator = make(max_batch_tokens=600, nbest=2)
    expected = translator.translate(lines)
    assert translator.translate_distributed(lines) == expected
    monkeypatch.setattr(module, "world_size", lambda: world)
    monkeypatch.setattr(module, "on_all_ranks", lambda work: work())
    shares: list[dict[int, object]] = []
    monkeypatch.setattr(module, "gather_objects", lambda value: shares.append(value) or [value])
    for rank in range(world):
        monkeypatch.setattr(module, "rank", lambda rank=rank: rank)
        translator.translate_distributed(lines)
    assert sum(len(share) for share in shares) == 30
    monkeypatch.setattr(module, "gather_objects", lambda _: shares)
    assert translator.translate_distributed(lines) == expected


def test_every_rank_hears_of_an_error(make, toy_lines: Lines, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distributed, "gather_objects", lambda own, _: [own, "rank 1 has not enough memory"])
    with pytest.raises(UserError, match="rank 1"):
        make().translate_distributed(toy_lines[0][:3])


def test_too_little_memory_names_the_setting(make, toy_lines: Lines, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(module, "beam_search", fail)
    with pytest.raises(UserError, match="max_batch_tokens 500: give a lower one"):
        make(max_batch_tokens=500).translate(toy_lines[0][:3])


def test_line_breaks_in_a_decoded_text_become_spaces(make, toy_lines: Lines, monkeypatch: pytest.MonkeyPatch) -> None:
    translator = make()
    monkeypatch.setattr(translator.tokenizer, "decode", lambda _: "a\nb\r\nc\u2028d", raising=False)
    assert translator.translate(toy_lines[0][:1])[0].text == "a b c d"


def test_only_newlines_end_lines() -> None:
    raw = [b"\xef\xbb\xbfone\n", b"two\r\n", b"\n", "three\x0b\x85\u2028 four\r five".encode()]
    assert list(decode_lines(raw, "stdin")) == ["one", "two", "", "three\x0b\x85\u2028 four\r five"]
    with pytest.raises(UserError, match=r"stdin line 2 is not UTF-8 .byte 0xff at position 1"):
        list(decode_lines([b"good\n", b"b\xff\n"], "stdin"))
