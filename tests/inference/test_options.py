"""Options of decoding commands."""

import pytest
import torch

from dist_transformer.inference.options import agreed_precision
from dist_transformer.runtime import device, distributed

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("wanted", "ranks", "chosen"),
    [
        (None, [True, True], "bf16"),
        # On nodes of several kinds, all ranks decode in what each has instructions for.
        (None, [True, False], "fp32"),
        ("bf16", [False, False], "bf16"),
        ("fp32", [True, True], "fp32"),
    ],
)
def test_the_precision_is_that_of_all_ranks(
    wanted: str | None, ranks: list[bool], chosen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []
    monkeypatch.setattr(device, "multiplies_bf16", lambda of: asked.append(of) or ranks[0])
    monkeypatch.setattr(distributed, "gather_objects", lambda mine: ranks)
    assert agreed_precision(wanted, CPU) == chosen
    assert asked == ([] if wanted else [CPU])
