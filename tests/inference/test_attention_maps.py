"""Maps against the paper's equations in float64, and what reading them leaves behind."""

import copy

import numpy as np
import pytest
import torch

from dist_transformer.data.vocabulary.byte_bpe import learn_byte_bpe
from dist_transformer.data.vocabulary.tokenizer import Tokenizer
from dist_transformer.inference.attention_maps import attention_maps, readable_pieces
from dist_transformer.model.transformer import Transformer
from tests.inference.test_scoring import InFloat64
from tests.support.tiny import tiny_config

SOURCE, TARGET = [7, 4, 19, 4, 11], [9, 12, 5]


def cross_attention_maps(model: Transformer, source: list[int], target: list[int]) -> torch.Tensor:
    return attention_maps(model, source, target, "cross")["cross"]


def make_model(**settings: object) -> Transformer:
    torch.manual_seed(5)
    sizes = {"ffn_width": 24, "encoder_layers": 2, "decoder_layers": 3, "vocab_size": 20, "max_positions": 12}
    model = Transformer(tiny_config(**sizes, **settings)).eval()
    with torch.no_grad():
        # Weights far from uniform, and no bias or norm at the value that hides a mistake.
        for name, parameter in model.named_parameters():
            parameter.mul_(3.0) if name.endswith("qkv_weight") else parameter.add_(0.1 * torch.randn_like(parameter))
    return model


@pytest.mark.parametrize("head_width", [None, 5])
def test_maps_are_those_of_the_equations(head_width: int | None) -> None:
    model, (rows, columns) = make_model(head_width=head_width), (len(TARGET) + 1, len(SOURCE) + 1)
    equations = InFloat64(model)
    equations.distributions(SOURCE, TARGET)
    maps = attention_maps(model, SOURCE, TARGET, "encoder", "decoder", "cross")
    assert {kind: tuple(found.shape) for kind, found in maps.items()} == {
        "encoder": (2, 2, columns, columns),
        "decoder": (3, 2, rows, rows),
        "cross": (3, 2, rows, columns),
    }
    for kind, (side, name) in {
        "encoder": ("encoder", "self_attention"),
        "decoder": ("decoder", "self_attention"),
        "cross": ("decoder", "cross_attention"),
    }.items():
        expected = torch.stack([equations.maps[f"{side}.{layer}.{name}"] for layer in range(len(maps[kind]))])
        assert maps[kind].dtype == torch.float32
        torch.testing.assert_close(maps[kind].double(), expected, atol=1e-5, rtol=0)
        # Uniform or equal maps would agree with much that is wrong.
        assert expected.max() > 0.5
        assert (expected[0] - expected[1]).abs().max() > 0.1
    assert not maps["decoder"].triu(1).any()
    assert torch.equal(maps["cross"], cross_attention_maps(model, SOURCE, TARGET))


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
    model = make_model(norm="pre")
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


@pytest.fixture(scope="module")
def multilingual() -> Tokenizer:
    return learn_byte_bpe(["über die Straße gehen", "你好 世界", "the street"] * 5, vocab_size=330)


def pieces(tokenizer: Tokenizer, text: str) -> list[str]:
    return readable_pieces(tokenizer, tokenizer.encode(text))


def test_pieces_are_text(multilingual: Tokenizer) -> None:
    assert pieces(multilingual, "über die Straße") == ["über", "▁die", "▁Straße", "</s>"]
    assert pieces(multilingual, "你好 世界") == ["你好", "▁世界", "</s>"]
    assert pieces(multilingual, "") == ["</s>"]


def test_a_part_of_a_character_is_one_mark(multilingual: Tokenizer) -> None:
    # Three bytes that were never merged.
    assert pieces(multilingual, "猫") == ["�", "�", "�", "</s>"]
    # Characters that differ in their first byte of three: the last two, no character in themselves, become a piece.
    ends = learn_byte_bpe(["一 帀 渀 縀"] * 5, vocab_size=261)
    assert len(ends.encode("鸀")) == 2
    assert pieces(ends, "鸀") == ["�", "�", "</s>"]


def test_a_joiner_within_a_word_is_shown() -> None:
    for word in ("می\u200cخواهم", "ක්\u200dෂ"):
        whole = learn_byte_bpe([word] * 5, vocab_size=330)
        assert pieces(whole, word) == [word, "</s>"]


def test_no_piece_breaks_a_line() -> None:
    keeping = learn_byte_bpe([], vocab_size=260, normalization="nfc")
    shown = pieces(keeping, "a\tb\nc\u0007")
    assert all(piece.isprintable() and not any(c.isspace() for c in piece) for piece in shown)
    assert "".join(shown) == "a▁b▁c�</s>"


def test_a_special_token_that_is_spelled_out_is_text(multilingual: Tokenizer) -> None:
    assert "".join(pieces(multilingual, "</s>")) == "</s></s>"
    assert len(pieces(multilingual, "</s>")) > 2
