"""Save a run: choose what a checkpoint contains and what is kept, and report completed saves."""

import json
from dataclasses import dataclass
from typing import Any

from dist_transformer.config.directions import Direction, worth_stating
from dist_transformer.config.plain import to_plain
from dist_transformer.config.settings import CheckpointConfig, ModelConfig
from dist_transformer.data.folder.format import DataIndex
from dist_transformer.reporting.reporter import Reporter
from dist_transformer.run.checkpoint.writer import CheckpointWriter, Retention, Saved
from dist_transformer.run.progress import Progress
from dist_transformer.training.engine.engine import Engine
from dist_transformer.training.fault_tolerance.watchdog import Phase, Watchdog


@dataclass(frozen=True, kw_only=True, slots=True)
class Saver:
    """Start saves, which are written while training continues, and report those that are complete."""

    settings: CheckpointConfig
    model: ModelConfig
    index: DataIndex
    """Index of the data folder whose vocabulary the run uses; its languages are those of the first direction."""
    directions: tuple[Direction, ...]
    run: str
    """Identity of the run, for weight files."""
    engine: Engine
    progress: Progress
    writer: CheckpointWriter
    reporter: Reporter
    watchdog: Watchdog

    def begin(self) -> None:
        """Start a save of the current state. Collective: every rank must call it."""
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
            weights_metadata={key: json.dumps(value) for key, value in described.items()},
        )

    def poll(self) -> None:
        """Report the save in progress if it is complete. Collective: every rank must call it."""
        self._report(self.writer.poll())

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
            "corpus": self.index.corpus,
            "synthetic": self.index.synthetic,
            "run": self.run,
            "train_seconds": self.progress.train_seconds,
        }
