import math

import pytest
import torch

from dist_transformer.model.positions import Positions, sinusoidal_positions


@pytest.mark.parametrize(("position", "i"), [(0, 0), (1, 0), (1, 1), (2, 3), (7, 5), (99, 31), (1023, 0), (1023, 31)])
def test_formula_of_the_paper(position: int, i: int) -> None:
    width = 64
    table = sinusoidal_positions(1024, width)
    angle = position / 10000 ** (2 * i / width)
    # fp32 rounding only: the angle of position 1,023 is exact to 1e-13 in double.
    assert table[position, 2 * i].item() == pytest.approx(math.sin(angle), abs=1e-7)
    assert table[position, 2 * i + 1].item() == pytest.approx(math.cos(angle), abs=1e-7)


def test_first_rows_by_hand() -> None:
    # Width 4: rates 1 and 1/100.
    expected = [
        [0.0, 1.0, 0.0, 1.0],
        [0.8414709848, 0.5403023059, 0.0099998333, 0.9999500004],
        [0.9092974268, -0.4161468365, 0.0199986667, 0.9998000067],
    ]
    torch.testing.assert_close(sinusoidal_positions(3, 4), torch.tensor(expected), atol=1e-7, rtol=0)


def test_a_longer_table_begins_with_the_shorter_one() -> None:
    assert torch.equal(sinusoidal_positions(50, 8)[:20], sinusoidal_positions(20, 8))


def test_sinusoids_are_constant_and_not_saved() -> None:
    positions = Positions(count=10, width=6, learned=False)
    assert list(positions.parameters()) == []
    assert positions.state_dict() == {}
    looked_up = positions(torch.tensor([3, 0, 3, 9]))
    assert torch.equal(looked_up, sinusoidal_positions(10, 6)[[3, 0, 3, 9]])


def test_learned_table_is_a_parameter_of_the_scale_of_an_embedding() -> None:
    torch.manual_seed(0)
    positions = Positions(count=300, width=64, learned=True)
    (table,) = positions.parameters()
    assert table.shape == (300, 64)
    assert list(positions.state_dict()) == ["table"]
    assert table.std().item() == pytest.approx(64**-0.5, rel=0.03)
    positions(torch.tensor([2, 5, 2])).sum().backward()
    assert table.grad is not None
    # Row 2 was used twice, row 5 once, the others never.
    assert [table.grad[row, 0].item() for row in (1, 2, 5)] == [0.0, 2.0, 1.0]
