"""Prefixes against a search that decodes each hypothesis from its start and compares texts byte by byte."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from dist_transformer.base.errors import UserError
from dist_transformer.data.vocabulary.byte_bpe import learn_byte_bpe
from dist_transformer.data.vocabulary.sentence_piece import learn_sentence_piece
from dist_transformer.data.vocabulary.tokenizer import EOS_ID, Tokenizer
from dist_transformer.inference import beam
from dist_transformer.inference import translator as module
from dist_transformer.inference.beam import Hypothesis, beam_search
from dist_transformer.inference.decoding import Decoding
from dist_transformer.inference.prefixes import PieceTexts, Prefix, Prefixes
from dist_transformer.inference.sampling import sample
from dist_transformer.inference.translation import Split, count_notes, noted
from dist_transformer.inference.translator import Translator
from dist_transformer.model.transformer import Transformer
from tests.inference.test_beam import assert_same, make_model, make_sources, plain_search, same_memory, steps_on_a_gpu
from tests.inference.test_sampling import next_logp

Lines = tuple[list[str], list[str]]
CPU = torch.device("cpu")
WORDS = ["Ein Haus steht am See.", "Ein Hund und ein Haus", "Häuser über Häuser", "das Haus, das Haus", "北京 很大"] * 9


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return learn_byte_bpe(WORDS, vocab_size=300)


@pytest.fixture(scope="module")
def model(tokenizer: Tokenizer) -> Transformer:
    return random_model_of(tokenizer)


def random_model_of(tokenizer: Tokenizer) -> Transformer:
    return make_model(4, vocab_size=tokenizer.vocab_size, encoder_layers=1, decoder_layers=1)


def spelled(tokenizer: Tokenizer, ids: list[int]) -> bytes:
    return b"".join(map(tokenizer.piece_bytes, ids))


def fits(tokenizer: Tokenizer, prefix: Prefix, text: str, ids: list[int]) -> bool:
    """Say whether an output that begins with `ids` can begin with the prefix."""
    whole, found = text.encode(), spelled(tokenizer, ids)
    return list(prefix.forced[: len(ids)]) == ids[: len(prefix.forced)] and (
        whole.startswith(found) or found.startswith(whole)
    )


def reference(
    model: Transformer, tokenizer: Tokenizer, source: list[int], prefix: Prefix | None, text: str, settings: Decoding
) -> list[Hypothesis]:
    def logp_of(rows: list[list[int]]) -> torch.Tensor:
        logp = torch.stack([next_logp(model, source, tokens).double() for tokens in rows])
        for tokens, row in zip(rows, logp, strict=True):
            if prefix is not None and not spelled(tokenizer, tokens).startswith(text.encode()):
                fitting = [i != EOS_ID and fits(tokenizer, prefix, text, [*tokens, i]) for i in range(len(row))]
                row[~torch.tensor(fitting)] = -torch.inf
        return logp

    limit = max(len(source), prefix.most_tokens if prefix else 0) + settings.max_extra_tokens
    return plain_search(logp_of, settings, limit)


TEXTS = ["Ein Ha", "", "Ein Haus steht", "H", "", "Häu", "das Haus, d", "北"]


@pytest.mark.parametrize("size", [2, 3])
def test_a_prefix_may_repeat_what_an_output_may_not(size: int, tokenizer: Tokenizer, model: Transformer) -> None:
    text = "das Haus, das Haus, das Haus"
    translator = Translator(model, tokenizer, CPU, Decoding(no_repeat_ngram_size=size, max_extra_tokens=9))
    (found,) = translator.translate(["Ein Hund"], prefixes=[text])
    assert found.text.startswith(text)


@pytest.mark.system
@pytest.mark.parametrize("slots", [None, 3])
@pytest.mark.parametrize("k", [1, 4])
def test_search_equals_one_that_compares_texts(
    model: Transformer, tokenizer: Tokenizer, k: int, slots: int | None
) -> None:
    """Prefixes of unequal length in one batch, some empty, in batches that shrink and in slots that are refilled."""
    texts = PieceTexts(tokenizer)
    rows = [texts.encode(text) if text else None for text in TEXTS]
    sources = make_sources(len(TEXTS), longest=6, vocab_size=tokenizer.vocab_size)
    settings = Decoding(beam=k, nbest=k, max_extra_tokens=4, least_growth=1000)
    found = beam_search(model, sources, settings=settings, slots=slots, prefixes=Prefixes(texts, rows))
    for hypotheses, source, row, text in zip(found, sources, rows, TEXTS, strict=True):
        assert_same([hypotheses], [reference(model, tokenizer, source, row, text, settings)])
        assert all(spelled(tokenizer, one.tokens).startswith(text.encode()) for one in hypotheses)


def test_a_piece_may_continue_past_the_prefix(tokenizer: Tokenizer) -> None:
    texts = PieceTexts(tokenizer)
    prefix = texts.encode("Ein Ha")
    assert (spelled(tokenizer, list(prefix.forced)), prefix.rest) == (b"Ein", b" Ha")
    first, second, third = ({tokenizer.piece_bytes(i) for i in np.flatnonzero(row)} for row in texts.allowed(b" Ha"))
    assert b" Haus" in first
    assert b" H" in first
    assert all(piece.startswith(b" Ha") or b" Ha".startswith(piece) for piece in first)
    assert {b"H", b"Ha", b"Haus"} & second == {b"H"} | {b"Ha", b"Haus"} & {*map(tokenizer.piece_bytes, range(4, 300))}
    assert all(piece.startswith(b"a") for piece in third)
    # A long word is forced, except its last 32 bytes.
    long = texts.encode("Ein " + "xqzv" * 9)
    assert len(long.rest) == 32
    assert spelled(tokenizer, list(long.forced)) + long.rest == b"Ein " + b"xqzv" * 9
    # White space at the end is a part of the prefix.
    assert texts.encode("Ein ").rest == b" "


def test_pieces_after_which_nothing_fits_are_not_allowed() -> None:
    """Without the character `b`, `a` leads nowhere."""

    class Pieces:
        vocab_size, first_piece = 8, 4
        texts = (b"", b"", b"", b"", b"a", b"ab", b"bc", b"abx")

        def piece_bytes(self, token: int) -> bytes:
            return self.texts[token]

    allowed = PieceTexts(Pieces()).allowed(b"ab")  # type: ignore[arg-type]
    assert np.flatnonzero(allowed[0]).tolist() == [4, 5, 7]
    assert np.flatnonzero(allowed[1]).tolist() == [6]
    Pieces.texts = (b"", b"", b"", b"", b"a", b"ab", b"x", b"abx")
    allowed = PieceTexts(Pieces()).allowed(b"ab")  # type: ignore[arg-type]
    assert np.flatnonzero(allowed[0]).tolist() == [5, 7]


KINDS: dict[str, Callable[[], Tokenizer]] = {
    "byte-bpe": lambda: learn_byte_bpe(WORDS, vocab_size=300),
    "lowercase": lambda: learn_byte_bpe(WORDS, vocab_size=300, lowercase=True),
    **{
        f"{kind}{'-bytes' * fallback}": lambda kind=kind, fallback=fallback: learn_sentence_piece(
            WORDS,
            vocab_size=330 if fallback else 60,
            model_type=kind,
            byte_fallback=fallback,
            character_coverage=1.0,
            normalization="clean",
        )
        for kind in ("unigram", "bpe")
        for fallback in (False, True)
    },
}


@pytest.mark.parametrize("kind", KINDS)
def test_any_beginning_of_an_output_allows_that_output(kind: str) -> None:
    """So a greedy search that is given a beginning of its own output makes the same choices."""
    tokenizer = KINDS[kind]()
    texts = PieceTexts(tokenizer)
    for line in (*WORDS[:5], "unser starrer Hund, du Ente", "das s e 北 H"):
        ids = tokenizer.encode(line)
        for cut in range(1, len(line)):
            prefix, covered = texts.encode(line[:cut]), 0
            assert list(prefix.forced) == ids[: len(prefix.forced)], line[:cut]
            allowed = texts.allowed(prefix.rest)
            for token in ids[len(prefix.forced) :]:
                assert covered >= len(prefix.rest) or allowed[covered, token], line[:cut]
                covered += len(tokenizer.piece_bytes(token))


@pytest.mark.system
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("refills", [False, True])
def test_every_output_begins_with_its_prefix(kind: str, refills: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every kind of vocabulary, by search and by sampling; longer than the source, and normalized."""
    monkeypatch.setattr(module, "_REFILLS", {"cpu": refills})
    tokenizer = KINDS[kind]()
    model = random_model_of(tokenizer)
    prefixes = ["Ein Ha", "", "Häu", "das Haus, das Haus, da", "Ｅin\u200b  Hu", "See", "Ein ", "\u3000", "北", "s"]
    lines = [*WORDS[:9], "a"]
    for settings in (Decoding(nbest=3, batch_tokens=90), Decoding(sample=True, top_k=5, batch_tokens=90)):
        translator = Translator(model, tokenizer, CPU, settings)
        for prefix, found in zip(prefixes, translator.translate(lines, prefixes=prefixes), strict=True):
            expected = tokenizer.normalize(prefix) if prefix.strip() else ""
            assert all(one.text.startswith(expected) for one in found.hypotheses), (prefix, found)
            assert len(found.hypotheses) == settings.results
    free = Translator(model, tokenizer, CPU, Decoding()).translate(lines)
    assert Translator(model, tokenizer, CPU, Decoding()).translate(lines, prefixes=[""] * 10) == free


def test_a_prefix_changes_only_its_own_line(model: Transformer, tokenizer: Tokenizer) -> None:
    translator = Translator(model, tokenizer, CPU, Decoding(nbest=2))
    free, bound = translator.translate(WORDS[:5]), translator.translate(WORDS[:5], prefixes=["", "Haus", "", "", ""])
    assert [one.hypotheses[0].tokens for i, one in enumerate(bound) if i != 1] == [
        one.hypotheses[0].tokens for i, one in enumerate(free) if i != 1
    ]
    assert bound[1].text.startswith("Haus")
    # A prefix that the output has anyway leaves it as it is, with its probability.
    own = free[0].hypotheses[0].text
    (same,) = translator.translate(WORDS[:1], prefixes=[own[:1]])
    assert same.hypotheses[0].score == pytest.approx(free[0].hypotheses[0].score, abs=1e-5)


def test_samples_keep_the_proportions_of_what_is_allowed(model: Transformer, tokenizer: Tokenizer) -> None:
    texts, count, source = PieceTexts(tokenizer), 3000, [7, 8, 9]
    prefix = texts.encode("H")
    settings = Decoding(sample=True, seed=2, max_extra_tokens=0)
    rows = Prefixes(texts, [prefix] * count)
    keys = [(line, 0) for line in range(count)]
    found = sample(model, [source] * count, keys, settings=settings, prefixes=rows)
    expected = next_logp(model, source, []).double().exp().numpy() * texts.allowed(b"H")[0]
    expected /= expected.sum()
    counts = np.bincount([one.tokens[0] for one in found], minlength=tokenizer.vocab_size)
    deviation = np.sqrt(count * expected * (1 - expected))
    assert (np.abs(counts - count * expected) <= 4.5 * deviation + 1e-9).all()
    assert (expected > 0.01).sum() >= 2
    # The probability is the model's own.
    logp, tokens = 0.0, found[0].tokens
    for place, token in enumerate([*tokens, EOS_ID]):
        logp += float(next_logp(model, source, tokens[:place])[token])
    assert found[0].log_probability == pytest.approx(logp, abs=1e-4)


def test_what_does_not_fit_is_refused_by_its_line(model: Transformer, tokenizer: Tokenizer) -> None:
    translator = Translator(model, tokenizer, CPU, Decoding(max_extra_tokens=10))
    line = WORDS[0]
    for lines, prefixes, said in (
        ([line, line], ["a"], "there are 1 prefixes and 2 lines: pass one prefix for each line"),
        ([line, ""], ["", "a"], "line 12 is blank and has a prefix: leave its prefix empty, or fill the line"),
        ([line], ["x" * 64], "line 11 has a prefix that may take 64 tokens, and the model has room for 63: shorten it"),
        (
            [line, "x" * 60],
            ["", "a"],
            "line 12 has a prefix and 60 tokens, and lines of more than 53 are translated in",
        ),
    ):
        with pytest.raises(UserError, match=said):
            translator.translate(lines, first=10, prefixes=prefixes)
    # As many tokens as there is room for.
    (found,) = translator.translate([line], prefixes=["x" * 63])
    assert found.text.startswith("x" * 63)
    few = learn_sentence_piece(
        WORDS, vocab_size=60, model_type="bpe", byte_fallback=False, character_coverage=1.0, normalization="clean"
    )
    translator = Translator(random_model_of(few), few, CPU, Decoding())
    with pytest.raises(UserError, match="line 1 has a prefix with q, which is not in the target vocabulary: leave it"):
        translator.translate([line], prefixes=["Haus q"])


def test_the_first_sentence_has_the_prefix_of_a_line(model: Transformer, tokenizer: Tokenizer) -> None:
    translator = Translator(model, tokenizer, CPU, Decoding(max_extra_tokens=5))
    translator.split_over = 0
    line = "Ein Haus. Ein Hund."
    begun, whole = translator.translate([line, line], prefixes=["Haus", "Haus. Hund"])
    first, second = translator.translate(["Ein Haus.", "Ein Hund."], prefixes=["Haus", ""])
    assert begun.split == Split(limit=0, parts=2)
    assert begun.text == " ".join(one.text for one in (first, second) if one.text)
    # Where the second sentence of the prefix would begin is not known.
    assert (whole.split, whole.text[:10]) == (None, "Haus. Hund")
    note = "1 line translated as a whole for a prefix of several sentences: check that no sentence is missing"
    assert note in noted(count_notes([begun, whole]))


def test_a_step_of_slots_writes_the_same_memory(model: Transformer, tokenizer: Tokenizer) -> None:
    texts = PieceTexts(tokenizer)
    rows = [texts.encode(text) if text else None for text in TEXTS]
    prefixes = Prefixes(texts, rows)
    search = beam._Search(model, make_sources(8, seed=3), Decoding(), 3, prefixes=prefixes)
    same_memory(search, 3, lambda: [search.tracker])


@pytest.mark.system
def test_a_step_on_a_gpu_neither_mixes_devices_nor_waits(
    tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = PieceTexts(tokenizer)
    prefixes = Prefixes(texts, [texts.encode(text) if text else None for text in TEXTS[:5]])
    steps_on_a_gpu(lambda: random_model_of(tokenizer), 5, tmp_path, monkeypatch, prefixes=prefixes)
