"""Beam search compared with one that decodes each hypothesis from its start in every step, one by one."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dist_transformer.inference import beam
from dist_transformer.inference.beam import Hypothesis, beam_search
from dist_transformer.inference.decoding import Decoding
from dist_transformer.model.decoding import DecoderState
from dist_transformer.model.packed import PackedTokens, pack_side
from dist_transformer.model.transformer import Transformer
from tests.fake_cuda import fake_cuda
from tests.support.tiny import tiny_config

PAD, UNK, BOS, EOS = range(4)


def make_model(seed: int = 3, *, sharpness: float = 3.0, vocab_size: int = 23, **settings: object) -> Transformer:
    """Random, with an output projection large enough that hypotheses differ and some end early."""
    torch.manual_seed(seed)
    shape = {"encoder_layers": 2, "decoder_layers": 2, "max_positions": 64, "tie_embeddings": "none"}
    model = Transformer(tiny_config(**{**shape, "vocab_size": vocab_size, **settings})).eval()
    with torch.no_grad():
        model.output_projection.mul_(sharpness)
        # A steady preference for the end: without it a random model rarely stops before the limit.
        model.output_projection[EOS] *= 1.5
        if model.output_bias is not None:
            model.output_bias.normal_(std=0.5)
    return model


def make_sources(count: int, seed: int = 0, longest: int = 12, vocab_size: int = 23) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(4, vocab_size, rng.integers(0, longest + 1)).tolist() for _ in range(count)]


def packed(sentences: list[list[int]]) -> PackedTokens:
    lengths = np.array([len(sentence) for sentence in sentences])
    flat = np.concatenate([np.array(sentence, dtype=np.int64) for sentence in sentences])
    return pack_side(flat, lengths, size=len(flat), offset_count=len(lengths) + 1, max_length=int(lengths.max()))


def penalty(length: int, alpha: float) -> float:
    return ((5 + length) / 6) ** alpha


@torch.no_grad()
def reference_search(
    model: Transformer, source: list[int], settings: Decoding, given: tuple[int, ...] = ()
) -> list[Hypothesis]:
    memory_SD = model.encode(packed([[*source, EOS]]))

    def logp_of(rows: list[list[int]]) -> torch.Tensor:
        if (place := len(rows[0])) < len(given):
            certain = torch.full((len(rows), model.config.output_size), -math.inf)
            certain[:, given[place]] = 0.0
            return certain
        one_source, targets = packed([[*source, EOS]] * len(rows)), packed([[BOS, *tokens] for tokens in rows])
        hidden_TD = model.decode(targets, memory_SD.repeat(len(rows), 1), one_source)
        return torch.log_softmax(model.logits(hidden_TD[len(rows[0]) :: len(rows[0]) + 1]), dim=-1)

    return plain_search(logp_of, settings, len(source) + settings.max_extra_tokens)


def plain_search(
    logp_of: Callable[[list[list[int]]], torch.Tensor], settings: Decoding, limit: int
) -> list[Hypothesis]:
    """Search for one sentence; with a `least_growth` of 1000 to the length limit, never stopping early.

    Args:
        logp_of: returns the logarithms of the probabilities of the next token after each of k beginnings, (k, V).
    """
    beam = settings.beam
    alive: list[tuple[float, list[int]]] = [(0.0, [])]
    ended: list[Hypothesis] = []
    for length in range(limit + 1):
        logp = logp_of([tokens for _, tokens in alive])
        logp[:, [PAD, UNK, BOS]] = -math.inf
        if length == limit:
            logp[:, [i for i in range(logp.shape[1]) if i != EOS]] = -math.inf
        totals = torch.tensor([total for total, _ in alive], dtype=logp.dtype)[:, None] + logp
        flat = sorted(enumerate(totals.flatten().tolist()), key=lambda item: (-item[1], item[0]))
        best = [(total, *divmod(place, logp.shape[1])) for place, total in flat[: 2 * beam] if total > -math.inf]
        for total, parent, token in best:
            if token == EOS:
                score = total / penalty(length + 1, settings.length_penalty)
                ended.append(Hypothesis(tokens=alive[parent][1], score=score, log_probability=total))
        ended = sorted(ended, key=lambda hypothesis: -hypothesis.score)[:beam]
        alive = [(total, [*alive[parent][1], token]) for total, parent, token in best if token != EOS][:beam]
        if not alive:
            break
        longest = min(length + 1 + max((length + 1) // 4, settings.least_growth), limit)
        bound = alive[0][0] / penalty(longest + 1, settings.length_penalty)
        if (
            settings.least_growth < 1000
            and len(ended) >= settings.results
            and ended[settings.results - 1].score >= bound
        ):
            break
    return ended[: settings.results]


def assert_same(found: list[list[Hypothesis]], expected: list[list[Hypothesis]]) -> None:
    assert [[h.tokens for h in row] for row in found] == [[h.tokens for h in row] for row in expected]
    for row, expected_row in zip(found, expected, strict=True):
        for hypothesis, other in zip(row, expected_row, strict=True):
            assert hypothesis.score == pytest.approx(other.score, abs=1e-5)
            # A sum over tokens: its rounding grows with it.
            assert hypothesis.log_probability == pytest.approx(other.log_probability, abs=1e-5, rel=1e-6)


SETTINGS = [
    Decoding(beam=4, length_penalty=0.6, max_extra_tokens=8),
    Decoding(beam=4, length_penalty=0.6, max_extra_tokens=8, nbest=4),
    Decoding(beam=1, length_penalty=0.6, max_extra_tokens=8),
    Decoding(beam=3, length_penalty=0.0, max_extra_tokens=5, nbest=2),
    Decoding(beam=5, length_penalty=1.0, max_extra_tokens=6, nbest=3),
    Decoding(beam=2, length_penalty=1.5, max_extra_tokens=20),
    Decoding(beam=4, length_penalty=0.6, max_extra_tokens=0, nbest=4),
    Decoding(beam=3, length_penalty=1.0, max_extra_tokens=12, least_growth=1),
    Decoding(beam=4, length_penalty=0.6, max_extra_tokens=12, nbest=2, least_growth=1000),
]


@pytest.mark.system
@pytest.mark.parametrize("settings", SETTINGS, ids=lambda s: f"k{s.beam}-a{s.length_penalty}-n{s.results}")
@pytest.mark.parametrize("norm", ["post", "pre"])
def test_equals_a_plain_beam_search(settings: Decoding, norm: str) -> None:
    other = {"positions": "learned", "output_bias": True, "activation": "swish"} if norm == "pre" else {}
    model = make_model(norm=norm, **other)
    sources = make_sources(20)
    expected = [reference_search(model, source, settings) for source in sources]
    assert_same(beam_search(model, sources, settings=settings), expected)
    lengths = [len(row[0].tokens) - len(source) for row, source in zip(expected, sources, strict=True)]
    assert len(set(lengths)) > 1, "the random model should end some outputs before the limit"


@pytest.mark.parametrize("settings", SETTINGS[1:4], ids=lambda s: f"k{s.beam}")
def test_attention_from_outside_decodes_as_it_trains(settings: Decoding, distant: str) -> None:
    """Slots are refilled, so sentences begin at later places of the caches."""
    model = make_model(attention=distant)
    sources = make_sources(20)
    expected = [reference_search(model, source, settings) for source in sources]
    for slots in (None, 3):
        assert_same(beam_search(model, sources, settings=settings, slots=slots), expected)


@pytest.mark.parametrize(
    ("tokens", "limit", "bound"),
    # -6 / ((5 + m + 1) / 6)^0.6 for m = 10 + 4, 20 + 20 / 4 and, at the limit, 21.
    [(10, 60, -2.9136), (20, 60, -2.2399), (20, 21, -2.4335)],
)
def test_a_hypothesis_may_grow_by_a_quarter_and_win(tokens: int, limit: int, bound: float) -> None:
    search = beam._Search(make_model(), [[5] * 10] * 2, Decoding(), None)
    search.state.positions_N.fill_(tokens)
    search.beams.limit_N.fill_(limit)
    search.beams.alive_logp_Nk.copy_(torch.tensor([-6.0, -7.0, -8.0, -9.0]))
    search.beams.ended_score_Nk[:, 0] = torch.tensor([bound + 1e-3, bound - 1e-3])
    search._give_up()
    assert search.beams.alive_logp_Nk.tolist() == [[-math.inf] * 4, [-6.0, -7.0, -8.0, -9.0]]


def test_a_batch_does_not_change_its_sentences() -> None:
    model, sources = make_model(), make_sources(30, seed=3)
    settings = Decoding(nbest=4, max_extra_tokens=10)
    alone = [beam_search(model, [source], settings=settings)[0] for source in sources]
    assert_same(beam_search(model, sources, settings=settings), alone)
    assert_same(beam_search(model, sources[::-1], settings=settings)[::-1], alone)


@pytest.mark.system
@pytest.mark.parametrize("steps", [3, 8, 1000])
def test_rare_looks_change_nothing(steps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Search as on CUDA, where sentences continue for some steps after they are done."""
    model, sources = make_model(), make_sources(30, seed=3)
    settings = Decoding(nbest=2, max_extra_tokens=10)
    expected = beam_search(model, sources, settings=settings)
    monkeypatch.setattr(beam, "_STEPS_BETWEEN_LOOKS", {"cpu": steps})
    assert_same(beam_search(model, sources, settings=settings), expected)


@pytest.mark.system
@pytest.mark.parametrize("slots", [1, 3, 7, 30, 100])
@pytest.mark.parametrize("looks", [1, 5])
def test_slots_that_are_refilled_change_nothing(slots: int, looks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sentences begin and end at any step, their room is gone round many times, and the shortest source comes last."""
    model = make_model()
    sources = sorted(make_sources(60, seed=3), key=len, reverse=True)
    settings = Decoding(nbest=3, max_extra_tokens=10)
    expected = beam_search(model, sources, settings=settings)
    monkeypatch.setattr(beam, "_STEPS_BETWEEN_LOOKS", {"cpu": looks})
    assert_same(beam_search(model, sources, settings=settings, slots=slots), expected)


def test_a_slot_is_refilled_as_soon_as_its_sentence_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    """Six outputs of 9 tokens and `</s>` in two slots are three times 10 steps."""
    model = make_model()
    with torch.no_grad():
        model.output_projection[EOS] = 0
        model.decoder[-1].ffn_residual.norm.bias[0] = 100
        model.output_projection[7, 0] = 10
    steps: list[None] = []
    real = beam._Search._step
    monkeypatch.setattr(beam._Search, "_step", lambda search: (steps.append(None), real(search)))
    found = beam_search(model, [[5] * 4] * 6, settings=Decoding(max_extra_tokens=5), slots=2)
    assert [row[0].tokens for row in found] == [[7] * 9] * 6
    assert len(steps) == 30


def test_a_step_of_slots_writes_the_same_memory() -> None:
    """A CUDA graph needs this: from the step that is recorded on, no tensor has another address."""
    search = beam._Search(make_model(), make_sources(20, seed=3), Decoding(), 5)
    same_memory(search, 5, lambda: [search.state, search.beams, *search.state.layers])


def same_memory(search: "beam._Search", slots: int, holders: Callable[[], list[object]]) -> None:
    """Assert that steps write the same tensors."""

    def places() -> list[int]:
        return [tensor.data_ptr() for holder in holders() for tensor in tensors_of(holder)]

    with torch.inference_mode():
        search._begin(np.arange(slots))
        before = places()
        assert len(before) > 4
        for _ in range(40):
            search._step()
        search._begin(np.arange(slots))
    assert places() == before


def tensors_of(holder: object) -> list[torch.Tensor]:
    names = getattr(holder, "__slots__", None) or vars(holder)
    return [value for name in names if isinstance(value := getattr(holder, name), torch.Tensor)]


@pytest.mark.system
@pytest.mark.parametrize("attention", ["softmax", "distant"])
@pytest.mark.parametrize("slots", [None, 5])
@pytest.mark.usefixtures("distant")
def test_a_step_on_a_gpu_neither_mixes_devices_nor_waits(
    slots: int | None, attention: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As many words as make blocks of the vocabulary.
    steps_on_a_gpu(lambda: make_model(vocab_size=64 * 40 + 5, attention=attention), slots, tmp_path, monkeypatch)


def steps_on_a_gpu(
    make: Callable[[], Any], slots: int | None, folder: Path, monkeypatch: pytest.MonkeyPatch, **how: Any
) -> None:
    with fake_cuda(folder, monkeypatch) as device:
        with device:
            model = make()
            for each in getattr(model, "models", [model]):
                each.cast_parameters(torch.bfloat16)
        with torch.no_grad():
            search = beam._Search(model, make_sources(5, seed=3), Decoding(), slots, **how)
            search._step()
            search._begin(np.arange(5))
            for _ in range(3):
                search._step()
    assert search.beams.alive_logp_Nk.device == device
    assert search.beams.alive_logp_Nk.shape == (5, 4)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("slots", [None, 7])
@pytest.mark.parametrize("norm", ["post", "pre"])
def test_on_a_gpu_the_search_is_the_same(norm: str, slots: int | None) -> None:
    model, sources = make_model(norm=norm), make_sources(30, seed=3)
    settings = Decoding(nbest=4, max_extra_tokens=10)
    expected = beam_search(model, sources, settings=settings)
    found = beam_search(model.to("cuda"), sources, settings=settings, slots=slots)
    assert [[h.tokens for h in row] for row in found] == [[h.tokens for h in row] for row in expected]
    scores, wanted = ([h.score for row in rows for h in row] for rows in (found, expected))
    assert scores == pytest.approx(wanted, abs=1e-4)


def test_equal_probabilities_go_to_lower_ids() -> None:
    model = make_model()
    with torch.no_grad():
        model.output_projection.zero_()
    # All 23 tokens have p = 1/23. Best two tokens first: `</s>` (3) and 4, 5, 6; the shortest output wins under α = 0.
    settings = Decoding(beam=2, length_penalty=0.0, max_extra_tokens=1, nbest=2)
    (row,) = beam_search(model, [[7, 8]], settings=settings)
    assert [h.tokens for h in row] == [[], [4]]
    assert [h.log_probability for h in row] == pytest.approx([-math.log(23), -2 * math.log(23)], abs=1e-5)


def test_equal_probabilities_at_the_cut_follow_the_order() -> None:
    model = make_model()
    with torch.no_grad():
        model.output_projection.zero_()
        model.output_projection[EOS, 0] = -50.0
        model.decoder[-1].ffn_residual.norm.weight.zero_()
        model.decoder[-1].ffn_residual.norm.bias.zero_()
        model.decoder[-1].ffn_residual.norm.bias[0] = 1.0
    # `</s>` has p = e^-50; the 19 others that may be chosen tie: the beam is (4), (5), then (4 4), (4 5).
    settings = Decoding(beam=2, length_penalty=0.0, max_extra_tokens=2, nbest=2)
    (row,) = beam_search(model, [[]], settings=settings)
    assert [h.tokens for h in row] == [[4, 4], [4, 5]]
    assert_same([row], [reference_search(model, [], settings)])


@torch.no_grad()
@pytest.mark.parametrize("fixed_shapes", [False, True])
@pytest.mark.parametrize(
    "change",
    [
        {"norm": "post"},
        {"begin_with_pad": True},
        {"begin_with_zeros": True},
        {"begin_with_end": True, "norm": "pre", "positions": "sinusoidal_t2t", "first_position": 2},
        {"norm": "pre"},
        {"attention": "distant"},
    ],
    ids=str,
)
@pytest.mark.usefixtures("distant")
def test_cached_logits_equal_the_packed_decoders(change: dict[str, object], fixed_shapes: bool) -> None:
    model, beam = make_model(5, **change), 2
    sources = [[*source, EOS] for source in make_sources(4, seed=5)]
    rng = np.random.default_rng(1)
    targets = torch.from_numpy(rng.integers(4, 23, (4 * beam, 40)))
    targets[:, 0] = BOS
    longest = max(map(len, sources))
    state = model.new_decoder_state(slots=4, beam_size=beam, source_room=longest, longest=40, fixed_shapes=fixed_shapes)
    model.begin_sentences(state, torch.arange(4), packed(sources))
    stay = torch.arange(beam).expand(4, beam)
    found = []
    for tokens in targets.unbind(1):
        found.append(model.logits(model.decode_step(tokens, state)))
        state.end_step(stay)
    repeated = packed([source for source in sources for _ in range(beam)])
    memory_SD = model.encode(repeated)
    expected = model.logits(model.decode(packed(targets.tolist()), memory_SD, repeated)).view(4 * beam, 40, -1)
    torch.testing.assert_close(torch.stack(found, dim=1), expected, atol=1e-5, rtol=0)


@torch.no_grad()
@pytest.mark.parametrize("slots", [None, 2])
@pytest.mark.parametrize("beam", [1, 3])
def test_given_tokens_are_certain_though_no_search_chooses_them(slots: int | None, beam: int) -> None:
    model, sources, given = make_model(7), make_sources(5), (9, 4)
    settings = Decoding(beam=beam, max_extra_tokens=6, nbest=beam)
    found = beam_search(model, sources, settings=settings, slots=slots, given=given, never=[9])
    for row in found:
        assert all(tuple(one.tokens[:2]) == given and 9 not in one.tokens[2:] for one in row)
    free = beam_search(model, sources, settings=settings, slots=slots, given=given)
    assert_same(free, [reference_search(model, source, settings, given) for source in sources])


def test_special_tokens_are_never_chosen_and_the_mode_is_kept() -> None:
    model = make_model(6, dropout=0.5)
    with torch.no_grad():
        model.output_projection[[PAD, UNK, BOS]] *= 20
    model.train()
    sources = make_sources(20)
    settings = Decoding(max_extra_tokens=5, nbest=4)
    found = beam_search(model, sources, settings=settings)
    assert model.training
    assert all(token > EOS for row in found for hypothesis in row for token in hypothesis.tokens)
    assert_same(beam_search(model, sources, settings=settings), found)


def test_nothing_to_do_and_the_empty_source() -> None:
    model = make_model()
    assert beam_search(model, [], settings=Decoding()) == []
    (row,) = beam_search(model, [[]], settings=Decoding(max_extra_tokens=0))
    assert [hypothesis.tokens for hypothesis in row] == [[]]


def test_outputs_end_where_positions_end() -> None:
    model = make_model(max_positions=10)
    with torch.no_grad():
        model.output_projection[EOS] = 0
        model.decoder[-1].ffn_residual.norm.bias[0] = 100
        model.output_projection[7, 0] = 10
    (row,) = beam_search(model, [[5] * 9], settings=Decoding(max_extra_tokens=50))
    assert row[0].tokens == [7] * 9


@pytest.mark.parametrize("slots", [None, 2])
def test_a_model_whose_numbers_are_not_finite_finds_nothing(slots: int | None) -> None:
    model = make_model()
    with torch.no_grad():
        model.embedding.fill_(math.nan)
    found = beam_search(model, make_sources(5), settings=Decoding(), slots=slots)
    assert found == [[]] * 5


def test_the_first_step_computes_one_hypothesis_per_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    """A beam of more than half the vocabulary, of 23 tokens, needs extensions of several hypotheses."""
    model, rows = make_model(), []
    decode_step = model.decode_step

    def counting(tokens_B: torch.Tensor, state: DecoderState) -> torch.Tensor:
        rows.append(len(tokens_B))
        return decode_step(tokens_B, state)

    monkeypatch.setattr(model, "decode_step", counting)
    for width, first in ((4, 5), (12, 60)):
        rows.clear()
        settings = Decoding(beam=width, max_extra_tokens=4)
        sources = make_sources(5)
        expected = [reference_search(model, source, settings) for source in sources]
        assert_same(beam_search(model, sources, settings=settings), expected)
        assert rows[:2] == [first, 5 * width]
