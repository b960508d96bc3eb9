"""Fixtures: registrations that end with the test, and an attention whose scores depend on positions."""

import pytest
import torch
from torch import nn

from dist_transformer.config.registry import ATTENTIONS, POSITIONS, SCHEDULES
from dist_transformer.config.settings import ModelConfig
from dist_transformer.model.attention import MultiHeadAttention, Role


@pytest.fixture
def registrations(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forget after the test what it registers."""
    for registry in (ATTENTIONS, POSITIONS, SCHEDULES):
        monkeypatch.setattr(registry, "_entries", dict(registry._entries))


class DistantAttention(MultiHeadAttention):
    """Subtract slope · |distance| for each head, and add the cosine of the key's own position."""

    def __init__(self, config: ModelConfig, role: Role) -> None:
        super().__init__(config, role)
        self.slopes_H = nn.Parameter(torch.empty(config.heads))

    def reset_parameters(self) -> None:
        super().reset_parameters()
        with torch.no_grad():
            self.slopes_H.copy_(0.5 / torch.arange(1, self.heads + 1))

    def adjust_scores(
        self, scores_BHQX: torch.Tensor, query_positions: torch.Tensor, key_positions: torch.Tensor
    ) -> torch.Tensor:
        assert scores_BHQX.dtype == torch.float32
        distances = (query_positions - key_positions).abs()
        return scores_BHQX - self.slopes_H.float().view(-1, 1, 1) * distances + torch.cos(key_positions.float())


@pytest.fixture
def distant(registrations: None) -> str:
    """The name of an attention from outside the package."""
    ATTENTIONS.register("distant")(DistantAttention)
    return "distant"
