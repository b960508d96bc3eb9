"""The progress of a run. Every checkpoint contains all of it."""

import dataclasses
from dataclasses import dataclass, field
from typing import Any

from dist_transformer.config.measures import Measure, badness
from dist_transformer.data.loading.mixture import MixturePosition, position_from_json
from dist_transformer.data.loading.plan import Position
from dist_transformer.run.ledger import GENESIS


@dataclass(slots=True)
class Progress:
    """Counters of a run, stored as plain JSON in its checkpoints."""

    step: int = 0
    """Steps whose data is consumed."""
    skipped_steps: int = 0
    """Steps whose update was skipped because loss or gradient was not finite."""
    skipped_in_a_row: int = 0
    position: Position | MixturePosition = field(default_factory=Position)
    ledger_chain: str = GENESIS
    best: list[tuple[int, float]] = field(default_factory=list)
    """Step and value of the best validations, best first."""
    validations_since_best: int = 0
    longer_pairs: int = 0
    """Pairs in the loss of the last validation that are longer than a pack; versions up to 0.2.0 left them out."""
    validated_step: int = 0
    """The last validated step. A run that stopped when a validation was due does that validation after its resume."""
    train_seconds: float = 0.0
    """Seconds spent in steps, without validation and checkpoints."""
    left_out: list[dict[str, Any]] = field(default_factory=list)
    """Shards that could not be read, in the form of `left_out_records` of the ledger."""
    source_tokens: int = 0
    target_tokens: int = 0
    computed_source_tokens: int = 0
    """Source tokens that passed through the model; R-Drop counts each twice."""
    computed_target_tokens: int = 0

    def rank_validation(self, value: float | None, *, by: Measure, keep: int, longer_pairs: int = 0) -> bool:
        """Rank this step's validation among the best `keep` (at least one), and remember those.

        Args:
            value: None if the measure could not be computed: the validation is then neither ranked nor counted.

        Returns:
            whether it is the best so far; a value equal to the best is not better.
        """
        self.validated_step = self.step
        if value is None:
            return False
        if by == "nll" and longer_pairs != self.longer_pairs:
            # Losses of other sets of pairs are not comparable.
            self.best, self.validations_since_best = [], 0
        self.longer_pairs = longer_pairs
        self.best = sorted([*self.best, (self.step, value)], key=lambda entry: (badness(by, entry[1]), entry[0]))
        self.best = self.best[: max(1, keep)]
        improved = self.best[0][0] == self.step
        self.validations_since_best = 0 if improved else self.validations_since_best + 1
        return improved

    def to_json(self) -> dict[str, Any]:
        return {**dataclasses.asdict(self), "position": self.position.to_json()}

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> "Progress":
        # Checkpoints of earlier versions lack these: those versions validated before they saved, and had no R-Drop.
        computed = {f"computed_{name}": values[name] for name in ("source_tokens", "target_tokens")}
        values = {"validated_step": values["step"], "longer_pairs": 0, **computed, **values}
        known = {f.name: values[f.name] for f in dataclasses.fields(cls)}
        best = [(step, value) for step, value in values["best"]]
        return cls(**{**known, "best": best, "position": position_from_json(values["position"])})
