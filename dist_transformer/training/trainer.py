"""The training loop."""

import dataclasses
import hashlib
import itertools
import json
import time
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import numpy as np
import torch

from dist_transformer.config.plain import to_plain
from dist_transformer.config.settings import TrainConfig
from dist_transformer.data.loading.collate import MicroBatch
from dist_transformer.data.loading.loader import open_training_data
from dist_transformer.data.loading.plan import Step
from dist_transformer.data.loading.prefetch import Feeder
from dist_transformer.data.loading.shard_agreement import ShardGate
from dist_transformer.errors import UserError
from dist_transformer.evaluation.samples import write_sheet
from dist_transformer.model.loss import LossSums
from dist_transformer.model.transformer import Transformer, training_flops
from dist_transformer.reporting.reporter import Reporter, perplexity
from dist_transformer.run.checkpoint import CheckpointReader
from dist_transformer.run.checkpoint_writer import CheckpointWriter, Retention, Saved
from dist_transformer.run.environment import describe_environment, record_environment
from dist_transformer.run.folder import describe_run, open_run, run_identity
from dist_transformer.run.layout import LEDGER_FILE
from dist_transformer.run.ledger import Ledger, batch_hash
from dist_transformer.run.progress import Progress
from dist_transformer.run.warm_start import InitialWeights
from dist_transformer.runtime import distributed
from dist_transformer.runtime.distributed import World
from dist_transformer.training.engine.ds_config import load_ds_config
from dist_transformer.training.engine.engine import Engine
from dist_transformer.training.engine.memory import peak_memory_bytes, state_bytes
from dist_transformer.training.engine.schedule import learning_rate
from dist_transformer.training.fault_tolerance.preemption import StopVote
from dist_transformer.training.fault_tolerance.watchdog import Phase, Watchdog
from dist_transformer.training.interval import Interval
from dist_transformer.training.validation import Validator

# More positions than this are a blur.
_PICTURED_POSITIONS = 128


def micro_batch_seed(seed: int, epoch: int, step: int, first_pack: int) -> int:
    """Seed of everything random in a micro-batch; knows neither rank nor time."""
    digest = hashlib.blake2b(f"{seed} {epoch} {step} {first_pack}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


class Trainer:
    """One run: from a data folder to checkpoints and weights.

    Args:
        peak_flops: operations per second that all devices together can do at most; None where that is not known.
        quiet: report to the run folder only.
    """

    def __init__(
        self,
        config: TrainConfig,
        world: World,
        device: torch.device,
        watchdog: Watchdog | None = None,
        *,
        peak_flops: float | None = None,
        quiet: bool = False,
    ) -> None:
        self.world, self.peak_flops = world, peak_flops
        self.watchdog = watchdog or Watchdog(world, {})
        timeout = config.collective_timeout_minutes
        self.gate = ShardGate(skip=config.on_bad_shard == "skip", timeout_minutes=timeout)
        self.vote = StopVote(world, self.watchdog, timeout_minutes=timeout)
        self.data = open_training_data(config, self.gate.admit)
        self.folder, self.budgets = self.data.first, self.data.budgets
        config = dataclasses.replace(
            config, model=dataclasses.replace(config.model, vocab_size=self.folder.index.vocab_size)
        )  # fmt: skip
        self.config = config
        self.validator = None
        if config.validate_every > 0:
            self.validator = Validator(
                self.folder, self.budgets, config.batch, sentences=config.validate_sentences
            )  # fmt: skip
        self._check_lengths()
        ds_config = load_ds_config(config.deepspeed_config)
        described = describe_run(config, [folder.path for folder in self.data.folders], ds_config)
        self.run_identity = run_identity(described)
        self.held = ExitStack()
        origin, notes = open_run(config, described, self.folder, self.held)
        self.watchdog.publish_in(config.run_dir)
        model = self._make_model(origin).to(device)
        positions_PD = model.position_vectors(_PICTURED_POSITIONS).detach().float().cpu().numpy()
        self.engine = Engine(model, config, ds_config, world_size=world.size)
        self.progress = self._restore(origin)
        self.ledger = Ledger(config.run_dir / LEDGER_FILE, chain=self.progress.ledger_chain)
        self.writer = CheckpointWriter(
            config.run_dir, config=described, flushed=(self.ledger.path,), timeout_minutes=timeout
        )  # fmt: skip
        self.held.callback(self.writer.close)
        self.reporter = Reporter(
            config.run_dir, is_main=world.is_main, max_steps=config.max_steps, first_step=self.progress.step,
            quiet=quiet,
        )  # fmt: skip
        self._introduce(notes)
        if world.is_main:
            self._record_setting(positions_PD)

    def train(self) -> bool:
        """Train to `max_steps`, until patience ends, or until a stop is asked for; the folder is this run's until then.

        Returns:
            whether the run is finished; otherwise it is saved, and goes on when it is started again.
        """
        with self.held:
            step = self.progress.step
            if self._is_finished():
                if self.world.is_main and not self.reporter.has_recorded("end", step):
                    # Killed between its last checkpoint and this record.
                    self._finish()
                self.reporter.say(f"finished before, at step {step}: {self._why_finished()}")
            else:
                stopped_by = self._train()
                if self._is_finished():
                    self._finish()
                else:
                    step = self.progress.step
                    self.reporter.say(f"stopped at step {step}, {stopped_by}: the same command goes on from here")
            self.reporter.close()
        return self._is_finished()

    def _train(self) -> str | None:
        """Until the run is finished, or a stop is asked for; says by what."""
        if self._owes_validation():
            self._validate()
        interval, stopped_by = Interval(), None
        feeder = Feeder(
            self._remaining_steps(), self.data.stream,
            rank=self.world.rank, world_size=self.world.size, pin=self.engine.device.type == "cuda",
        )  # fmt: skip
        for step, micro_batches, stall in feeder:
            self.watchdog.enter(Phase.STEP, self.progress.step + 1)
            self.vote.begin()
            self._train_step(step, micro_batches, interval, stall)
            stopped_by = self.vote.outcome()
            self._report_save(self.writer.poll())
            is_last = self.progress.step == self.config.max_steps
            # Who stops a run may be in a hurry: it validates when it goes on.
            validates = (is_last or stopped_by is None) and self._owes_validation()
            saves = is_last or validates or stopped_by is not None or self._is_due(self.config.save_every)
            if saves or self._is_due(self.config.log_every):
                interval = self._log(interval)
            if validates:
                self._validate()
            if saves:
                self._save()
            if stopped_by is not None or self._out_of_patience():
                break
        self.gate.close()
        feeder.close()
        self._end_save()
        return stopped_by

    def _remaining_steps(self) -> Iterator[Step]:
        steps = self.data.plan.steps(self.progress.position, self.config.batch.packs_per_step)
        yield from itertools.islice(steps, self.config.max_steps - self.progress.step)

    def _is_due(self, every: int) -> bool:
        return self.progress.step % every == 0

    def _owes_validation(self) -> bool:
        progress, every = self.progress, self.config.validate_every
        due = every > 0 and (progress.step == self.config.max_steps or self._is_due(every))
        return due and progress.validated_step < progress.step

    def _is_finished(self) -> bool:
        return self.progress.step >= self.config.max_steps or self._out_of_patience()

    def _why_finished(self) -> str:
        return f"no better validation in {self.config.patience}" if self._out_of_patience() else "all steps done"

    def _out_of_patience(self) -> bool:
        return 0 < self.config.patience <= self.progress.validations_since_best

    def _train_step(self, step: Step, micro_batches: list[MicroBatch], interval: Interval, stall: float) -> None:
        """Forward, backward, update; counts what was consumed."""
        started = time.monotonic()
        progress = self.progress
        progress.step += 1
        hashes, losses, applied = [], [], True
        for micro in micro_batches:
            sums, hashed = self._train_micro_batch(step, micro)
            losses.append(torch.stack((sums.loss, sums.nll)).detach())
            hashes.append(hashed)
            applied = self.engine.end_micro_batch()
        progress.position = step.position
        self._count_skip(applied)
        seconds = stall + time.monotonic() - started
        progress.train_seconds += seconds
        progress.source_tokens += step.source_tokens
        progress.target_tokens += step.target_tokens
        interval.add(
            progress.step, step, hashes=hashes, losses=losses, applied=applied, seconds=seconds, stall=stall
        )  # fmt: skip
        self._report_events(step, interval)
        self.reporter.advance()

    def _report_events(self, step: Step, interval: Interval) -> None:
        """Shards that are missing from this step on, and epochs that it ended."""
        progress = self.progress
        for shard in step.left_out:
            part = " after a part of it was used" if shard.packs else ""
            problem = self.gate.problems[shard.corpus, shard.shard]
            self.reporter.say(f"step {progress.step}: left out of epoch {shard.epoch + 1}{part}: {problem}")
            progress.left_out.append({"step": progress.step, **dataclasses.asdict(shard)})
        for epoch in step.ended:
            text = self.reporter.epoch(progress.step, epoch, corpora=[f.index.corpus for f in self.data.folders])
            interval.epochs[epoch.corpus] = text

    def _train_micro_batch(self, step: Step, micro: MicroBatch) -> tuple[LossSums, torch.Tensor]:
        self.watchdog.progress()
        torch.manual_seed(micro_batch_seed(self.config.seed, step.epoch, self.progress.step, micro.first_pack))
        batch = micro.batch.to(self.engine.device)
        return self.engine.forward_backward(batch, step_tokens=step.target_tokens), batch_hash(batch)

    def _count_skip(self, applied: bool) -> None:
        progress = self.progress
        progress.skipped_steps += not applied
        progress.skipped_in_a_row = 0 if applied else progress.skipped_in_a_row + 1
        if not applied:
            self.reporter.say(
                f"step {progress.step}: loss or gradient is not finite on some rank; update skipped on all"
            )
        if progress.skipped_in_a_row >= self.config.max_skipped_steps:
            raise UserError(
                f"{progress.skipped_in_a_row} steps in a row had a loss or gradient that is not finite (last: step "
                f"{progress.step}): lower the learning rate, or resume with --precision fp32 from the last checkpoint"
            )

    def _log(self, interval: Interval) -> Interval:
        """Reduce and report the interval. A collective."""
        if not interval.steps:
            return interval
        hashes, loss, nll = interval.reduce()
        for number, pair_hash, tokens, left_out in zip(
            interval.steps, hashes, interval.tokens, interval.left_out, strict=True
        ):
            self.ledger.add(number, pair_hash=pair_hash, target_tokens=tokens, left_out=left_out)
        self.progress.ledger_chain = self.ledger.chain
        values = self._measures(interval, loss=loss, nll=nll)
        self._write_interval(values)
        left = (self.config.max_steps - self.progress.step) * interval.seconds / len(interval.steps)
        self.reporter.train_line(self.progress.step, values, left)
        for text in interval.epochs.values():
            self.reporter.say(text)
        return Interval()

    def _write_interval(self, values: dict[str, Any]) -> None:
        """Ledger and metrics, by rank 0; when it cannot, all end."""

        def write() -> None:
            if self.world.is_main:
                self.ledger.flush()
                self.reporter.record("train", self.progress.step, values)

        distributed.on_all_ranks(
            write,
            errors=(OSError,),
            describe=lambda error: (
                f"cannot write in {self.config.run_dir}: {error}: free space or fix the folder; "
                "the run goes on from its last checkpoint"
            ),
        )

    def _measures(self, interval: Interval, *, loss: float, nll: float) -> dict[str, Any]:
        return {
            "loss": loss,
            "nll": nll,
            "ppl": perplexity(nll),
            "learning_rate": self.engine.learning_rate,
            "gradient_norm": self.engine.gradient_norm,
            **interval.speed(self.budgets),
            **interval.utilization(self.config.model, self.peak_flops),
            "epoch": self.progress.position.epoch,
            "skipped_steps": self.progress.skipped_steps,
            "left_out_shards": len({(shard["corpus"], shard["shard"]) for shard in self.progress.left_out}),
            "training_flops": self._flops_so_far(),
            "train_seconds": self.progress.train_seconds,
            "peak_memory_bytes": peak_memory_bytes(self.engine.device),
        }

    def _flops_so_far(self) -> int:
        progress = self.progress
        return training_flops(
            self.config.model, source_tokens=progress.source_tokens, target_tokens=progress.target_tokens
        )  # fmt: skip

    def _validate(self) -> None:
        """A collective."""
        assert self.validator is not None
        self.watchdog.enter(Phase.EVALUATION, self.progress.step)
        config, progress = self.config, self.progress
        result = self.validator.run(self.engine, step=progress.step)
        values: dict[str, Any] = {"loss": result.loss, "nll": result.nll, "ppl": perplexity(result.nll)}
        text = f"validation nll {result.nll:.3f}, ppl {values['ppl']:.2f}"
        if result.sheet is not None:
            values["bleu"] = result.sheet.bleu
            text += f", BLEU {result.sheet.bleu:.1f} ({result.sheet.sentences} lines)"
            if self.world.is_main:
                write_sheet(config.run_dir, result.sheet)
            self.reporter.samples(result.sheet)
        improved = progress.rank_validation(values[config.best_by], by=config.best_by, keep=config.keep_best)
        self.reporter.record("valid", progress.step, values)
        best = "best" if improved else f"best was {progress.best[0][1]:.3f}"
        self.reporter.say(f"step {progress.step}: {text}, {best}")

    def _save(self) -> None:
        """Begin a save; what it writes is as it is now, and written while training goes on. A collective."""
        self._end_save()
        self.writer.start(
            self.engine.parameter_states(),
            {
                **self.progress.to_json(),
                **self._describe_model(),
                "updates": self.engine.scheduler.updates,
                "ema_decay": self.config.ema_decay,
            },
            retention=self._retention(),
            weights_metadata={key: json.dumps(value) for key, value in self._describe_model().items()},
        )

    def _end_save(self) -> None:
        """Wait for the save in flight, if there is one. A collective."""
        self.watchdog.enter(Phase.CHECKPOINT, self.progress.step)
        self._report_save(self.writer.wait())

    def _report_save(self, saved: Saved | None) -> None:
        if saved is not None:
            self.watchdog.took(Phase.CHECKPOINT, saved.seconds)
            self.reporter.record("checkpoint", saved.step, {"seconds": saved.seconds, "stall": saved.stall})
            times = f"{saved.seconds:.1f} s, of which training waited {saved.stall:.1f} s"
            self.reporter.say(f"step {saved.step}: saved {saved.path} in {times}")

    def _retention(self) -> Retention:
        config = self.config
        return Retention(
            checkpoints=config.keep_checkpoints,
            weights=config.keep_weights,
            best_steps=frozenset(step for step, _ in self.progress.best[: config.keep_best]),
        )

    def _describe_model(self) -> dict[str, Any]:
        """What a weight file says of itself, so that averaging needs no other file."""
        index = self.folder.index
        return {
            "step": self.progress.step,
            "model": to_plain(self.config.model),
            "tokenizer_sha256": index.tokenizer_sha256,
            "source_language": index.source_language,
            "target_language": index.target_language,
            "corpus": index.corpus,
            "synthetic": index.synthetic,
            "run": self.run_identity,
            "train_seconds": self.progress.train_seconds,
        }

    def _finish(self) -> None:
        progress = self.progress
        values = {
            "train_seconds": progress.train_seconds,
            "target_tokens_per_second": progress.target_tokens / max(progress.train_seconds, 1e-9),
            "training_flops": self._flops_so_far(),
            "target_tokens": progress.target_tokens,
            "skipped_steps": progress.skipped_steps,
            "world_size": self.world.size,
            "zero_stage": self.engine.stage,
        }
        self.reporter.record("end", progress.step, values)
        self.reporter.say(
            f"finished at step {progress.step}: {self._why_finished()}, "
            f"{values['target_tokens_per_second']:,.0f} target tokens/s, {values['training_flops']:.1e} FLOPs"
        )

    def _check_lengths(self) -> None:
        streams = [self.data.stream, *([self.validator.stream] if self.validator else [])]
        longest = max(int(stream.caps.max()) for stream in streams)
        if longest > self.config.model.max_positions:
            raise UserError(
                f"model.max_positions is {self.config.model.max_positions}, but a sentence has {longest} tokens: "
                "raise --model.max-positions, or prepare the data with a lower --max-tokens"
            )

    def _make_model(self, origin: CheckpointReader | InitialWeights | None) -> Transformer:
        """The same weights on every rank: read, or drawn from the seed."""
        torch.manual_seed(self.config.seed)
        model = Transformer(self.config.model)
        if origin is not None:
            model.load_state_dict({name: origin.weight(name) for name in origin.parameter_names()})
        return model

    def _restore(self, origin: CheckpointReader | InitialWeights | None) -> Progress:
        if isinstance(origin, CheckpointReader):
            self.engine.restore(origin.parameter, updates=origin.state["updates"])
            return Progress.from_json(origin.state)
        return Progress(position=self.data.plan.start())

    def _record_setting(self, positions_PD: np.ndarray) -> None:
        """The machine, the schedule and the positions, for those who look at the run later."""
        config, world = self.config, self.world
        environment = describe_environment(world_size=world.size, local_size=world.local_size)
        described = {**environment, "state_bytes": state_bytes(self.engine)}
        record_environment(config.run_dir, described, step=self.progress.step)
        peak = min(config.optimizer.warmup_steps, config.max_steps)
        steps = sorted({peak, *(round(step) for step in np.linspace(1, config.max_steps, 500))})
        rates = [learning_rate(step, config) for step in steps]
        self.reporter.pictures(steps, rates, positions_PD)

    def _introduce(self, notes: list[str]) -> None:
        config, index = self.config, self.folder.index
        parameters = sum(getattr(p, "ds_numel", p.numel()) for p in self.engine.module.parameters())
        corpora = " + ".join(folder.index.corpus for folder in self.data.folders)
        pairs = sum(folder.index.train.pairs for folder in self.data.folders)
        batch = config.batch.packs_per_step * self.budgets.max_target_tokens
        languages = f"{index.source_language}-{index.target_language}{', synthetic' if index.synthetic else ''}"
        skipped = f", {self.data.plan.skipped:,} of them too long for a pack" if self.data.plan.skipped else ""
        self.reporter.say(
            f"{corpora} ({languages}): {pairs:,} pairs{skipped}\n"
            f"{parameters:,} parameters; {config.batch.packs_per_step} packs a step, at most {batch:,} target tokens\n"
            f"{self.world.size} rank(s) on {self.engine.device.type}, ZeRO-{self.engine.stage}, {config.precision}, "
            f"accumulation {config.batch.accumulation_steps(self.world.size)}"
        )
        for note in notes:
            self.reporter.say(note)
