"""Contenders in training: their interface, and our model on packs under several engines.

All contenders start from the same weights and use the same learning rates. Their steps have about the same number of
real target tokens. Peers that batch by padding are in `peers`.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn

from benchmarks.measure import now
from benchmarks.training.text import TextSample
from dist_transformer.config.settings import TrainConfig
from dist_transformer.cost.memory import choose_compilation
from dist_transformer.data.loading.loader import TrainingData
from dist_transformer.data.loading.plan import Step
from dist_transformer.data.vocabulary.tokenizer import BOS_ID, EOS_ID
from dist_transformer.model.loss import LossSums
from dist_transformer.model.packed import PackedBatch, pack_side
from dist_transformer.model.transformer import Transformer
from dist_transformer.training.engine.deepspeed_engine import Engine
from dist_transformer.training.engine.schedule import RateScheduler, learning_rate

_CLOCKS = ("clock", "wall", "data", "optimizer")


@dataclass(slots=True)
class Timing:
    """Time and tokens of some steps."""

    steps: int = 0
    source_tokens: int = 0
    target_tokens: int = 0
    """Real target tokens; source tokens are counted in the same way."""
    computed_tokens: int = 0
    """Tokens of both sides, including padding."""
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(_CLOCKS, 0.0))
    """Seconds by the benchmarks' clock (`measure.now`) and the wall clock; data and optimizer are parts of `wall`."""

    @contextmanager
    def whole(self, device: torch.device) -> Iterator[None]:
        """Time a loop, until the GPU has finished its work."""
        # The benchmarks' clock waits for the GPU.
        clock, wall = now(device), time.perf_counter()
        yield
        self.seconds["clock"] += now(device) - clock
        self.seconds["wall"] += time.perf_counter() - wall

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Time a part on the host. A GPU may still compute, because waiting for it here would slow training down."""
        started = time.perf_counter()
        yield
        self.seconds[name] += time.perf_counter() - started

    def count(self, *, source: int, target: int, computed: int) -> None:
        self.source_tokens += source
        self.target_tokens += target
        self.computed_tokens += computed


class PlainDriver:
    """Plain torch as the control: the model in bf16 with fp32 masters, or in fp32.

    The gradient is that of the sum of losses ÷ the step's tokens, as under `Engine`.
    """

    def __init__(self, model: Transformer, config: TrainConfig) -> None:
        if config.arithmetic == "bf16":
            keep_masters(model)
            model.cast_parameters(torch.bfloat16)
        on_gpu = model.device.type == "cuda"
        if on_gpu and model.has_fixed_shapes and choose_compilation(config, stage=0)[0]:
            model.compile_layers()
        self.module, self.config = model, config
        self.optimizer = MasterAdamW(model, config)
        self.scheduler = make_scheduler(self.optimizer, config)
        self.done = 0

    def forward_backward(self, batch: PackedBatch, *, step_tokens: int) -> LossSums:
        sums: LossSums = self.module(batch, self.config.optimizer.label_smoothing)
        (sums.loss / step_tokens).backward()
        return sums

    def end_micro_batch(self) -> bool:
        self.done += 1
        if self.done % self.config.batch.accumulation_steps(1) == 0:
            self.optimizer.step()
            self.scheduler.step()
            self.optimizer.zero_grad()
        return True


class PackedContender:
    """Our model on packs, streamed from the data folder as in training."""

    def __init__(self, driver: Engine | PlainDriver, data: TrainingData, config: TrainConfig) -> None:
        self.driver, self.data = driver, data
        self.device = driver.module.embedding.device
        self.steps: Iterator[Step] = data.plan.steps(data.plan.start(), config.batch.packs_per_step)

    def train(self, steps: int) -> Timing:
        timing = Timing(steps=steps)
        self.driver.module.train()
        with timing.whole(self.device):
            for _ in range(steps):
                with timing.part("data"):
                    step = next(self.steps)
                    micro_batches = self.data.collator.micro_batches(step, rank=0, world_size=1)
                for micro in micro_batches:
                    with timing.part("data"):
                        batch = micro.batch.to(self.device)
                    self.driver.forward_backward(batch, step_tokens=step.target_tokens)
                    with timing.part("optimizer"):
                        self.driver.end_micro_batch()
                    timing.count(
                        source=int(batch.source.lengths.sum()),
                        target=int(batch.target.lengths.sum()),
                        computed=len(batch.source.tokens_T) + len(batch.labels_T),
                    )
        return timing

    @torch.no_grad()
    def nll(self, sample: TextSample) -> float:
        self.driver.module.eval()
        sums = self.driver.module(pack_all(sample).to(self.device), 0.0)
        return float(sums.nll) / int(sums.tokens)


def pack_all(sample: TextSample) -> PackedBatch:
    """Pack all pairs of the sample into one buffer without unused space at its end."""
    sources = np.concatenate([np.append(ids, EOS_ID) for ids in sample.sources])
    inputs = np.concatenate([np.insert(ids, 0, BOS_ID) for ids in sample.targets])
    labels = np.concatenate([np.append(ids, EOS_ID) for ids in sample.targets])
    sides = [
        pack_side(ids, lengths, size=len(ids), offset_count=len(lengths) + 1, max_length=int(lengths.max()))
        for ids, lengths in ((sources, sample.sizes[:, 0]), (inputs, sample.sizes[:, 1]))
    ]
    return PackedBatch(source=sides[0], target=sides[1], labels_T=torch.from_numpy(labels))


class MasterAdamW(torch.optim.AdamW):
    """Fused AdamW on the `master` of each weight that has one, which updates the weight."""

    def __init__(self, model: nn.Module, config: TrainConfig) -> None:
        self.weights = list(model.parameters())
        self.masters = [getattr(weight, "master", weight) for weight in self.weights]
        adam = config.optimizer
        betas = (adam.beta1, adam.beta2)
        super().__init__(self.masters, lr=0.0, betas=betas, eps=adam.epsilon, weight_decay=0.0, fused=True)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        cast = [(w, m) for w, m in zip(self.weights, self.masters, strict=True) if w is not m]
        for weight, master in cast:
            master.grad = None if weight.grad is None else weight.grad.float()
        result = super().step(closure)
        if cast:
            torch._foreach_copy_([weight for weight, _ in cast], [master for _, master in cast])
        return result

    def zero_grad(self, set_to_none: bool = True) -> None:
        super().zero_grad(set_to_none)
        for weight in self.weights:
            weight.grad = None


def keep_masters(model: nn.Module) -> None:
    """Keep fp32 copies of a model's weights as `master`, before they are cast.

    Copies of rounded values would not change the weights at first: small steps from a number of bf16 round back to it.
    """
    for weight in model.parameters():
        weight.master = nn.Parameter(weight.detach().clone())  # type: ignore[attr-defined]


def make_scheduler(optimizer: torch.optim.Optimizer, config: TrainConfig) -> RateScheduler:
    # No step of a contender is skipped.
    optimizer.found_inf = torch.zeros(())  # type: ignore[attr-defined]
    return RateScheduler(optimizer, lambda step: learning_rate(step, config))
