"""Record the steps of a run: ledger, metrics and lines for the user."""

import dataclasses
import math
import statistics
import time
from dataclasses import dataclass, field
from typing import Any

import torch

from dist_transformer.base.errors import UserError, failure
from dist_transformer.config.settings import ModelConfig, TrainConfig
from dist_transformer.cost.hardware import peak_flops
from dist_transformer.data.loading.loader import TrainingData
from dist_transformer.data.loading.packing import Budgets, LeftOut
from dist_transformer.data.loading.plan import Step
from dist_transformer.data.loading.sharing import Sharing
from dist_transformer.model.transformer import training_flops
from dist_transformer.reporting.reporter import Reporter, perplexity
from dist_transformer.run.environment import describe_environment
from dist_transformer.run.ledger import Ledger
from dist_transformer.run.progress import Progress
from dist_transformer.runtime import distributed
from dist_transformer.runtime.world import World
from dist_transformer.training.engine.deepspeed_engine import Engine
from dist_transformer.training.engine.measured_memory import memory_of, peak_memory_bytes

# These also compile, allocate memory and wait for the first data.
_FIRST_STEPS = 5


@dataclass(frozen=True, kw_only=True, slots=True)
class Computed:
    """Results of a step on one rank, and its times."""

    hashes: list[torch.Tensor]
    """One per micro-batch of this rank."""
    losses: list[torch.Tensor]
    """One per micro-batch, shape (2,): sums of the loss and of -log p."""
    first_packs: list[int]
    """First pack of each micro-batch."""
    applied: torch.Tensor
    """Whether the update was applied, bool, shape (); it is skipped if a loss or gradient is not finite."""
    seconds: float
    stall: float
    """Part of `seconds`: waiting for data."""
    waited: float
    """Part of `seconds`: waiting of this rank's host for collectives."""
    marks: tuple[torch.cuda.Event | None, torch.cuda.Event | None] = (None, None)
    """On a GPU: the beginning of the step, and the end of its last forward pass, after which ranks wait for others."""


@dataclass(slots=True)
class Interval:
    """Steps since the last log line. Losses and hashes stay on their device and rank until the interval ends."""

    steps: list[int] = field(default_factory=list)
    hashes: list[torch.Tensor] = field(default_factory=list)
    losses: list[torch.Tensor] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    applied: list[torch.Tensor] = field(default_factory=list)
    of_micro_batches: list[tuple[list[int], torch.Tensor]] = field(default_factory=list)
    """First packs of each step's micro-batches on this rank, and their losses, shape (micro-batches, 2)."""
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
    marks: list[tuple[torch.cuda.Event, torch.cuda.Event]] = field(default_factory=list)

    def add(self, number: int, step: Step, computed: Computed) -> None:
        self.steps.append(number)
        self.hashes.append(torch.stack(computed.hashes).sum())
        losses = torch.stack(computed.losses)
        self.losses.append(losses.sum(0))
        self.of_micro_batches.append((computed.first_packs, losses))
        self.tokens.append(step.target_tokens)
        self.applied.append(computed.applied)
        self.left_out.append(step.left_out)
        self.source_tokens += step.source_tokens
        self.packs += len(step.packs)
        self.seconds += computed.seconds
        self.stall_seconds += computed.stall
        self.waited_seconds += computed.waited
        begin, end = computed.marks
        if begin is not None and end is not None:
            self.marks.append((begin, end))

    def reduce(self) -> tuple[list[int], list[bool], float, float]:
        """Return the hash of each step over all ranks, and whether it was applied; loss and nll per target token of the
        applied steps.

        Collective: every rank must call it. It is the only place where the loop waits for the device: for one copy.
        """
        hashes = distributed.all_reduce_sum(torch.stack(self.hashes))
        sums = distributed.all_reduce_sum(torch.stack(self.losses).double())
        hashes, applied, sums = read(hashes, torch.stack(self.applied).long(), sums)
        flags = [bool(flag) for flag in applied.tolist()]
        kept = [i for i, is_applied in enumerate(flags) if is_applied]
        if not kept:
            return hashes.tolist(), flags, float("nan"), float("nan")
        tokens, losses = sum(self.tokens[i] for i in kept), sums.tolist()
        loss, nll = (sum(losses[i][which] for i in kept) / tokens for which in range(2))
        return hashes.tolist(), flags, loss, nll

    def speed(self, budgets: Budgets) -> dict[str, float]:
        """Return target tokens per second, the share of time spent waiting for data, and how full packs were."""
        target_tokens = sum(self.tokens)
        room = self.packs * (budgets.max_source_tokens + budgets.max_target_tokens)
        return {
            "target_tokens_per_second": target_tokens / self.seconds,
            "data_stall": self.stall_seconds / self.seconds,
            "fill": (target_tokens + self.source_tokens) / room,
        }

    def own_seconds(self) -> float:
        """Return the seconds per step of this rank's own work: without the waits in which it follows the other ranks.

        On a GPU it is the wait for data, and the device's time from the beginning of a step to the end of its last
        forward pass. All that follows is as slow as the slowest rank.
        """
        on_device = [begin.elapsed_time(end) / 1000 for begin, end in self.marks]
        own = self.stall_seconds + sum(on_device) if on_device else self.seconds - self.waited_seconds
        return own / len(self.steps)

    def communication(self, device: torch.device) -> dict[str, float]:
        """Return the seconds per step that this rank waited for collectives; nothing on a GPU."""
        return {} if device.type == "cuda" else {"exposed_communication_seconds": self.waited_seconds / len(self.steps)}

    def utilization(self, model: ModelConfig, peak_flops: float | None, *, passes: int = 1) -> dict[str, float]:
        """Return the MFU (model FLOPs utilization): operations of the model on these tokens ÷ the devices' peak.

        Args:
            passes: passes of each token through the model.
            peak_flops: operations per second of all devices; None if it is not known, and then nothing is returned.
        """
        if peak_flops is None:
            return {}
        tokens = {"source_tokens": self.source_tokens, "target_tokens": sum(self.tokens)}
        operations = training_flops(model, **tokens, passes=passes)
        return {"mfu": operations / (self.seconds * peak_flops)}


def read(*tensors: torch.Tensor) -> list[torch.Tensor]:
    """Copy tensors of numbers with 64 bits to the host by one copy."""
    copied = torch.cat([tensor.contiguous().view(torch.int64).flatten() for tensor in tensors]).cpu()
    parts = copied.split([tensor.numel() for tensor in tensors])
    return [part.view(tensor.dtype).view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]


def peak_flops_of(config: TrainConfig, world: World, device: torch.device) -> float | None:
    """Return the peak of all ranks, assuming equal GPUs; None for CPUs, whose peak is not known."""
    if device.type != "cuda":
        return None
    peak = peak_flops(describe_environment()["gpus"][device.index], config.arithmetic)
    return None if peak is None else peak * world.size


def compare_ranks(seconds: list[float]) -> dict[str, float]:
    """Name the rank whose own work takes longest; nothing for one rank.

    Args:
        seconds: `own_seconds` of each rank.
    """
    if len(seconds) == 1:
        return {}
    slowest = max(range(len(seconds)), key=seconds.__getitem__)
    return {
        "slowest_rank": slowest,
        "slowest_rank_seconds": seconds[slowest],
        "median_rank_seconds": statistics.median(seconds),
    }


@dataclass(slots=True)
class Pace:
    """Mean times of this start, for the time left: means of few steps jump when a machine has other work.

    Times are in seconds of one monotonic clock.
    """

    began: float
    steps: int = 0
    validations: int = 0
    validation_seconds: float = 0.0

    def step(self, now: float) -> None:
        self.steps += 1
        if self.steps == _FIRST_STEPS:
            self.began = now

    def validated(self, seconds: float) -> None:
        self.validations += 1
        self.validation_seconds += seconds
        # The rest of the time is that of steps and saves.
        self.began += seconds

    def left(self, now: float, *, steps: int, validations: int) -> float:
        """Return the seconds of so many steps with their saves, and of so many validations, if any has been timed."""
        timed = self.steps - _FIRST_STEPS if self.steps > _FIRST_STEPS else self.steps
        validation = self.validation_seconds / self.validations if self.validations else 0.0
        return steps * (now - self.began) / timed + validations * validation


@dataclass(kw_only=True, slots=True)
class Logbook:
    """Collect the interval between two log lines, and write it when it ends."""

    config: TrainConfig
    data: TrainingData
    sharing: Sharing
    engine: Engine
    progress: Progress
    ledger: Ledger
    reporter: Reporter
    peak_flops: float | None
    """Peak operations per second of all devices together; None if it is not known."""
    interval: Interval = field(default_factory=Interval)
    pace: Pace = field(default_factory=lambda: Pace(time.monotonic()))

    def add(self, step: Step, computed: Computed) -> None:
        """Add a step; report shards that the plan lacks from it on, and epochs that it ended."""
        progress = self.progress
        self.pace.step(time.monotonic())
        self.interval.add(progress.step, step, computed)
        for shard in step.left_out:
            part = " after a part of it was used" if shard.packs else ""
            problem = self.sharing.problems[shard.corpus, shard.shard]
            self.reporter.say(f"step {progress.step}: left out of epoch {shard.epoch + 1}{part}: {problem}")
            progress.left_out.append({"step": progress.step, **dataclasses.asdict(shard)})
        for epoch in step.ended:
            self.interval.epochs[epoch.corpus] = self.reporter.epoch(progress.step, epoch)
        self.reporter.advance()

    def end_interval(self) -> None:
        """Reduce and report the interval. Collective: every rank must call it."""
        interval, self.interval = self.interval, Interval()
        if not interval.steps:
            return
        hashes, applied, loss, nll = interval.reduce()
        self._count_skips(interval, applied)
        of_steps = zip(interval.steps, hashes, interval.tokens, interval.left_out, strict=True)
        for number, pair_hash, tokens, left_out in of_steps:
            self.ledger.add(number, pair_hash=pair_hash, target_tokens=tokens, left_out=left_out)
        self.progress.ledger_chain = self.ledger.chain
        own, peaks = zip(
            *distributed.gather_objects((interval.own_seconds(), peak_memory_bytes(self.engine.device))), strict=True
        )
        values = {
            **self._measures(interval, loss=loss, nll=nll),
            **compare_ranks(list(own)),
            **memory_of(self.engine.device, max(peaks)),
        }
        self._write(values)
        self.reporter.train_line(self.progress.step, values, self._seconds_left())
        for text in interval.epochs.values():
            self.reporter.say(text)

    def _count_skips(self, interval: Interval, applied: list[bool]) -> None:
        """Count skipped steps. A skip is that of all ranks, so they can find its origin together."""
        progress = self.progress
        for number, is_applied, (first_packs, losses) in zip(
            interval.steps, applied, interval.of_micro_batches, strict=True
        ):
            progress.skipped_in_a_row = 0 if is_applied else progress.skipped_in_a_row + 1
            if is_applied:
                continue
            progress.skipped_steps += 1
            finite = losses.isfinite().all(1).tolist()
            own = [first for first, is_finite in zip(first_packs, finite, strict=True) if not is_finite]
            where = describe_not_finite(distributed.gather_objects(own), packs=self.config.batch.packs_at_once)
            self.reporter.say(f"step {number}: loss or gradient is not finite ({where}); update skipped on all ranks")
            if progress.skipped_in_a_row >= self.config.max_skipped_steps:
                raise UserError(
                    f"{progress.skipped_in_a_row} steps in a row had a loss or gradient that is not finite (last at "
                    f"step {number}, {where}): lower the learning rate, or resume with --precision fp32 from the last "
                    "checkpoint"
                )

    def end_run(self, *, why: str) -> None:
        """Record the end of a run that is finished."""
        progress = self.progress
        values = {
            "train_seconds": progress.train_seconds,
            "target_tokens_per_second": progress.target_tokens / max(progress.train_seconds, 1e-9),
            "training_flops": self._flops_so_far(),
            "target_tokens": progress.target_tokens,
            "skipped_steps": progress.skipped_steps,
            "world_size": distributed.world_size(),
            "zero_stage": self.engine.stage,
        }
        self.reporter.record("end", progress.step, values)
        self.reporter.say(
            f"finished at step {progress.step}: {why}, "
            f"{values['target_tokens_per_second']:,.0f} target tokens/s, {values['training_flops']:.1e} FLOPs"
        )

    def _write(self, values: dict[str, Any]) -> None:
        """Write ledger and metrics on rank 0; if it cannot, all ranks end."""

        def write() -> None:
            if distributed.rank() == 0:
                self.ledger.flush()
                self.reporter.record("train", self.progress.step, values)

        distributed.on_all_ranks(
            write,
            errors=(OSError, UserError),
            describe=lambda error: failure(
                error,
                f"cannot write in {self.config.run_dir}",
                "free space or fix the folder; the run resumes from its last checkpoint",
            ),
        )

    def _seconds_left(self) -> float:
        """Estimate the time to `max_steps`; a validation that is due now is still to come."""
        step, last, every = self.progress.step, self.config.max_steps, self.config.validation.validate_every
        validations = math.ceil(last / every) - (step - 1) // every if every else 0
        return self.pace.left(time.monotonic(), steps=last - step, validations=validations)

    def _measures(self, interval: Interval, *, loss: float, nll: float) -> dict[str, Any]:
        progress = self.progress
        return {
            "loss": loss,
            "nll": nll,
            "ppl": perplexity(nll),
            "learning_rate": self.engine.learning_rate,
            "gradient_norm": self.engine.gradient_norm,
            **interval.speed(self.data.budgets),
            **interval.communication(self.engine.device),
            **interval.utilization(self.config.model, self.peak_flops, passes=self.config.optimizer.passes),
            "epoch": progress.position.epoch,
            "skipped_steps": progress.skipped_steps,
            "left_out_shards": len({(shard["corpus"], shard["shard"]) for shard in progress.left_out}),
            "training_flops": self._flops_so_far(),
            "train_seconds": progress.train_seconds,
        }

    def _flops_so_far(self) -> int:
        source, target = self.progress.computed_source_tokens, self.progress.computed_target_tokens
        return training_flops(self.config.model, source_tokens=source, target_tokens=target)


def describe_not_finite(firsts: list[list[int]], *, packs: int) -> str:
    """Name the first rank whose loss is not finite, and the packs of that micro-batch.

    Args:
        firsts: for each rank, the first packs of its micro-batches whose loss is not finite.
        packs: packs per micro-batch.
    """
    ranks = [rank for rank, own in enumerate(firsts) if own]
    if not ranks:
        return "the loss is finite on all ranks, so it arose in the backward pass"
    first = firsts[ranks[0]][0]
    of_packs = f"pack {first}" if packs == 1 else f"packs {first} to {first + packs - 1}"
    others = f", and loss of {len(ranks) - 1} other rank(s)" if len(ranks) > 1 else ""
    return f"loss of rank {ranks[0]} in {of_packs} of the step{others}"
