"""Contenders in training: their interface, and our model on packs under several engines.

All contenders start from the same weights and use the same learning rates. Their steps have about the same number of
real target tokens. Peers that batch by padding are in `peers`.
"""

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch.nn.parallel import DistributedDataParallel

from benchmarks.measure import now
from benchmarks.training.text import TextSample
from dist_transformer.config.settings import OptimizerConfig, TrainConfig
from dist_transformer.cost.memory import choose_compilation
from dist_transformer.data.loading.loader import TrainingData
from dist_transformer.data.loading.plan import Step
from dist_transformer.data.vocabulary.tokenizer import BOS_ID, EOS_ID
from dist_transformer.model.loss import LossSums
from dist_transformer.model.packed import PackedBatch, pack_side
from dist_transformer.model.transformer import Transformer
from dist_transformer.runtime.world import World
from dist_transformer.training.engine.deepspeed_engine import Engine
from dist_transformer.training.engine.schedule import RateScheduler, learning_rate


@dataclass(slots=True)
class Timing:
    """Time and tokens of some steps."""

    device: torch.device
    steps: int = 0
    source_tokens: int = 0
    target_tokens: int = 0
    """Real target tokens of this rank; source tokens are counted in the same way."""
    computed_tokens: int = 0
    """Tokens of both sides, including padding."""
    seconds: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    """Seconds by the benchmarks' clock (`measure.now`) and the wall clock; data and optimizer are parts of `wall`."""

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Time a loop, until the GPU has finished its work."""
        wall, clock = self._wall(), now(self.device)
        yield
        self.seconds["clock"] += now(self.device) - clock
        self.seconds["wall"] += self._wall() - wall

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

    def _wall(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()


class PlainDriver:
    """Plain torch as the control: the model in bf16 with fp32 masters, or in fp32; native DDP on several ranks.

    The gradient is that of the sum of losses ÷ the step's tokens, as under `Engine`.
    """

    def __init__(self, model: Transformer, config: TrainConfig, world: World) -> None:
        self.config, self.world = config, world
        self.masters = [p.detach().clone().requires_grad_() for p in model.parameters()]
        if config.arithmetic == "bf16":
            model.cast_parameters(torch.bfloat16)
        self.parameters: list[torch.Tensor] = list(model.parameters())
        on_gpu = model.device.type == "cuda"
        if on_gpu and model.has_fixed_shapes and choose_compilation(config, stage=0)[0]:
            model.compile_layers()
        self.module = model
        self.wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True) if world.size > 1 else model
        self.optimizer = torch.optim.AdamW(self.masters, fused=True, **adam_settings(config.optimizer))
        self.scheduler = make_scheduler(self.optimizer, config)
        self.micro_batches = config.batch.accumulation_steps(world.size)
        self.done = 0

    def forward_backward(self, batch: PackedBatch, *, step_tokens: int) -> LossSums:
        is_last = self.done + 1 == self.micro_batches
        with self.wrapped.no_sync() if self.world.size > 1 and not is_last else nullcontext():  # type: ignore[operator]
            sums = self.wrapped(batch, self.config.optimizer.label_smoothing)
            # DDP averages over ranks.
            (sums.loss * (self.world.size / step_tokens)).backward()
        return sums

    @torch.no_grad()
    def end_micro_batch(self) -> bool:
        self.done += 1
        if self.done == self.micro_batches:
            self.done = 0
            for master, parameter in zip(self.masters, self.parameters, strict=True):
                assert parameter.grad is not None
                master.grad = parameter.grad.to(master.dtype)
            self.optimizer.step()
            self.scheduler.step()
            torch._foreach_copy_(self.parameters, self.masters)
            for parameter in self.parameters:
                parameter.grad = None
        return True

    def full_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        names = (name for name, _ in self.module.named_parameters())
        return zip(names, self.masters, strict=True)


class PackedContender:
    """Our model on packs, streamed from the data folder as in training."""

    def __init__(self, driver: Engine | PlainDriver, data: TrainingData, config: TrainConfig, world: World) -> None:
        self.driver, self.data, self.config, self.world = driver, data, config, world
        self.device = driver.module.embedding.device
        self.steps: Iterator[Step] = data.plan.steps(data.plan.start(), config.batch.packs_per_step)

    def train(self, steps: int) -> Timing:
        timing = Timing(self.device)
        self.driver.module.train()
        with timing.whole():
            for _ in range(steps):
                with timing.part("data"):
                    step = next(self.steps)
                    micro_batches = self.data.collator.micro_batches(
                        step, rank=self.world.rank, world_size=self.world.size
                    )
                    timing.steps += 1
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


def copy_of(model: Transformer) -> Transformer:
    twin = Transformer(model.config).to(model.embedding.device)
    twin.load_state_dict(model.state_dict())
    return twin


def adam_settings(config: OptimizerConfig) -> dict[str, Any]:
    return {"lr": 0.0, "betas": (config.beta1, config.beta2), "eps": config.epsilon, "weight_decay": 0.0}


def make_scheduler(optimizer: torch.optim.Optimizer, config: TrainConfig) -> RateScheduler:
    return RateScheduler(optimizer, lambda step: learning_rate(step, config))
