"""Figures of the steps between two log lines."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from dist_transformer.config.settings import ModelConfig
from dist_transformer.data.loading.events import LeftOut
from dist_transformer.data.loading.packing import Budgets
from dist_transformer.data.loading.plan import Step
from dist_transformer.model.transformer import training_flops
from dist_transformer.runtime import distributed


@dataclass(slots=True)
class Interval:
    """Steps since the last log line. Losses and hashes stay on their device and rank until the interval ends."""

    steps: list[int] = field(default_factory=list)
    hashes: list[torch.Tensor] = field(default_factory=list)
    losses: list[torch.Tensor] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    applied: list[bool] = field(default_factory=list)
    left_out: list[tuple[LeftOut, ...]] = field(default_factory=list)
    epochs: dict[int, str] = field(default_factory=dict)
    """Report of the last epoch that ended, by corpus; a step may contain several epochs of a small corpus."""
    source_tokens: int = 0
    packs: int = 0
    seconds: float = 0.0
    stall_seconds: float = 0.0
    """Part of `seconds`: waiting for data."""
    waited_seconds: float = 0.0
    """Part of `seconds`: waiting of this rank's host for collectives."""

    def add(
        self,
        number: int,
        step: Step,
        *,
        hashes: Sequence[torch.Tensor],
        losses: Sequence[torch.Tensor],
        applied: bool,
        seconds: float,
        stall: float,
        waited: float,
    ) -> None:
        """Add a step.

        Args:
            hashes: one per micro-batch of this rank.
            losses: one per micro-batch, shape (2,): sums of the loss and of -log p.
        """
        self.steps.append(number)
        self.hashes.append(torch.stack(tuple(hashes)).sum())
        self.losses.append(torch.stack(tuple(losses)).sum(0))
        self.tokens.append(step.target_tokens)
        self.applied.append(applied)
        self.left_out.append(step.left_out)
        self.source_tokens += step.source_tokens
        self.packs += len(step.packs)
        self.seconds += seconds
        self.stall_seconds += stall
        self.waited_seconds += waited

    def reduce(self) -> tuple[list[int], float, float]:
        """Return the hash of each step over all ranks; loss and nll per target token of the applied steps.

        Collective: every rank must call it. It is the only place where the loop reads losses from the device.
        """
        hashes = distributed.all_reduce_sum(torch.stack(self.hashes)).tolist()
        sums = distributed.all_reduce_sum(torch.stack(self.losses).double()).tolist()
        kept = [i for i, applied in enumerate(self.applied) if applied]
        if not kept:
            return hashes, float("nan"), float("nan")
        tokens = sum(self.tokens[i] for i in kept)
        loss, nll = (sum(sums[i][which] for i in kept) / tokens for which in range(2))
        return hashes, loss, nll

    def speed(self, budgets: Budgets) -> dict[str, float]:
        """Return target tokens per second, the share of time spent waiting for data, and how full packs were."""
        target_tokens = sum(self.tokens)
        room = self.packs * (budgets.max_source_tokens + budgets.max_target_tokens)
        return {
            "target_tokens_per_second": target_tokens / self.seconds,
            "data_stall": self.stall_seconds / self.seconds,
            "fill": (target_tokens + self.source_tokens) / room,
        }

    def communication(self, device: torch.device) -> dict[str, float]:
        """Return the seconds per step that this rank waited for collectives; nothing on a GPU."""
        return {} if device.type == "cuda" else {"exposed_communication_seconds": self.waited_seconds / len(self.steps)}

    def utilization(self, model: ModelConfig, peak_flops: float | None) -> dict[str, float]:
        """Return the MFU (model FLOPs utilization): operations of the model on these tokens ÷ the devices' peak.

        Args:
            peak_flops: operations per second of all devices; None if it is not known, and then nothing is returned.
        """
        if peak_flops is None:
            return {}
        operations = training_flops(model, source_tokens=self.source_tokens, target_tokens=sum(self.tokens))
        return {"mfu": operations / (self.seconds * peak_flops)}
