"""Record the steps of a run: ledger, metrics and lines for the user."""

import dataclasses
from dataclasses import dataclass, field
from typing import Any

from dist_transformer.base.errors import UserError
from dist_transformer.config.settings import TrainConfig
from dist_transformer.data.loading.loader import TrainingData
from dist_transformer.data.loading.plan import Step
from dist_transformer.data.loading.sharing import Sharing
from dist_transformer.model.transformer import training_flops
from dist_transformer.reporting.reporter import Reporter, perplexity
from dist_transformer.run.ledger import Ledger
from dist_transformer.run.progress import Progress
from dist_transformer.runtime import distributed
from dist_transformer.training.engine.engine import Engine
from dist_transformer.training.engine.memory import peak_memory_bytes
from dist_transformer.training.interval import Interval


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

    def add(self, step: Step, **computed: Any) -> None:
        """Add a step as `Interval.add` does; report shards that the plan lacks from it on, and epochs that it ended."""
        progress = self.progress
        self.interval.add(progress.step, step, **computed)
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
        hashes, loss, nll = interval.reduce()
        of_steps = zip(interval.steps, hashes, interval.tokens, interval.left_out, strict=True)
        for number, pair_hash, tokens, left_out in of_steps:
            self.ledger.add(number, pair_hash=pair_hash, target_tokens=tokens, left_out=left_out)
        self.progress.ledger_chain = self.ledger.chain
        values = self._measures(interval, loss=loss, nll=nll)
        self._write(values)
        left = (self.config.max_steps - self.progress.step) * interval.seconds / len(interval.steps)
        self.reporter.train_line(self.progress.step, values, left)
        for text in interval.epochs.values():
            self.reporter.say(text)

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
            describe=lambda error: (
                str(error)
                if isinstance(error, UserError)
                else f"cannot write in {self.config.run_dir}: {error}: free space or fix the folder; "
                "the run resumes from its last checkpoint"
            ),
        )

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
            **interval.utilization(self.config.model, self.peak_flops),
            "epoch": progress.position.epoch,
            "skipped_steps": progress.skipped_steps,
            "left_out_shards": len({(shard["corpus"], shard["shard"]) for shard in progress.left_out}),
            "training_flops": self._flops_so_far(),
            "train_seconds": progress.train_seconds,
            "peak_memory_bytes": peak_memory_bytes(self.engine.device),
        }

    def _flops_so_far(self) -> int:
        source, target = self.progress.source_tokens, self.progress.target_tokens
        return training_flops(self.config.model, source_tokens=source, target_tokens=target)
