"""Settings of averaging, for flags, files and Python."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from dist_transformer.base.errors import UserError
from dist_transformer.config.measures import Measure
from dist_transformer.config.schema import FLAT, FlagRules, require_positive, setting, settings_of
from dist_transformer.inference.decoding import Loading, Search


@dataclass(frozen=True, kw_only=True, slots=True)
class AverageSettings:
    """Weights and their mean."""

    run_dir: Path | None = setting(None, position=True)
    """Run folder."""
    last: int | None = None
    """Average this number of newest weight files."""
    every: float | None = None
    """Minutes of training between the files of last, or of a sweep of the last ones."""
    best: int | None = setting(None, alone="0")
    """Average this number of weight files with the best validation scores; among equal scores the earlier file wins;
    with a sweep, without a number."""
    by: Measure | None = None
    """Score for best: nll, lowest loss per target token without label smoothing; bleu or chrf, highest score (0 to 100)
    of the translated validation sentences; ter, lowest; command, highest score of the run's validation_command;
    default: the run's best_by."""
    checkpoints: tuple[Path, ...] = ()
    """Weight files, checkpoints or model folders, instead of a run."""
    interpolate: tuple[Path, ...] = ()
    """A model and what was trained from it, with their shares: BASE:0.5 TUNED:0.5."""
    out: Path
    """Model folder to write."""
    sweep: tuple[int, ...] = setting((), commas=True)
    """Numbers of weight files to average and compare, separated by commas."""
    src: Path | None = None
    """Source text of a sweep, one sentence per line; default: the validation text of the run's data folder."""
    ref: Path | None = None
    """Raw reference text of a sweep, line by line."""
    loading: Annotated[Loading, FLAT]
    search: Annotated[Search, FLAT]

    def __post_init__(self) -> None:
        if sum(map(bool, (self.run_dir, self.checkpoints, self.interpolate))) != 1:
            raise UserError(
                "run_dir, checkpoints or interpolate: pass one of them; the other choices are among the files of a run"
            )
        if self.best is not None and bool(self.best) == bool(self.sweep):
            raise UserError("best needs a number without a sweep, and none with it: the sweep has the numbers")
        require_positive(self, "last", "every", "sweep")

    @property
    def tables(self) -> tuple[Path, ...]:
        """Files of a sweep's table, as JSON and as text, beside the model folder."""
        names = (".sweep.json", ".sweep.md") if self.sweep else ()
        return tuple(self.out.with_name(f"{self.out.name}{name}") for name in names)


_OF_A_SWEEP = " ".join(each.flag for kind in (Loading, Search) for each in settings_of(kind))
AVERAGE_RULES = FlagRules(
    needs={
        "--by": "--best",
        "--every": "--last --sweep",
        "--src": "--ref",
        "--ref": "--src",
        f"--src {_OF_A_SWEEP}": "--sweep",
    },
    conflicts={
        ("--run-dir --last --best --sweep --checkpoints", "--interpolate"): "which names the weights",
        ("--run-dir --last --best --sweep", "--checkpoints"): "which are the weights to average",
        ("--best --sweep", "--last"): "which is a choice of its own",
        ("--every", "--best"): "which chooses by validations",
    },
)
"""When the flags of averaging have an effect."""
