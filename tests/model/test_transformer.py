"""The model: layers, masks, initialisation and loss, compared with the equations of the paper."""

import math
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from dist_transformer.config.presets import PRESETS
from dist_transformer.config.settings import ModelConfig
from dist_transformer.model.attention import AttentionLayout
from dist_transformer.model.layers import DecoderLayer, EncoderLayer, FeedForward, Residual
from dist_transformer.model.loss import LossSums
from dist_transformer.model.packed import IGNORED
from dist_transformer.model.positions import sinusoidal_positions
from dist_transformer.model.transformer import Transformer, training_flops
from tests.model.small_batches import (
    BATCH,
    BOS,
    EOS,
    FIRST_WORD,
    PAD,
    PAIRS,
    SMALL,
    count_parameters,
    gradients,
    hidden_states,
    make_batch,
    make_model,
    make_pairs,
)
from tests.support.tiny import tiny_config


@pytest.mark.parametrize(("preset", "parameters"), [("base", 63_082_496), ("big", 214_245_376)])
def test_size_of_the_papers_models(preset: str, parameters: int) -> None:
    assert count_parameters(replace(PRESETS[preset].model, vocab_size=37_000)) == parameters


@pytest.mark.parametrize(
    ("options", "more"),
    [
        ({}, 0),
        ({"norm": "pre"}, 2 * 2 * 8),
        ({"positions": "learned"}, 20 * 8),
        ({"tie_embeddings": "target"}, 10 * 8),
        ({"tie_embeddings": "none"}, 2 * 10 * 8),
        ({"tie_embeddings": "target", "target_vocab_size": 7, "output_bias": True}, 7 * 8 + 7),
        # Inner width 12: each of the three attentions has 3 · 12 · (8 + 1) and 12 · 8 + 8, not 4 · 8 · (8 + 1).
        ({"head_width": 6}, 3 * (324 + 104 - 288)),
        ({"output_bias": True}, 10),
        ({"encoder_layers": 3}, 2 * 532),
        ({"decoder_layers": 3}, 2 * 836),
    ],
)
def test_size_by_hand(options: dict[str, object], more: int) -> None:
    small = tiny_config(width=8, ffn_width=12, vocab_size=10, max_positions=20)
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
    assert training_flops(config, source_tokens=3, target_tokens=5, passes=2) == 2 * 30_048
    # Inner width 12 in place of 8.
    wide = replace(config, head_width=6)
    assert training_flops(wide, source_tokens=1, target_tokens=1) == 6 * (12 * 96 + 2 * 192 + 80)


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
    config = replace(PRESETS["tiny"].model, vocab_size=8000, norm=norm, embedding_init=embedding_init)
    assert abs(fresh_loss(config)) < bound


def test_embeddings_start_at_the_scale_that_the_config_names() -> None:
    normal, xavier = (make_model(embedding_init=name, vocab_size=3000, width=32) for name in ("normal", "xavier"))
    assert normal.embedding.std().item() == pytest.approx(32**-0.5, rel=0.02)
    bound = math.sqrt(6 / (3000 + 32))
    assert bound * 0.99 < xavier.embedding.abs().max().item() <= bound
    untied = make_model(tie_embeddings="none", vocab_size=3000, width=32)
    for weight in untied.embedding_weights().values():
        assert weight.std().item() == pytest.approx(32**-0.5, rel=0.02)


def test_every_parameter_is_initialised() -> None:
    """Memory that no one wrote would keep the NaN that deterministic mode fills it with."""
    torch.use_deterministic_algorithms(True)
    try:
        for options in ({}, {"tie_embeddings": "none", "positions": "learned", "norm": "pre"}):
            assert all(parameter.isfinite().all() for parameter in make_model(**options).parameters())
    finally:
        torch.use_deterministic_algorithms(False)


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


def normalised(norm: nn.LayerNorm, x: torch.Tensor, epsilon: float = 1e-5) -> torch.Tensor:
    return functional.layer_norm(x, norm.normalized_shape, norm.weight, norm.bias, epsilon)


@pytest.mark.parametrize("norm", ["post", "pre"])
def test_residual_connection_is_the_equation(norm: str) -> None:
    residual = Residual(replace(SMALL, norm=norm, dropout=0.5, norm_epsilon=0.03)).eval()
    x_TD, matrix = torch.randn(9, 16), torch.randn(16, 16)
    with torch.no_grad():
        residual.norm.weight.normal_()
        residual.norm.bias.normal_()
    expected = (
        normalised(residual.norm, x_TD + x_TD @ matrix, 0.03)
        if norm == "post"
        else x_TD + normalised(residual.norm, x_TD, 0.03) @ matrix
    )
    torch.testing.assert_close(residual(x_TD, lambda x: x @ matrix), expected)


@pytest.mark.parametrize("activation", ["relu", "gelu", "swish"])
def test_feed_forward_is_the_equation(activation: str) -> None:
    layer = FeedForward(replace(SMALL, activation=activation))
    layer.reset_parameters()
    x_TD = torch.randn(9, 16)
    inner = x_TD @ layer.inner.weight.t() + layer.inner.bias
    inner = {
        "relu": inner.clamp(min=0),
        "gelu": inner * 0.5 * (1 + torch.erf(inner / math.sqrt(2))),
        "swish": inner / (1 + torch.exp(-inner)),
    }[activation]
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
        return x + normalised(residual.norm, x) * factor if norm == "pre" else normalised(residual.norm, x + x * factor)

    def feed(layer: EncoderLayer | DecoderLayer, x: torch.Tensor) -> torch.Tensor:
        residual, ffn = layer.ffn_residual, layer.feed_forward
        return x + ffn(normalised(residual.norm, x)) if norm == "pre" else normalised(residual.norm, x + ffn(x))

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


@pytest.mark.parametrize("tie_embeddings", ["all", "target", "none"])
@pytest.mark.parametrize(("setting", "first"), [("begin_with_pad", PAD), ("begin_with_end", EOS)])
def test_a_decoder_may_begin_with_the_vector_of_pad_or_end(tie_embeddings: str, setting: str, first: int) -> None:
    model, plain = (make_model(**{setting: begins}, tie_embeddings=tie_embeddings) for begins in (True, False))
    name = "embedding" if tie_embeddings == "all" else "target_embedding"
    with torch.no_grad():
        plain.get_parameter(name)[BOS] = plain.get_parameter(name)[first]
    # Dummies at the end of a pack have the first position, too.
    real = BATCH.labels_T != IGNORED
    assert torch.equal(hidden_states(model, BATCH)[real], hidden_states(plain, BATCH)[real])
    states = model.decode(BATCH.target, model.encode(BATCH.source), BATCH.source)
    (rows,) = torch.autograd.grad(states[real].square().sum(), [model.get_parameter(name)])
    assert rows[first].any()
    assert not rows[BOS].any()


def test_a_decoder_may_begin_with_zeros() -> None:
    model, plain = (make_model(begin_with_zeros=begins, tie_embeddings="none") for begins in (True, False))
    with torch.no_grad():
        plain.get_parameter("target_embedding")[BOS] = 0
    # Dummies at the end of a pack have the first position, too.
    real = BATCH.labels_T != IGNORED
    assert torch.equal(hidden_states(model, BATCH)[real], hidden_states(plain, BATCH)[real])
    states = model.decode(BATCH.target, model.encode(BATCH.source), BATCH.source)
    (rows,) = torch.autograd.grad(states[real].square().sum(), [model.get_parameter("target_embedding")])
    assert rows.any()
    assert not rows[[PAD, BOS]].any()


def test_loss_is_that_of_the_logits() -> None:
    for options in ({}, {"tie_embeddings": "none"}):
        model = make_model(**options)
        sums = model(BATCH, 0.1)
        logits = model.logits(hidden_states(model, BATCH))
        expected = functional.cross_entropy(
            logits, BATCH.labels_T, label_smoothing=0.1, reduction="sum", ignore_index=IGNORED
        )
        assert sums.loss.item() == pytest.approx(expected.item(), rel=1e-5)
        assert sums.tokens.item() == sum(len(target) + 1 for _, target in PAIRS)


@pytest.mark.parametrize("kernel", ["packed", "groups"])
def test_rdrop_without_dropout_is_one_pass(kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each sentence of the doubled batch sees its own tokens, as in a batch of one copy."""
    monkeypatch.setattr(Transformer, "_kernel", lambda *_: kernel)
    model = make_model(positions="learned", output_bias=True)
    alone, both = model(BATCH, 0.1), model(BATCH, 0.1, 5.0)
    torch.testing.assert_close(both, alone, rtol=1e-5, atol=0)
    found, expected = gradients(model, both.loss), gradients(model, alone.loss)
    for name, gradient in found.items():
        assert (gradient - expected[name]).norm() < 1e-4 * expected[name].norm(), name


def test_rdrop_compares_two_passes_with_other_masks() -> None:
    """Loss and gradient of both passes by all logits, with the masks that the model draws."""
    model = make_model(dropout=0.3)
    torch.manual_seed(5)
    found = model(BATCH, 0.1, 5.0)
    torch.manual_seed(5)
    source, target = BATCH.source.twice(), BATCH.target.twice()
    hidden_TD = model.decode(target, model.encode(source), source)
    used = int(BATCH.target.lengths.sum())
    labels_T = BATCH.labels_T[:used]
    log_p, log_q = (model.logits(hidden_TD[start:][:used]).double().log_softmax(1) for start in (0, used))
    cross_entropy = sum(
        functional.cross_entropy(logits, labels_T, label_smoothing=0.1, reduction="sum") for logits in (log_p, log_q)
    )
    divergence = ((log_p.exp() - log_q.exp()) * (log_p - log_q)).sum()
    assert divergence > 0.1 * used
    expected = cross_entropy / 2 + 5.0 / 4 * divergence
    assert found.loss.item() == pytest.approx(expected.item(), rel=1e-5)
    wanted = gradients(model, expected)
    for name, gradient in gradients(model, found.loss).items():
        assert (gradient - wanted[name]).norm() < 1e-4 * wanted[name].norm(), name


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


@pytest.mark.system
def test_shapes_are_counted_without_the_compiler() -> None:
    """In a process of its own, because this one has imported much: names and shapes of all, and no value."""
    program = """
import sys
from dist_transformer.config.settings import ModelConfig
from dist_transformer.model.transformer import Transformer, shapes_only
config = ModelConfig(width=8, heads=2, ffn_width=8, vocab_size=12, norm="pre", tie_embeddings="none", output_bias=True)
counted = {name: tuple(each.shape) for name, each in shapes_only(config).named_parameters()}
assert "torch._dynamo" not in sys.modules, "two seconds at every start"
assert counted == {name: tuple(each.shape) for name, each in Transformer(config).named_parameters()}
assert {each.device.type for each in shapes_only(config).parameters()} == {"meta"}
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=600)


@pytest.mark.parametrize("kernel", ["packed", "groups"])
@pytest.mark.parametrize("alpha", [0.0, 5.0])
def test_guided_attention_adds_the_loss_of_links(alpha: float, kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Loss and gradient by dense weights in float64, sentence by sentence; `<s>`, dummies and some others have none."""
    monkeypatch.setattr(Transformer, "_kernel", lambda *_: kernel)
    # A sentence of more tokens than a head is wide, too.
    model, rng = make_model(positions="learned", heads=4), np.random.default_rng(3)
    links = np.full(len(BATCH.labels_T), IGNORED)
    ends, wanted = np.cumsum([BATCH.source.lengths, BATCH.target.lengths], axis=1), []
    for source, target, end, last in zip(BATCH.source.lengths, BATCH.target.lengths, *ends, strict=True):
        rows = np.arange(last - target + 1, last)[::2]
        links[rows] = rng.integers(source, size=len(rows))
        wanted += [(row, slice(end - source, end), links[row]) for row in rows]
    batch = replace(BATCH, links_T=torch.from_numpy(links))
    inputs: list[tuple[torch.Tensor, ...]] = []
    model.guided_attention.register_forward_pre_hook(lambda _, given: inputs.append(given))
    model.decode(BATCH.target, model.encode(BATCH.source), BATCH.source)
    x_TD, memory_SD, _ = inputs[0]
    width = model.guided_attention.head_width
    weight, bias = model.guided_attention.qkv_weight.double(), model.guided_attention.qkv_bias.double()
    q_TK = (x_TD.double() @ weight[:width].t() + bias[:width]) * width**-0.5
    keys = slice(SMALL.width, SMALL.width + width)
    k_SK = memory_SD.double() @ weight[keys].t() + bias[keys]
    loss = -sum((q_TK[row] @ k_SK[source].t()).log_softmax(0)[link] for row, source, link in wanted)
    alone, guided = model(batch, 0.1, alpha), model(batch, 0.1, alpha, 0.05)
    torch.testing.assert_close(guided.nll, alone.nll)
    assert (guided.loss - alone.loss).item() == pytest.approx(0.05 * loss.item(), rel=1e-4)
    expected = gradients(model, alone.loss + 0.05 * loss)
    for name, gradient in gradients(model, guided.loss).items():
        assert (gradient - expected[name]).norm() < 1e-4 * expected[name].norm(), name


def test_guided_weights_are_not_dropped() -> None:
    """A link that is dropped would have no weight, and its loss no bound."""
    attention = make_model(attention_dropout=0.9).guided_attention
    layout = AttentionLayout(BATCH.target, BATCH.source, causal=False, kernel="groups")
    x_TD, memory_SD = (torch.randn(len(side.tokens_T), SMALL.width) for side in (BATCH.target, BATCH.source))
    links_T = torch.where(BATCH.labels_T == IGNORED, IGNORED, 0)
    (mixed, loss), (other, same) = (attention.train(mode)(x_TD, memory_SD, layout, links_T) for mode in (True, False))
    assert not torch.equal(mixed, other)
    assert loss == same
