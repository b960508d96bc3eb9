"""Code that only CUDA runs, as far as it runs without: shapes, devices, and that the host waits for nothing."""

from pathlib import Path
from typing import Any

import pytest
import torch

from dist_transformer.config.settings import ModelConfig
from dist_transformer.model import attention
from dist_transformer.model.transformer import Transformer
from tests.fake_cuda import fake_cuda
from tests.model.small_batches import make_batch, make_pairs


@pytest.mark.system
@pytest.mark.parametrize(
    ("dtype", "change", "kernel"),
    [
        (torch.bfloat16, {}, "packed"),
        (torch.bfloat16, {"head_width": 8}, "varlen"),
        (torch.bfloat16, {"head_width": 12}, "groups"),
        (torch.bfloat16, {"head_width": 264}, "groups"),
        (torch.bfloat16, {"attention_dropout": 0.1}, "groups"),
        (torch.bfloat16, {"attention": "distant"}, "groups"),
        (torch.float32, {}, "groups"),
    ],
)
@pytest.mark.usefixtures("distant")
def test_the_training_loss(
    dtype: torch.dtype, change: dict[str, Any], kernel: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    used: list[str] = []
    # Fake tensors need no Triton, but our kernels are chosen where it compiles them.
    monkeypatch.setattr(attention.packed_attention, "_compiles", lambda _: True)
    forward = attention.MultiHeadAttention.forward

    def noted(self, x_TD, memory_SD, layout):  # type: ignore[no-untyped-def]
        used.append(layout.kernel)
        return forward(self, x_TD, memory_SD, layout)

    monkeypatch.setattr(attention.MultiHeadAttention, "forward", noted)
    config = ModelConfig(
        width=128, heads=2, ffn_width=32, encoder_layers=2, decoder_layers=2, vocab_size=8000, **change
    )
    with fake_cuda(tmp_path, monkeypatch) as device:
        with device:
            model = Transformer(config).cast_parameters(dtype)
        sums = model(make_batch(make_pairs([(4, 4), (6, 6)]), cap=10, size=24).to(device), 0.1)
    assert sums.loss.device == device
    assert sums.loss.requires_grad
    assert sums.loss.dtype == torch.float32
    # Two of the encoder's layers, two of the decoder's with two each.
    assert used == [kernel] * 6
