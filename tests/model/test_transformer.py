import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from dist_transformer.config.presets import PRESETS
from dist_transformer.config.settings import ModelConfig
from dist_transformer.model.attention import MultiHeadAttention
from dist_transformer.model.layers import DecoderLayer, EncoderLayer, FeedForward, Residual
from dist_transformer.model.loss import LossSums
from dist_transformer.model.positions import sinusoidal_positions
from dist_transformer.model.transformer import Transformer, training_flops
from dist_transformer.packed import IGNORED, PackedBatch, PackedTokens, pack_side

BOS, EOS, FIRST_WORD = 2, 3, 4
Pair = tuple[list[int], list[int]]
# Without dropout, so that one run equals another; options are set on it.
SMALL = ModelConfig(
    width=16, encoder_layers=2, decoder_layers=2, heads=2, ffn_width=24, dropout=0.0, vocab_size=40, max_positions=32
)


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Such small products wait for their threads: 20 times longer on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def make_pairs(lengths: Sequence[tuple[int, int]], vocab_size: int = 40, seed: int = 0) -> list[Pair]:
    rng = np.random.default_rng(seed)
    words = [rng.integers(FIRST_WORD, vocab_size, size).tolist() for pair in lengths for size in pair]
    return list(zip(words[::2], words[1::2], strict=True))


def pack(sentences: list[list[int]], tail: int, cap: int = 32) -> PackedTokens:
    flat = np.array([token for sentence in sentences for token in sentence], dtype=np.int64)
    lengths = np.array([len(sentence) for sentence in sentences], dtype=np.int64)
    offsets = len(lengths) + -(-tail // cap) + 2
    return pack_side(flat, lengths, size=len(flat) + tail, offset_count=offsets, max_length=cap)


def make_batch(pairs: list[Pair], tail: int = 5) -> PackedBatch:
    labels = [token for _, target in pairs for token in (*target, EOS)]
    return PackedBatch(
        source=pack([[*source, EOS] for source, _ in pairs], tail),
        target=pack([[BOS, *target] for _, target in pairs], tail + 3),
        labels_T=torch.tensor(labels + [IGNORED] * (tail + 3)),
    )


def make_model(seed: int = 0, **options: object) -> Transformer:
    torch.manual_seed(seed)
    return Transformer(replace(SMALL, **options))  # type: ignore[arg-type]


def gradients(model: Transformer, loss: torch.Tensor) -> dict[str, torch.Tensor]:
    names, parameters = zip(*model.named_parameters(), strict=True)
    return dict(zip(names, torch.autograd.grad(loss, parameters), strict=True))


def hidden_states(model: Transformer, batch: PackedBatch) -> torch.Tensor:
    with torch.no_grad():
        return model.decode(batch.target, model.encode(batch.source), batch.source)


def count_parameters(config: ModelConfig) -> int:
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in Transformer(config).parameters())


PAIRS = make_pairs([(5, 7), (1, 2), (12, 9), (0, 0), (6, 15), (9, 1)])
BATCH = make_batch(PAIRS)


# Size


@pytest.mark.parametrize(("preset", "parameters"), [("base", 63_082_496), ("big", 214_245_376)])
def test_size_of_the_papers_models(preset: str, parameters: int) -> None:
    assert count_parameters(replace(PRESETS[preset].model, vocab_size=37_000)) == parameters


@pytest.mark.parametrize(
    ("options", "more"),
    [
        ({}, 0),
        ({"norm": "pre"}, 2 * 2 * 8),
        ({"positions": "learned"}, 20 * 8),
        ({"tie_embeddings": False}, 2 * 10 * 8),
        # Inner width 12: each of the three attentions has 3 · 12 · (8 + 1) and 12 · 8 + 8, not 4 · 8 · (8 + 1).
        ({"head_width": 6}, 3 * (324 + 104 - 288)),
        ({"activation": "gelu"}, 0),
        ({"attention_dropout": 0.1, "ffn_dropout": 0.1, "dropout": 0.3}, 0),
        ({"encoder_layers": 3}, 2 * 532),
        ({"decoder_layers": 3}, 2 * 836),
    ],
)
def test_size_by_hand(options: dict[str, object], more: int) -> None:
    small = ModelConfig(
        width=8, heads=2, ffn_width=12, encoder_layers=1, decoder_layers=1, vocab_size=10, max_positions=20
    )
    attention, ffn, norm = 4 * 8 * 8 + 4 * 8, 2 * 8 * 12 + 12 + 8, 2 * 8
    assert (attention + ffn + 2 * norm, 2 * attention + ffn + 3 * norm) == (532, 836)
    assert count_parameters(replace(small, **options)) == 10 * 8 + 532 + 836 + more  # type: ignore[arg-type]


def test_flops_by_hand() -> None:
    config = ModelConfig(width=8, heads=2, ffn_width=12, encoder_layers=1, decoder_layers=1, vocab_size=10)
    source = (4 * 64 + 192) + 2 * 64
    target = 6 * 64 + 192 + 10 * 8
    assert training_flops(config, source_tokens=1, target_tokens=0) == 6 * source
    assert training_flops(config, source_tokens=0, target_tokens=1) == 6 * target
    assert training_flops(config, source_tokens=3, target_tokens=5) == 6 * (3 * source + 5 * target) == 30_048
    # Inner width 12 in place of 8.
    wide = replace(config, head_width=6)
    assert training_flops(wide, source_tokens=1, target_tokens=1) == 6 * (12 * 96 + 2 * 192 + 80)


def test_flops_of_big() -> None:
    big = replace(PRESETS["big"].model, vocab_size=37_000)
    assert training_flops(big, source_tokens=1, target_tokens=1) == pytest.approx(1.2843e9, rel=1e-4)


def test_flops_are_six_a_matrix_element() -> None:
    """One source and one target token pass every matrix once."""
    config = replace(SMALL, head_width=5, tie_embeddings=False)
    with torch.device("meta"):
        model = Transformer(config)
    embeddings = {"embedding", "target_embedding"}
    matrices = sum(p.numel() for name, p in model.named_parameters() if p.dim() == 2 and name not in embeddings)
    assert training_flops(config, source_tokens=1, target_tokens=1) == 6 * matrices


# Initialisation


def fresh_loss(config: ModelConfig) -> float:
    """Nats a token of random targets above those of a uniform guess."""
    torch.manual_seed(0)
    model = Transformer(config).eval()
    pairs = make_pairs([(length, length) for length in range(4, 36)], config.vocab_size)
    with torch.no_grad():
        sums = model(make_batch(pairs), 0.0)
    return (sums.nll / sums.tokens).item() - math.log(config.vocab_size)


@pytest.mark.parametrize("norm", ["post", "pre"])
@pytest.mark.parametrize(("embedding_init", "bound"), [("normal", 0.6), ("xavier", 0.1)])
def test_fresh_model_guesses(norm: str, embedding_init: str, bound: float) -> None:
    """Logits of the normal start have variance 1, which costs 1/2; those of the smaller Xavier start nearly nothing."""
    config = ModelConfig(
        width=128,
        encoder_layers=2,
        decoder_layers=2,
        heads=4,
        ffn_width=256,
        vocab_size=8000,
        norm=norm,
        embedding_init=embedding_init,
    )
    assert abs(fresh_loss(config)) < bound


@pytest.mark.system
@pytest.mark.parametrize("norm", ["post", "pre"])
def test_fresh_base_guesses(norm: str) -> None:
    assert abs(fresh_loss(replace(PRESETS["base"].model, vocab_size=37_000, norm=norm))) < 0.6


def test_embeddings_start_at_the_scale_that_the_config_names() -> None:
    normal, xavier = (make_model(embedding_init=name, vocab_size=3000, width=32) for name in ("normal", "xavier"))
    assert normal.embedding.std().item() == pytest.approx(32**-0.5, rel=0.02)
    bound = math.sqrt(6 / (3000 + 32))
    assert bound * 0.99 < xavier.embedding.abs().max().item() <= bound
    untied = make_model(tie_embeddings=False, vocab_size=3000, width=32)
    for weight in untied.embedding_weights().values():
        assert weight.std().item() == pytest.approx(32**-0.5, rel=0.02)


def test_every_parameter_is_initialised() -> None:
    """Memory that no one wrote would keep the NaN that deterministic mode fills it with."""
    torch.use_deterministic_algorithms(True)
    try:
        for options in ({}, {"tie_embeddings": False, "positions": "learned", "norm": "pre"}):
            assert all(parameter.isfinite().all() for parameter in make_model(**options).parameters())
    finally:
        torch.use_deterministic_algorithms(False)


# The network


def test_embedding_is_scaled_and_positions_are_added() -> None:
    model = make_model().eval()
    model.encoder = nn.ModuleList()
    source = BATCH.source
    expected = model.embedding[source.tokens_T] * 4 + sinusoidal_positions(32, 16)[source.positions_T]
    torch.testing.assert_close(model.encode(source), expected)


def test_dropout_falls_on_embeddings_plus_positions() -> None:
    model = make_model(dropout=0.25)
    model.encoder = nn.ModuleList()
    source = make_batch(make_pairs([(30, 1)] * 40)).source
    whole = model.eval().encode(source)
    torch.manual_seed(0)
    some = model.train().encode(source)
    kept = some != 0
    # 20,000 elements: five standard deviations are 0.016.
    assert kept.float().mean().item() == pytest.approx(0.75, abs=0.016)
    torch.testing.assert_close(some[kept], whole[kept] / 0.75, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("norm", ["post", "pre"])
def test_residual_connection_is_the_equation(norm: str) -> None:
    residual = Residual(replace(SMALL, norm=norm, dropout=0.5)).eval()
    x_TD, matrix = torch.randn(9, 16), torch.randn(16, 16)
    with torch.no_grad():
        residual.norm.weight.normal_()
        residual.norm.bias.normal_()
    expected = residual.norm(x_TD + x_TD @ matrix) if norm == "post" else x_TD + residual.norm(x_TD) @ matrix
    torch.testing.assert_close(residual(x_TD, lambda x: x @ matrix), expected)
    # In training half of the sublayer's output is gone before it is added, and the rest is doubled; x stays whole.
    residual.norm = nn.Identity()  # type: ignore[assignment]
    added = residual.train()(torch.full((9, 16), 8.0), torch.ones_like) - 8
    assert added.unique().tolist() == [0, 2]


@pytest.mark.parametrize("activation", ["relu", "gelu"])
def test_feed_forward_is_the_equation(activation: str) -> None:
    layer = FeedForward(replace(SMALL, activation=activation))
    layer.reset_parameters()
    x_TD = torch.randn(9, 16)
    inner = x_TD @ layer.inner.weight.t() + layer.inner.bias
    inner = inner.clamp(min=0) if activation == "relu" else inner * 0.5 * (1 + torch.erf(inner / math.sqrt(2)))
    torch.testing.assert_close(layer(x_TD), inner @ layer.outer.weight.t() + layer.outer.bias)


@pytest.mark.parametrize("norm", ["post", "pre"])
def test_layers_chain_their_sublayers_in_order(norm: str) -> None:
    config = replace(SMALL, norm=norm)
    encoder, decoder = EncoderLayer(config), DecoderLayer(config)
    x, memory, layout, cross_layout = torch.randn(4, 16), torch.randn(5, 16), object(), object()
    seen: list[tuple[object, ...]] = []

    def attend(name: str, factor: float) -> nn.Module:
        class Attention(nn.Module):
            def forward(self, x: torch.Tensor, memory: torch.Tensor | None, layout: object) -> torch.Tensor:
                seen.append((name, memory, layout))
                return x * factor

        return Attention()

    def connect(residual: Residual, x: torch.Tensor, factor: float) -> torch.Tensor:
        return x + residual.norm(x) * factor if norm == "pre" else residual.norm(x + x * factor)

    def feed(layer: EncoderLayer | DecoderLayer, x: torch.Tensor) -> torch.Tensor:
        residual, ffn = layer.ffn_residual, layer.feed_forward
        return x + ffn(residual.norm(x)) if norm == "pre" else residual.norm(x + ffn(x))

    for layer in (encoder, decoder):
        layer.self_attention = attend("self", -0.5)  # type: ignore[assignment]
        layer.feed_forward.reset_parameters()
        for residual in (module for module in layer.modules() if isinstance(module, Residual)):
            nn.init.normal_(residual.norm.weight)
            nn.init.normal_(residual.norm.bias)
    decoder.cross_attention = attend("cross", 3.0)  # type: ignore[assignment]

    torch.testing.assert_close(encoder(x, layout), feed(encoder, connect(encoder.self_residual, x, -0.5)))
    assert seen == [("self", None, layout)]
    seen.clear()
    after_cross = connect(decoder.cross_residual, connect(decoder.self_residual, x, -0.5), 3.0)
    torch.testing.assert_close(decoder(x, memory, layout, cross_layout), feed(decoder, after_cross))
    assert [(name, layout) for name, _, layout in seen] == [("self", layout), ("cross", cross_layout)]
    assert seen[0][1] is None
    assert seen[1][1] is memory


@pytest.mark.parametrize("norm", ["post", "pre"])
def test_last_states_are_normalised(norm: str) -> None:
    model = make_model(norm=norm).eval()
    with torch.no_grad():
        memory_SD = model.encode(BATCH.source)
    for states in (memory_SD, hidden_states(model, BATCH)):
        torch.testing.assert_close(states.mean(1), torch.zeros(len(states)), rtol=0, atol=1e-5)
        torch.testing.assert_close(states.var(1, correction=0), torch.ones(len(states)), rtol=0, atol=1e-3)


def test_loss_is_that_of_the_logits() -> None:
    for options in ({}, {"tie_embeddings": False}):
        model = make_model(**options)
        sums = model(BATCH, 0.1)
        logits = model.logits(hidden_states(model, BATCH))
        expected = functional.cross_entropy(
            logits, BATCH.labels_T, label_smoothing=0.1, reduction="sum", ignore_index=IGNORED
        )
        assert sums.loss.item() == pytest.approx(expected.item(), rel=1e-5)
        assert sums.tokens.item() == sum(len(target) + 1 for _, target in PAIRS)


@pytest.mark.parametrize("norm", ["post", "pre"])
def test_pack_is_the_sum_of_its_sentences(norm: str) -> None:
    model = make_model(norm=norm, positions="learned")
    packed = model(BATCH, 0.1)
    alone = [model(make_batch([pair], tail=tail), 0.1) for tail, pair in enumerate(PAIRS)]
    summed = LossSums(*(torch.stack(values).sum() for values in zip(*alone, strict=True)))
    assert packed.tokens == summed.tokens
    assert packed.loss.item() == pytest.approx(summed.loss.item(), rel=1e-5)
    assert packed.nll.item() == pytest.approx(summed.nll.item(), rel=1e-5)
    found, expected = gradients(model, packed.loss), gradients(model, summed.loss)
    for name, gradient in found.items():
        difference = ((gradient - expected[name]).norm() / expected[name].norm()).item()
        assert difference < 1e-4, f"{name}: {difference:.1e}"


def test_order_and_tail_change_nothing() -> None:
    model = make_model()
    sums = model(BATCH, 0.1)
    for pairs, tail in ((PAIRS[::-1], 5), (PAIRS, 0), (PAIRS, 100)):
        assert model(make_batch(pairs, tail), 0.1).loss.item() == pytest.approx(sums.loss.item(), rel=1e-5)


def test_later_target_tokens_do_not_change_earlier_states() -> None:
    model = make_model().eval()
    before = hidden_states(model, BATCH)
    # Sentence 2 is <s> and 9 words, after 8 and 3 rows: change its sixth word.
    row = 8 + 3 + 6
    tokens_T = BATCH.target.tokens_T.clone()
    tokens_T[row] = (tokens_T[row] + 1 - FIRST_WORD) % 36 + FIRST_WORD
    after = hidden_states(model, replace(BATCH, target=replace(BATCH.target, tokens_T=tokens_T)))
    changed = ((after - before).abs().amax(1) > 1e-6) & (BATCH.labels_T != IGNORED)
    assert changed.nonzero().flatten().tolist() == list(range(row, 8 + 3 + 10))


def test_a_source_word_changes_every_state_of_its_sentence_and_no_other() -> None:
    model = make_model().eval()
    before = hidden_states(model, BATCH)
    # Sentence 2 of the source is 12 words and </s>, after 6 and 2 rows: change its last word.
    tokens_S = BATCH.source.tokens_T.clone()
    tokens_S[6 + 2 + 11] = (tokens_S[6 + 2 + 11] + 1 - FIRST_WORD) % 36 + FIRST_WORD
    source = replace(BATCH.source, tokens_T=tokens_S)
    with torch.no_grad():
        changed = (model.encode(source) - model.encode(BATCH.source)).abs().amax(1)[: source.lengths.sum()] > 1e-6
    assert changed.nonzero().flatten().tolist() == list(range(8, 21))
    after = hidden_states(model, replace(BATCH, source=source))
    changed = ((after - before).abs().amax(1) > 1e-6) & (BATCH.labels_T != IGNORED)
    assert changed.nonzero().flatten().tolist() == list(range(11, 21))


def test_pack_without_sentences_gives_zero() -> None:
    model = make_model(norm="pre", dropout=0.1)
    sums = model(make_batch([], tail=40), 0.1)
    assert [value.item() for value in sums] == [0.0, 0.0, 0]
    for name, gradient in gradients(model, sums.loss).items():
        assert (gradient == 0).all(), name


# Options


@pytest.mark.parametrize(
    "options",
    [
        {"norm": "pre"},
        {"positions": "learned"},
        {"activation": "gelu"},
        {"dropout": 0.3},
        {"attention_dropout": 0.3},
        {"ffn_dropout": 0.3},
        {"tie_embeddings": False},
        {"head_width": 5},
        {"embedding_init": "xavier"},
    ],
    ids=lambda options: next(iter(options)),
)
def test_option_changes_the_outcome_and_trains(options: dict[str, object]) -> None:
    plain, model = make_model(), make_model(**options)
    before = model(BATCH, 0.1).loss
    if {"dropout", "attention_dropout", "ffn_dropout"} & options.keys():
        # In training each draw differs; in evaluation there is none.
        assert before != model(BATCH, 0.1).loss
        assert model.eval()(BATCH, 0.1).loss == plain(BATCH, 0.1).loss
    else:
        assert before.item() != pytest.approx(plain(BATCH, 0.1).loss.item(), abs=1e-3)
    found = gradients(model, before)
    for name, gradient in found.items():
        assert gradient.isfinite().all(), name
        assert gradient.any(), f"{name} does not learn"
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.sub_(0.5 / before.item() * found[name])
    assert model.eval()(BATCH, 0.1).loss < before


def test_each_attention_knows_its_role() -> None:
    model = make_model()
    roles = [module.role for module in model.modules() if isinstance(module, MultiHeadAttention)]
    assert roles == ["encoder", "encoder", "decoder", "cross", "decoder", "cross"]


def test_attention_from_outside_trains(distant: str) -> None:
    model = make_model(attention=distant)
    found = gradients(model, model(BATCH, 0.1).loss)
    assert len([name for name in found if name.endswith("slopes_H")]) == 6
    for name, gradient in found.items():
        assert gradient.any(), f"{name} does not learn"


def test_untied_embeddings_have_one_use_each() -> None:
    model = make_model(tie_embeddings=False).eval()
    assert list(model.embedding_weights()) == ["embedding", "target_embedding", "output_projection"]
    assert list(make_model().embedding_weights()) == ["embedding"]

    def outcome() -> list[torch.Tensor]:
        with torch.no_grad():
            memory_SD = model.encode(BATCH.source)
            hidden_TD = model.decode(BATCH.target, memory_SD, BATCH.source)
            return [memory_SD, hidden_TD, model.logits(hidden_TD)]

    for name, changed in (
        ("embedding", [True, True, True]),
        ("target_embedding", [False, True, True]),
        ("output_projection", [False, False, True]),
    ):
        before = outcome()
        with torch.no_grad():
            getattr(model, name).mul_(2)
        assert [not torch.equal(one, other) for one, other in zip(before, outcome(), strict=True)] == changed


def test_logits_are_fp32_for_half_precision_weights() -> None:
    model = make_model().eval().bfloat16()
    # DeepSpeed casts parameters; the table of sinusoids is none.
    model.positions.table = model.positions.table.float()
    hidden_TD = hidden_states(model, BATCH)
    assert hidden_TD.dtype == torch.bfloat16
    assert model.logits(hidden_TD).dtype == torch.float32
    full = make_model().eval()
    loss, expected = model(BATCH, 0.1).loss, full(BATCH, 0.1).loss
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(expected.item(), rel=0.01)


@pytest.mark.parametrize("norm", ["post", "pre"])
def test_learns_a_small_batch_by_heart(norm: str) -> None:
    model = make_model(width=32, ffn_width=64, norm=norm)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(30):
        optimizer.zero_grad()
        sums = model(BATCH, 0.0)
        (sums.loss / sums.tokens).backward()
        optimizer.step()
        losses.append((sums.loss / sums.tokens).item())
    assert losses[0] > 3
    assert losses[-1] < 1.0
