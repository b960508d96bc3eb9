import math
from dataclasses import replace

import pytest
import torch
from torch import nn

from dist_transformer.base.errors import UserError
from dist_transformer.config.registry import POSITIONS
from dist_transformer.config.settings import ModelConfig
from dist_transformer.model.positions import sinusoidal_positions
from dist_transformer.model.transformer import Transformer


@pytest.mark.parametrize(("position", "i"), [(0, 0), (1, 0), (1, 1), (2, 3), (7, 5), (99, 31), (1023, 0), (1023, 31)])
def test_formula_of_the_paper(position: int, i: int) -> None:
    width = 64
    table = sinusoidal_positions(1024, width)
    angle = position / 10000 ** (2 * i / width)
    # fp32 rounding only: the angle of position 1,023 is exact to 1e-13 in double.
    assert table[position, 2 * i].item() == pytest.approx(math.sin(angle), abs=1e-7)
    assert table[position, 2 * i + 1].item() == pytest.approx(math.cos(angle), abs=1e-7)


def test_sinusoids_are_constant_and_not_saved() -> None:
    positions = POSITIONS["sinusoidal"](ModelConfig(max_positions=10, width=6, heads=1))
    assert list(positions.parameters()) == []
    assert positions.state_dict() == {}
    looked_up = positions(torch.tensor([3, 0, 3, 9]))
    assert torch.equal(looked_up, sinusoidal_positions(10, 6)[[3, 0, 3, 9]])


def test_the_last_sinusoids_of_tensor2tensor_have_the_rate_of_one_in_10000() -> None:
    # Rates of width 6: 1, 1 / 100, 1 / 10000.
    positions = POSITIONS["sinusoidal_t2t"](ModelConfig(max_positions=4, width=6, heads=1))
    expected = [math.sin(3), math.cos(3), math.sin(0.03), math.cos(0.03), math.sin(0.0003), math.cos(0.0003)]
    torch.testing.assert_close(positions(torch.tensor([3]))[0], torch.tensor(expected), atol=1e-6, rtol=0)
    assert positions.state_dict() == {}
    later = POSITIONS["sinusoidal_t2t"](ModelConfig(max_positions=2, width=6, heads=1, first_position=2))
    torch.testing.assert_close(later(torch.tensor([1]))[0], torch.tensor(expected), atol=1e-6, rtol=0)


def test_learned_table_is_a_parameter_of_the_scale_of_an_embedding() -> None:
    torch.manual_seed(0)
    positions = POSITIONS["learned"](ModelConfig(max_positions=300, width=64))
    (table,) = positions.parameters()
    assert table.shape == (300, 64)
    assert list(positions.state_dict()) == ["table"]
    assert table.std().item() == pytest.approx(64**-0.5, rel=0.03)
    positions(torch.tensor([2, 5, 2])).sum().backward()
    assert table.grad is not None
    # Row 2 was used twice, row 5 once, the others never.
    assert [table.grad[row, 0].item() for row in (1, 2, 5)] == [0.0, 2.0, 1.0]


def ramp(config: ModelConfig) -> nn.Module:
    """Position p as the vector (p, p, …), without a table."""

    class Ramp(nn.Module):
        def forward(self, positions_T: torch.Tensor) -> torch.Tensor:
            return positions_T.unsqueeze(1).expand(-1, config.width).float()

    return Ramp()


SMALL = ModelConfig(width=8, heads=2, ffn_width=8, encoder_layers=1, decoder_layers=1, vocab_size=9, max_positions=5)


def test_a_module_from_outside_is_added_to_the_embeddings(registrations: None) -> None:
    POSITIONS.register("ramp")(ramp)
    model = Transformer(replace(SMALL, positions="ramp")).eval()
    assert model.position_vectors(3).tolist() == [[0.0] * 8, [1.0] * 8, [2.0] * 8]
    assert model.position_vectors(128).shape == (5, 8)
    tokens, places = torch.tensor([7, 7]), torch.tensor([4, 0])
    far, near = model._placed(nn.functional.embedding(tokens, model.embedding), places)
    torch.testing.assert_close(far - near, torch.full((8,), 4.0))


def test_a_buffer_that_no_weight_file_would_hold_is_refused(registrations: None) -> None:
    def forgetful(config: ModelConfig) -> nn.Module:
        module = ramp(config)
        module.register_buffer("scale", torch.ones(1))
        return module

    POSITIONS.register("forgetful")(forgetful)
    with pytest.raises(UserError, match=r"^buffer 'positions\.scale' is not in weight files: .* persistent=False$"):
        Transformer(replace(SMALL, positions="forgetful"))
