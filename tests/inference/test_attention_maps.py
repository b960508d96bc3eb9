import copy

import numpy as np
import pytest
import torch

from dist_transformer.config.settings import ModelConfig
from dist_transformer.data.vocabulary.tokenizer import BOS_ID, EOS_ID
from dist_transformer.inference.attention_maps import attention_maps, cross_attention_maps
from dist_transformer.model.attention import MultiHeadAttention
from dist_transformer.model.packed import PackedTokens, pack_side
from dist_transformer.model.residual import Residual
from dist_transformer.model.transformer import Transformer

SOURCE, TARGET = [7, 4, 19, 4, 11], [9, 12, 5]


def make_model(norm: str = "post", head_width: int | None = None, **settings: object) -> Transformer:
    torch.manual_seed(5)
    config = ModelConfig(
        width=16,
        heads=2,
        head_width=head_width,
        ffn_width=24,
        encoder_layers=2,
        decoder_layers=3,
        vocab_size=20,
        max_positions=12,
        norm=norm,
        **settings,
    )  # type: ignore[arg-type]
    model = Transformer(config).eval()
    with torch.no_grad():
        # Weights far from uniform, and no bias or norm at the value that hides a mistake.
        for name, parameter in model.named_parameters():
            parameter.mul_(3.0) if name.endswith("qkv_weight") else parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def numbers(tensor: torch.Tensor) -> np.ndarray:
    return tensor.detach().double().numpy()


def layer_norm(x: np.ndarray, norm: torch.nn.LayerNorm) -> np.ndarray:
    centred = x - x.mean(-1, keepdims=True)
    deviation = np.sqrt((centred**2).mean(-1, keepdims=True) + norm.eps)
    return centred / deviation * numbers(norm.weight) + numbers(norm.bias)


def attend(
    attention: MultiHeadAttention, x: np.ndarray, memory: np.ndarray, *, causal: bool
) -> tuple[np.ndarray, np.ndarray]:
    """Compute the paper's equations, one number at a time. Return outputs (T, D) and weights (H, T, S)."""
    heads, width = attention.heads, attention.head_width
    weight, bias = numbers(attention.qkv_weight), numbers(attention.qkv_bias)
    parts = [slice(i * heads * width, (i + 1) * heads * width) for i in range(3)]
    queries, keys, values = (
        given @ weight[part].T + bias[part] for given, part in zip((x, memory, memory), parts, strict=True)
    )
    weights = np.zeros((heads, len(x), len(memory)))
    mixed = np.zeros((len(x), heads * width))
    for head in range(heads):
        own = slice(head * width, (head + 1) * width)
        for t in range(len(x)):
            seen = range(t + 1 if causal else len(memory))
            powers = [np.exp(queries[t, own] @ keys[s, own] / np.sqrt(width)) for s in seen]
            for s, power in zip(seen, powers, strict=True):
                weights[head, t, s] = power / sum(powers)
            mixed[t, own] = weights[head, t] @ values[:, own]
    return mixed @ numbers(attention.output.weight).T + numbers(attention.output.bias), weights


def decode_by_hand(model: Transformer, memory: np.ndarray, tokens: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """Hidden states (T, D) before the output projection, and cross-attention weights (L, H, T, S)."""

    def connect(residual: Residual, x: np.ndarray, sublayer) -> np.ndarray:  # type: ignore[no-untyped-def]
        if model.config.norm == "pre":
            return x + sublayer(layer_norm(x, residual.norm))
        return layer_norm(x + sublayer(x), residual.norm)

    x = numbers(model.embedding)[tokens] * np.sqrt(model.config.width) + numbers(model.positions.table)[: len(tokens)]
    maps = []
    for layer in model.decoder:

        def cross(y: np.ndarray, layer=layer) -> np.ndarray:  # type: ignore[no-untyped-def]
            mixed, weights = attend(layer.cross_attention, y, memory, causal=False)
            maps.append(weights)
            return mixed

        def feed(y: np.ndarray, layer=layer) -> np.ndarray:  # type: ignore[no-untyped-def]
            inner, outer = layer.feed_forward.inner, layer.feed_forward.outer
            inside = np.maximum(y @ numbers(inner.weight).T + numbers(inner.bias), 0)
            return inside @ numbers(outer.weight).T + numbers(outer.bias)

        x = connect(layer.self_residual, x, lambda y, layer=layer: attend(layer.self_attention, y, y, causal=True)[0])
        x = connect(layer.cross_residual, x, cross)
        x = connect(layer.ffn_residual, x, feed)
    return (layer_norm(x, model.decoder_norm) if model.config.norm == "pre" else x), np.stack(maps)


def encode_by_hand(model: Transformer, tokens: list[int]) -> np.ndarray:
    """Self-attention weights (L, H, S, S) of the encoder; post-norm only."""
    x = numbers(model.embedding)[tokens] * np.sqrt(model.config.width) + numbers(model.positions.table)[: len(tokens)]
    maps = []
    for layer in model.encoder:
        mixed, weights = attend(layer.self_attention, x, x, causal=False)
        maps.append(weights)
        x = layer_norm(x + mixed, layer.self_residual.norm)
        inner, outer = layer.feed_forward.inner, layer.feed_forward.outer
        inside = np.maximum(x @ numbers(inner.weight).T + numbers(inner.bias), 0)
        x = layer_norm(x + inside @ numbers(outer.weight).T + numbers(outer.bias), layer.ffn_residual.norm)
    return np.stack(maps)


def one_sentence(ids: list[int]) -> PackedTokens:
    return pack_side(np.array(ids), np.array([len(ids)]), size=len(ids), offset_count=2, max_length=len(ids))


@pytest.mark.parametrize("head_width", [None, 5])
@pytest.mark.parametrize("norm", ["post", "pre"])
@torch.no_grad()
def test_maps_are_those_of_the_equations(norm: str, head_width: int | None) -> None:
    model = make_model(norm, head_width)
    source, target = one_sentence([*SOURCE, EOS_ID]), one_sentence([BOS_ID, *TARGET])
    memory = model.encode(source)
    hidden, expected = decode_by_hand(model, numbers(memory), [BOS_ID, *TARGET])
    # The decoder by hand is the model's decoder: then what its layers were given is right too.
    np.testing.assert_allclose(numbers(model.decode(target, memory, source)), hidden, atol=1e-5)
    maps = cross_attention_maps(model, SOURCE, TARGET)
    assert maps.shape == (3, 2, len(TARGET) + 1, len(SOURCE) + 1)
    assert maps.dtype == torch.float32
    np.testing.assert_allclose(maps.numpy(), expected, atol=1e-5)
    np.testing.assert_allclose(maps.sum(-1).numpy(), 1.0, atol=1e-6)
    # Uniform or equal maps would agree with much that is wrong.
    assert expected.max() > 0.5
    assert np.abs(expected[0] - expected[1]).max() > 0.1


def test_self_attention_of_the_encoder_is_that_of_the_equations() -> None:
    model = make_model()
    maps = attention_maps(model, SOURCE, TARGET).encoder_LHSS
    np.testing.assert_allclose(maps.numpy(), encode_by_hand(model, [*SOURCE, EOS_ID]), atol=1e-5)


def test_self_attention_of_the_decoder_sees_what_was_produced() -> None:
    model = make_model()
    first = model.decoder[0].self_attention
    maps = attention_maps(model, SOURCE, TARGET).decoder_LHTT
    assert maps.shape == (3, 2, len(TARGET) + 1, len(TARGET) + 1)
    assert not maps.triu(1).any()
    np.testing.assert_allclose(maps.sum(-1).numpy(), 1.0, atol=1e-6)
    tokens = [BOS_ID, *TARGET]
    x = numbers(model.embedding)[tokens] * np.sqrt(model.config.width) + numbers(model.positions.table)[: len(tokens)]
    np.testing.assert_allclose(maps[0].numpy(), attend(first, x, x, causal=True)[1], atol=1e-5)


def test_cross_attention_is_the_same_alone() -> None:
    model = make_model("pre")
    maps = attention_maps(model, SOURCE, TARGET)
    assert torch.equal(maps.cross_LHTS, cross_attention_maps(model, SOURCE, TARGET))
    assert maps.encoder_LHSS.shape == (2, 2, len(SOURCE) + 1, len(SOURCE) + 1)


def test_maps_are_those_of_torch() -> None:
    """The first decoder layer's input to cross-attention, through torch's own multi-head attention."""
    model = make_model()
    layer = model.decoder[0]
    torch_attention = torch.nn.MultiheadAttention(16, 2, batch_first=True)
    torch_attention.load_state_dict(
        {
            "in_proj_weight": layer.cross_attention.qkv_weight,
            "in_proj_bias": layer.cross_attention.qkv_bias,
            "out_proj.weight": layer.cross_attention.output.weight,
            "out_proj.bias": layer.cross_attention.output.bias,
        }
    )
    given = []
    handle = layer.cross_attention.register_forward_pre_hook(lambda _, inputs: given.append(inputs))
    maps = cross_attention_maps(model, SOURCE, TARGET)
    handle.remove()
    x, memory = given[0][0], given[0][1]
    _, weights = torch_attention(x, memory, memory, need_weights=True, average_attn_weights=False)
    torch.testing.assert_close(maps[0], weights.detach(), atol=1e-6, rtol=0)


def test_adjusted_scores_are_in_the_maps(distant: str) -> None:
    """Queries of zero weight score 0 everywhere: what is left is softmax(cos s - slope · |t - s|)."""
    model = make_model(attention=distant)
    layer = model.decoder[0].cross_attention
    with torch.no_grad():
        for parameter in (layer.qkv_weight, layer.qkv_bias):
            parameter.chunk(3)[0].zero_()
        layer.slopes_H.copy_(torch.tensor([0.5, 0.125]))
    steps, words = np.arange(len(TARGET) + 1)[:, None], np.arange(len(SOURCE) + 1)
    powers = np.stack([np.exp(np.cos(words) - slope * np.abs(steps - words)) for slope in (0.5, 0.125)])
    maps = cross_attention_maps(model, SOURCE, TARGET)
    np.testing.assert_allclose(maps[0].numpy(), powers / powers.sum(-1, keepdims=True), atol=1e-6)


def test_a_step_sees_only_what_was_produced_before_it() -> None:
    model = make_model()
    maps = cross_attention_maps(model, SOURCE, TARGET)
    other = cross_attention_maps(model, SOURCE, [*TARGET[:-1], TARGET[-1] + 1])
    torch.testing.assert_close(maps[:, :, :-1], other[:, :, :-1])
    assert not torch.allclose(maps[:, :, -1], other[:, :, -1], atol=1e-3)


def test_an_empty_sentence_has_its_end() -> None:
    model = make_model()
    assert cross_attention_maps(model, SOURCE, []).shape == (3, 2, 1, len(SOURCE) + 1)
    assert torch.equal(cross_attention_maps(model, [], TARGET), torch.ones(3, 2, len(TARGET) + 1, 1))


def test_half_precision_gives_fp32() -> None:
    model = make_model("pre")
    exact = cross_attention_maps(model, SOURCE, TARGET)
    maps = cross_attention_maps(copy.deepcopy(model).cast_parameters(torch.bfloat16), SOURCE, TARGET)
    assert maps.dtype == torch.float32
    np.testing.assert_allclose(maps.sum(-1).numpy(), 1.0, atol=1e-6)
    assert 1e-5 < (maps - exact).abs().mean() < 0.02


def test_a_model_in_training_is_read_without_dropout_and_stays_in_training() -> None:
    model = make_model(dropout=0.5, attention_dropout=0.5)
    expected = cross_attention_maps(model, SOURCE, TARGET)
    assert not model.training
    model.train()
    maps = cross_attention_maps(model, SOURCE, TARGET)
    assert torch.equal(maps, expected)
    assert all(module.training for module in model.modules())
    assert not maps.requires_grad


def test_nothing_stays_in_the_model() -> None:
    model = make_model()
    cross_attention_maps(model, SOURCE, TARGET)
    with pytest.raises(IndexError):
        cross_attention_maps(model, SOURCE, [4] * 12)
    assert not any(module._forward_pre_hooks for module in model.modules())
