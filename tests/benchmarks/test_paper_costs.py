"""The paper's cost of training, from its own figures, and ours, from the sizes of the matrices."""

import dataclasses

import pytest

from benchmarks.paper_costs import cost_table, device_flops, work_flops
from dist_transformer.config.settings import ModelConfig
from dist_transformer.model.transformer import training_flops
from dist_transformer.pictures.cost import balanced_length, layer_flops


@pytest.mark.parametrize(("model", "printed"), [("base", 3.3e18), ("big", 2.3e19)])
def test_the_papers_figure_is_device_time(model: str, printed: float) -> None:
    """12 hours, or 3.5 days, of 8 P100 at 9.5 TFLOP/s each; the paper prints two digits."""
    seconds = {"base": 12 * 60 * 60, "big": 7 * 12 * 60 * 60}[model]
    assert device_flops(model) == pytest.approx(seconds * 8 * 9.5e12)
    assert float(f"{device_flops(model):.1e}") == printed


@pytest.mark.parametrize(
    ("model", "width", "ffn", "steps"), [("base", 512, 2048, 100_000), ("big", 1024, 4096, 300_000)]
)
def test_the_work_by_hand(model: str, width: int, ffn: int, steps: int) -> None:
    """Each source and target token of 25,000 + 25,000 a step passes its matrices, 6 operations an element."""
    encoder = 6 * (4 * width**2 + 2 * width * ffn)
    decoder = 6 * (8 * width**2 + 2 * width * ffn)
    output = 37_000 * width
    assert work_flops(model) == 6 * (encoder + decoder + output) * 25_000 * steps


def test_the_work_is_a_third_of_the_device_time() -> None:
    """So the P100s kept 2.7 (base) and 4.0 (big) of the 9.5 TFLOP/s that the paper assumes."""
    assert cost_table().splitlines()[2:] == [
        "| base, 100,000 steps | 9.4e+17 | 12 h × 8 × 9.5 TFLOP/s = 3.3e+18 | 0.29 |",
        "| big, 300,000 steps | 9.6e+18 | 84 h × 8 × 9.5 TFLOP/s = 2.3e+19 | 0.42 |",
    ]


NARROW = ModelConfig(width=6, heads=2, head_width=5, ffn_width=7, encoder_layers=2, vocab_size=9)


def test_the_operations_of_a_layer_by_hand() -> None:
    """3 tokens, 2 heads of 5: 4 matrices of 6 x 10, 2 of 6 x 7, and 2 products of 3 x 5 x 3 in each head."""
    flops = layer_flops(NARROW, sentence_tokens=3)
    assert flops.projections == 2 * 3 * 4 * 6 * 10
    assert flops.feed_forward == 2 * 3 * 2 * 6 * 7
    assert flops.attention == 2 * 2 * 2 * 3 * 5 * 3


def test_training_takes_three_times_the_operations_of_the_weights() -> None:
    """6 per weight and token instead of 2; attention is not counted there."""
    flops = layer_flops(NARROW, sentence_tokens=3)
    one, two = (
        training_flops(dataclasses.replace(NARROW, encoder_layers=layers), source_tokens=3, target_tokens=4)
        for layers in (1, 2)
    )
    assert 3 * (flops.projections + flops.feed_forward) == two - one


def test_attention_takes_as_much_as_the_rest_at_the_balanced_length() -> None:
    """6 · (2 · 10 + 16) / 10 = 21.6; base: 3,072 tokens."""
    assert balanced_length(dataclasses.replace(NARROW, ffn_width=16)) == pytest.approx(21.6)
    flops = layer_flops(ModelConfig(), sentence_tokens=3072)
    assert balanced_length(ModelConfig()) == 3072
    assert flops.attention == flops.projections + flops.feed_forward
