"""The training loop. `assembly` builds its parts."""

import dataclasses
import gc
import hashlib
import itertools
import json
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from dist_transformer.config.directions import Direction, worth_stating
from dist_transformer.config.plain import to_plain
from dist_transformer.config.settings import CheckpointConfig, ModelConfig, TrainConfig
from dist_transformer.data.folder.format import DataIndex
from dist_transformer.data.folder.marks import LanguageMarks
from dist_transformer.data.loading.collate import MicroBatch
from dist_transformer.data.loading.loader import TrainingData
from dist_transformer.data.loading.plan import Step
from dist_transformer.data.loading.prefetch import Prefetcher
from dist_transformer.data.loading.sharing import Sharing
from dist_transformer.evaluation.samples import lines_of, write_sheet
from dist_transformer.model.loss import LossSums
from dist_transformer.reporting.reporter import Reporter
from dist_transformer.run.checkpoint.writer import CheckpointWriter, Retention, Saved
from dist_transformer.run.ledger import batch_hash
from dist_transformer.run.progress import Progress
from dist_transformer.runtime.world import World
from dist_transformer.training.engine.deepspeed_engine import Engine
from dist_transformer.training.fault_tolerance.preemption import Preemption
from dist_transformer.training.fault_tolerance.watchdog import Phase, Watchdog
from dist_transformer.training.logbook import Computed, Logbook
from dist_transformer.training.step_profile import StepProfile
from dist_transformer.training.validation import ValidationResult, Validator, summarize
from dist_transformer.training.validation_command import ValidationCommand


def micro_batch_seed(seed: int, epoch: int, step: int, first_pack: int) -> int:
    """Derive the seed of everything random in a micro-batch; it depends on neither rank nor time."""
    digest = hashlib.blake2b(f"{seed} {epoch} {step} {first_pack}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Saver:
    """Start saves, which are written while training continues, and report those that are complete."""

    settings: CheckpointConfig
    model: ModelConfig
    index: DataIndex
    """Index of the data folder whose vocabulary the run uses; its languages are those of the first direction."""
    directions: tuple[Direction, ...]
    marks: tuple[LanguageMarks, ...]
    """Marks of the languages of each direction."""
    longest_source: int
    """Tokens of the longest source of the training, tags included."""
    several_sentences: float
    """Share of the sources of the training that have more than one sentence."""
    guided: bool
    """Whether the training guides attention by alignments."""
    run: str
    """Identity of the run, for weight files."""
    engine: Engine
    progress: Progress
    writer: CheckpointWriter
    reporter: Reporter
    watchdog: Watchdog

    def begin(self, *, interrupted: bool) -> None:
        """Start a save of the current state. Collective: every rank must call it.

        Args:
            interrupted: a stop is the only reason for this save; averaging leaves out its weight file.
        """
        self.end()
        described = self._describe_model()
        self.writer.start(
            self.engine.parameter_states(),
            {
                **self.progress.to_json(),
                **described,
                "updates": self.engine.scheduler.updates,
                "ema_decay": self.engine.ema_decay,
            },
            retention=Retention(
                checkpoints=self.settings.keep_checkpoints,
                weights=self.settings.keep_weights,
                best_steps=frozenset(step for step, _ in self.progress.best[: self.settings.keep_best]),
            ),
            weights_metadata={
                key: json.dumps(value) for key, value in {**described, "interrupted": interrupted}.items()
            },
        )

    def poll(self, *, all_written: bool) -> None:
        """Report the save in progress if all ranks have written it. Collective: every rank must call it."""
        self._report(self.writer.poll(all_written=all_written))

    def end(self) -> None:
        """Wait for the save in progress, if there is one. Collective: every rank must call it."""
        self.watchdog.enter(Phase.CHECKPOINT, self.progress.step)
        self._report(self.writer.wait())

    def _report(self, saved: Saved | None) -> None:
        if saved is not None:
            self.watchdog.took(Phase.CHECKPOINT, saved.seconds)
            self.reporter.record("checkpoint", saved.step, {"seconds": saved.seconds, "stall": saved.stall})
            times = f"{saved.seconds:.1f} s, of which training waited {saved.stall:.1f} s"
            self.reporter.say(f"step {saved.step}: saved {saved.path} in {times}")

    def _describe_model(self) -> dict[str, Any]:
        """Describe the model for its weight files, so that averaging needs no other file."""
        stated = [to_plain(direction) for direction in worth_stating(self.directions)]
        return {
            "step": self.progress.step,
            "model": to_plain(self.model),
            "tokenizer_sha256": self.index.tokenizer_sha256,
            "source_language": self.index.source_language,
            "target_language": self.index.target_language,
            **({"directions": stated} if stated else {}),
            "marks": [to_plain(marks) for marks in self.marks],
            "corpus": self.index.corpus,
            "synthetic": self.index.synthetic,
            "longest_source": self.longest_source,
            "several_sentences": self.several_sentences,
            **({"guided": True} if self.guided else {}),
            "run": self.run,
            "train_seconds": self.progress.train_seconds,
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class Trainer:
    """A run of training, from a data folder to checkpoints and weights."""

    config: TrainConfig
    world: World
    data: TrainingData
    sharing: Sharing
    engine: Engine
    progress: Progress
    validators: tuple[Validator, ...]
    """One per direction; empty if the run is not validated."""
    command: ValidationCommand | None
    """Program that scores the translations of a validation, if there is one."""
    logbook: Logbook
    saver: Saver
    reporter: Reporter
    preemption: Preemption
    watchdog: Watchdog
    profile: StepProfile
    held: ExitStack
    """Holds the lock of the run folder until training ends."""

    def train(self) -> bool:
        """Train to `max_steps`, until patience ends, or until a stop is requested. The folder is locked until then.

        Returns:
            whether the run is finished; otherwise it is saved, and the same command resumes it.
        """
        with self.held:
            step = self.progress.step
            if self._is_finished():
                if self.world.is_main and not self.reporter.has_recorded("end", step):
                    # Killed between its last checkpoint and this record.
                    self.logbook.end_run(why=self._why_finished())
                self.reporter.say(f"already finished at step {step}: {self._why_finished()}")
            else:
                with existing_objects_spared():
                    stopped_by = self._train()
                if self._is_finished():
                    self.logbook.end_run(why=self._why_finished())
                else:
                    step = self.progress.step
                    self.reporter.say(f"stopped at step {step}, {stopped_by}: the same command resumes from here")
            self.reporter.close()
        return self._is_finished()

    def _train(self) -> str | None:
        """Train until the run is finished or a stop is requested; return the reason for a stop."""
        if self._owes_validation():
            stopped_by = self._validate()
            if stopped_by is not None or self._is_finished():
                self.sharing.close()
                if stopped_by is None:
                    # The checkpoint of this step is from before its validation.
                    self.saver.begin(interrupted=False)
                    self.saver.end()
                return stopped_by
        stopped_by = None
        steps = self._prefetched_steps()
        for step, micro_batches, stall in steps:
            self.watchdog.enter(Phase.STEP, self.progress.step + 1)
            self.preemption.begin(is_writing=self.saver.writer.is_writing)
            self.profile.begin(self.progress.step + 1)
            self._train_step(step, micro_batches, stall)
            self.profile.end(self.progress.step)
            stopped_by = self.preemption.outcome()
            self.saver.poll(all_written=self.preemption.all_written)
            is_last = self.progress.step == self.config.max_steps
            # A stop may be urgent, so a due validation is done after the resume.
            validates = (is_last or stopped_by is None) and self._owes_validation()
            is_regular = is_last or validates or self._is_due(self.config.checkpoints.save_every)
            saves = is_regular or stopped_by is not None
            if saves or self._is_due(self.config.log_every):
                self.logbook.end_interval()
            if validates:
                stopped_by = self._validate() or stopped_by
            if saves:
                self.saver.begin(interrupted=not is_regular)
            if stopped_by is not None or self._out_of_patience():
                break
        self.sharing.close()
        steps.close()
        self.saver.end()
        return stopped_by

    def _prefetched_steps(self) -> Prefetcher:
        return Prefetcher(
            self.sharing.draw_from(self._remaining_steps()),
            self.data.collator,
            rank=self.world.rank,
            world_size=self.world.size,
            pin=self.engine.device.type == "cuda",
        )

    def _remaining_steps(self) -> Iterator[Step]:
        steps = self.data.plan.steps(self.progress.position, self.config.batch.packs_per_step)
        yield from itertools.islice(steps, self.config.max_steps - self.progress.step)

    def _train_step(self, step: Step, micro_batches: list[MicroBatch], stall: float) -> None:
        """Run forward, backward and update, and count what was consumed."""
        started, waited_before, begin = time.monotonic(), self.engine.waited_seconds, self.engine.mark()
        progress = self.progress
        progress.step += 1
        hashes, losses = [], []
        for micro in micro_batches:
            sums, hashed = self._train_micro_batch(step, micro)
            losses.append(torch.stack((sums.loss, sums.nll)).detach())
            hashes.append(hashed)
            applied = self.engine.end_micro_batch()
        progress.position = step.position
        seconds = stall + time.monotonic() - started
        progress.train_seconds += seconds
        progress.source_tokens += step.source_tokens
        progress.target_tokens += step.target_tokens
        progress.computed_source_tokens += self.config.optimizer.passes * step.source_tokens
        progress.computed_target_tokens += self.config.optimizer.passes * step.target_tokens
        waited = self.engine.waited_seconds - waited_before
        computed = Computed(
            hashes=hashes,
            losses=losses,
            first_packs=[micro.first_pack for micro in micro_batches],
            applied=applied,
            seconds=seconds,
            stall=stall,
            waited=waited,
            marks=(begin, self.engine.last_forward),
        )
        self.logbook.add(step, computed)

    def _train_micro_batch(self, step: Step, micro: MicroBatch) -> tuple[LossSums, torch.Tensor]:
        self.watchdog.progress()
        batch = self.engine.on_device(micro.batch)
        torch.manual_seed(micro_batch_seed(self.config.seed, step.epoch, self.progress.step, micro.first_pack))
        return self.engine.forward_backward(batch, step_tokens=step.target_tokens), batch_hash(batch)

    def _validate(self) -> str | None:
        """Measure loss and scores, and rank the result among the best. Collective: every rank must call it.

        Returns:
            why all ranks stop now, before the validation is complete; it is then done after the resume.
        """
        progress, results, started = self.progress, list[ValidationResult](), time.monotonic()
        self.watchdog.enter(Phase.EVALUATION, progress.step)
        for validator in self.validators:
            result = validator.run(self.engine, step=progress.step)
            if self.command is not None:
                outcome = self.command.score(
                    sources=validator.sources, hypotheses=result.hypotheses, references=validator.references
                )
                if outcome.stopped_by is not None:
                    return outcome.stopped_by
                if outcome.problem is not None:
                    self.reporter.say(
                        f"step {progress.step}: the validation command {outcome.problem}; training continues without "
                        "its score"
                    )
                result = dataclasses.replace(result, command=outcome.score)
            results.append(result)
            self.watchdog.progress()
            if len(self.validators) > 1:
                self.reporter.say(f"step {progress.step}: {validator.direction.name} {result.text}")
        self._record_validation(results)
        self.logbook.pace.validated(time.monotonic() - started)
        return None

    def _record_validation(self, results: list[ValidationResult]) -> None:
        progress, by = self.progress, self.config.validation.best_by
        sheets = [result.sheet for result in results if result.sheet is not None]
        if sheets and self.world.is_main:
            self.reporter.fence()
            write_sheet(self.config.run_dir, *sheets)
        for sheet in sheets:
            self.reporter.samples(sheet)
        values, text = summarize(results)
        improved = progress.rank_validation(
            values.get(by),
            by=by,
            keep=self.config.checkpoints.keep_best,
            longer_pairs=sum(result.longer for result in results),
        )
        self.reporter.record("valid", progress.step, values)
        if improved:
            text += ", best"
        elif progress.best:
            text += ", best was {1:.3f} at step {0}".format(*progress.best[0])
        self.reporter.say(f"step {progress.step}: validation {text}")
        for sheet in sheets:
            self.reporter.say(lines_of(sheet))

    def _is_due(self, every: int) -> bool:
        return self.progress.step % every == 0

    def _owes_validation(self) -> bool:
        progress, every = self.progress, self.config.validation.validate_every
        if progress.step == 0:
            # The score of the weights that the run starts with.
            return every > 0 and self.config.checkpoints.init_from is not None
        due = every > 0 and (progress.step == self.config.max_steps or self._is_due(every))
        return due and progress.validated_step < progress.step

    def _out_of_patience(self) -> bool:
        return 0 < self.config.validation.patience <= self.progress.validations_since_best

    def _is_finished(self) -> bool:
        done = self.progress.step >= self.config.max_steps and not self._owes_validation()
        return done or self._out_of_patience()

    def _why_finished(self) -> str:
        patience = self.config.validation.patience
        return f"no better validation in {patience}" if self._out_of_patience() else "all steps done"


@contextmanager
def existing_objects_spared() -> Iterator[None]:
    """Exclude all objects that exist now from garbage collection, for a long loop.

    Torch and DeepSpeed make some hundred thousand objects that live until the end. Collections that search them would
    interrupt the loop, and other ranks would wait for this one.
    """
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
