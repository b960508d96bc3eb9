"""Comparison of means of weight files: one with the newest file alone, or a sweep over the number of files.

A mean is worse than the newest file if the others are from steps long before, as early in a training. They are compared
by the loss on the run's validation text. In a sweep each mean translates a dev set and is scored.

The models are only in memory, and every rank makes its own. An interrupted sweep leaves nothing on disk.
"""

import dataclasses
import itertools
import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dist_transformer.averaging.choice import ChosenWeights, choose_weights
from dist_transformer.averaging.mean import mean_weights, write_mean
from dist_transformer.averaging.settings import AverageSettings
from dist_transformer.base.errors import UserError
from dist_transformer.base.files import make_folder, sha256_of, write_file
from dist_transformer.base.markdown import code
from dist_transformer.base.messages import as_kind
from dist_transformer.config.plain import read_json
from dist_transformer.config.schema import values_of
from dist_transformer.data.folder.format import INDEX_FILE, VALID_FOLDER, VALID_SOURCE_FILE, VALID_TARGET_FILE
from dist_transformer.data.folder.reader import DataFolder
from dist_transformer.evaluation.evaluate import Evaluation, evaluate_model, read_test_set, reference_nll
from dist_transformer.inference.decoding import Decoding
from dist_transformer.inference.loading import as_arithmetic, with_agreed_precision
from dist_transformer.model_folder import ModelInfo, refuse_other_content
from dist_transformer.run.layout import SETTINGS_FILE, weight_files
from dist_transformer.runtime.distributed import broadcast_object, on_all_ranks, rank
from dist_transformer.runtime.launch import as_typed, own_command

COMPARED_PAIRS = 500
"""Most validation pairs per direction on which weights are compared."""
_Texts = dict[str, tuple[tuple[str, ...], list[tuple[str, str]]]]
"""Tags and pairs of each direction, by its name."""


def choose_better(settings: AverageSettings) -> ChosenWeights:
    """Choose the named weights, or weights of a run, and compare all but the `best` with the newest file alone.

    The loss of the mean on the run's validation text, on the CPU, is compared with that of the newest file. Of weights
    that nobody counted, the better of both is chosen; a given number is obeyed, with a warning if the newest is better.

    Returns:
        the choice; `how` states the figures, or that there are none.

    Raises:
        UserError: there are too few, they cannot be averaged, or the model folder holds other files.
    """
    if settings.run_dir is None:
        return ChosenWeights(paths=settings.checkpoints, steps=(), how="")
    run_dir, chosen = settings.run_dir, choose(settings, settings.last if settings.best is None else settings.best)
    newest, file = [*weight_files(run_dir).items()][-1]
    if settings.best is not None or chosen.steps == (newest,):
        return chosen
    # Before minutes of work.
    refuse_other_content(settings.out)
    try:
        texts = _validation_texts(run_dir)
    except (UserError, OSError):
        reason = "the run's data folder is not available, or has changed"
        return dataclasses.replace(chosen, how=f"{chosen.how} (not compared with the newest one alone: {reason})")
    alone, mean = _nll([file], texts), _nll(chosen.paths, texts)
    # A loss that is not a number decides nothing.
    if mean > alone and settings.last is None:
        how = f"the newest weight file, validation nll {alone:.4f}; that of the mean of {chosen.how} is {mean:.4f}"
        return ChosenWeights(paths=(file,), steps=(newest,), how=how)
    warnings = chosen.warnings
    if mean > alone:
        better = as_typed(own_command("average", "--run-dir", run_dir, "--last", 1, "--out", settings.out))
        warnings += (
            f"the mean is worse than the newest weight file alone (validation nll {mean:.4f}, and {alone:.4f}), which "
            f"this command writes instead: {better}",
        )
    how = f"{chosen.how}; validation nll {mean:.4f}, that of the newest one alone {alone:.4f}"
    return dataclasses.replace(chosen, how=how, warnings=warnings)


def _validation_texts(run_dir: Path) -> _Texts:
    texts: _Texts = {}
    for folder in validation_folders(run_dir):
        direction = folder.index.direction
        if direction.name not in texts:
            pairs = list(zip(*folder.valid_text(), strict=True))
            spread = np.linspace(0, len(pairs) - 1, min(COMPARED_PAIRS, len(pairs))).round().astype(int)
            texts[direction.name] = direction.tags, [pairs[i] for i in spread]
    return texts


def _nll(paths: Sequence[Path], texts: _Texts) -> float:
    """Compute the validation nll of a mean, in which every direction has equal weight, as in training."""
    mean = mean_weights(paths)
    model = mean.to_model(torch.device("cpu"), torch.float32)
    try:
        values = [reference_nll(model, mean.tokenizer, pairs, tags=tags) for tags, pairs in texts.values()]
    except UserError:
        # The model computes numbers that are not finite.
        return math.inf
    return sum(values) / len(values)


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    """The mean of some weight files, with its scores."""

    chosen: ChosenWeights
    evaluation: Evaluation
    nll: float
    """Mean -log p per reference token, without smoothing; NaN if no reference fits the model's positions."""

    @property
    def count(self) -> int:
        return len(self.chosen.paths)

    @property
    def bleu(self) -> float:
        return self.evaluation.scores.bleu.value


@dataclass(frozen=True, kw_only=True, slots=True)
class Sweep:
    """All candidates, in order of their number of weight files."""

    settings: AverageSettings
    """Settings with the precision that all ranks have."""
    source: Path
    reference: Path
    candidates: tuple[Candidate, ...]

    @property
    def best(self) -> Candidate:
        """Candidate with the highest BLEU; among equals, the one with the fewest files."""
        return max(self.candidates, key=lambda candidate: (candidate.bleu, -candidate.count))

    def note(self) -> str:
        """Return the note for the best candidate's model card."""
        others = ", ".join(str(candidate.count) for candidate in self.candidates)
        text = f"{code(self.source.name)} and {code(self.reference.name)}"
        return (
            f"Among the means of {others} weight files, the mean of {self.best.count} had the highest BLEU on {text}: "
            f"{self.best.bleu:.2f} ({code(self.best.evaluation.scores.bleu.signature)})"
        )

    def table(self) -> str:
        """Lay out the scores as a Markdown table."""
        rows = [
            f"| {c.count} | {describe_steps(c.chosen.steps)} | {c.bleu:.2f} | {c.nll:.4f} |" for c in self.candidates
        ]
        evaluation = self.best.evaluation
        synthetic = " Synthetic text: the scores say nothing about real text." if evaluation.info.synthetic else ""
        return "\n".join(
            [
                "| N | steps | BLEU | nll |",
                "|---|---|---|---|",
                *rows,
                "",
                f"BLEU of {len(evaluation.hypotheses):,} lines ({evaluation.scores.bleu.signature}); nll: -log p per "
                f"reference token. Best: N = {self.best.count}.{synthetic}",
            ]
        )

    def report(self) -> dict[str, Any]:
        """Convert to JSON values."""
        evaluation, search = self.best.evaluation, self.settings.search
        return {
            "best": self.best.count,
            "source": str(self.source),
            "reference": str(self.reference),
            "sentences": len(evaluation.hypotheses),
            "precision": self.settings.loading.precision,
            "beam_size": search.beam,
            "length_penalty": search.length_penalty,
            "max_extra_tokens": search.max_extra_tokens,
            "corpus": evaluation.info.corpus,
            "synthetic": evaluation.info.synthetic,
            "notes": list(evaluation.notes),
            "world_size": evaluation.world_size,
            "candidates": [
                {
                    "count": candidate.count,
                    "steps": list(candidate.chosen.steps),
                    "chosen": candidate.chosen.how,
                    # JSON has no NaN.
                    "nll": candidate.nll if math.isfinite(candidate.nll) else None,
                    **candidate.evaluation.scores.report(),
                    "split_sentences": candidate.evaluation.split_sentences,
                    "seconds": candidate.evaluation.seconds,
                }
                for candidate in self.candidates
            ],
        }


def sweep(
    settings: AverageSettings, device: torch.device, report: Callable[[Candidate], None] = lambda _: None
) -> Sweep:
    """Average, decode and score for each number of weight files; every rank gets the same result.

    Collective: every rank must call it.

    Args:
        report: called with each candidate after it is scored.

    Raises:
        UserError: there are too few weight files (raised before decoding), or another step failed; every rank raises
            it.
    """
    assert settings.run_dir is not None
    run_dir, source, reference = settings.run_dir, settings.src, settings.ref
    # One rank chooses, because files may change meanwhile.
    found = on_all_ranks(lambda: [choose(settings, n) for n in sorted(set(settings.sweep))] if rank() == 0 else [])
    choices = as_kind(list[ChosenWeights], broadcast_object(found))
    if source is None or reference is None:
        source, reference = on_all_ranks(lambda: validation_text(run_dir, settings.loading.direction))
    settings = dataclasses.replace(settings, loading=with_agreed_precision(settings.loading, device))
    lines = read_test_set(source, reference)
    candidates = []
    for chosen in choices:
        candidates.append(_score(chosen, lines, settings, device))
        report(candidates[-1])
    return Sweep(settings=settings, source=source, reference=reference, candidates=tuple(candidates))


def choose(settings: AverageSettings, count: int | None) -> ChosenWeights:
    """Choose this number of weight files of the run; None: the regular ones."""
    assert settings.run_dir is not None
    last, best = (count, None) if settings.best is None else (None, count)
    return choose_weights(settings.run_dir, last=last, every=settings.every, best=best, by=settings.by)


def _score(chosen: ChosenWeights, lines: list[list[str]], settings: AverageSettings, device: torch.device) -> Candidate:
    loading, decoding = settings.loading, Decoding(split_over="no", **values_of(settings.search))
    mean = on_all_ranks(lambda: mean_weights(chosen.paths))
    info = on_all_ranks(lambda: mean.info.facing(loading.direction, loading.tags))
    model = mean.to_model(device, *on_all_ranks(lambda: as_arithmetic(loading.precision, device)))
    evaluation = evaluate_model(model, mean.tokenizer, info, lines[0], lines[1:], settings=decoding, device=device)
    nll = reference_nll(model, mean.tokenizer, list(zip(*lines, strict=True)), tags=info.direction.tags)
    return Candidate(chosen=chosen, evaluation=evaluation, nll=nll)


def write_best(result: Sweep) -> ModelInfo:
    """Write the table to OUT.sweep.json and OUT.sweep.md next to the model folder OUT, and the best mean to it.

    Raises:
        UserError: they cannot be written.
    """
    out, tables = result.settings.out, result.settings.tables
    report = json.dumps(result.report(), indent=2, ensure_ascii=False)
    make_folder(out.parent)
    for file, text in zip(tables, (report, f"# Means of weight files for {out.name}\n\n{result.table()}"), strict=True):
        write_file(file, f"{text}\n")
    return write_mean(result.best.chosen, out, result.note())


def validation_text(run_dir: Path, direction: str | None = None) -> tuple[Path, Path]:
    """Find the raw validation text, source and target, of the data that a run was trained on.

    Args:
        direction: name of a direction; default: the run's first.

    Raises:
        UserError: the data folder is not available or has changed, or there is none for that direction.
    """
    for folder in validation_folders(run_dir):
        if direction in (None, folder.index.direction.name):
            # This checks that the text is unchanged since the data was prepared.
            folder.valid_text()
            valid = folder.path / VALID_FOLDER
            return valid / VALID_SOURCE_FILE, valid / VALID_TARGET_FILE
    raise UserError(f"{run_dir} was not trained on {direction}: check --direction, or pass --src and --ref")


def validation_folders(run_dir: Path) -> Iterator[DataFolder]:
    """Open the data folders that a run was trained on, in its order.

    Raises:
        UserError: one is not available or has changed.
    """
    settings = read_json(run_dir / SETTINGS_FILE)
    if not settings.get("data_sha256"):
        raise UserError(f"{run_dir / SETTINGS_FILE} does not name the training data: pass --src and --ref")
    for place, sha256 in zip(settings["data"], settings["data_sha256"], strict=True):
        index, remedy = Path(place) / INDEX_FILE, "pass --src and --ref"
        if not index.exists():
            raise UserError(f"{run_dir} was validated on text of {place}, which is not available: {remedy}")
        if sha256_of(index) != sha256:
            raise UserError(f"the data folder {place} is not the one that {run_dir} was trained on: {remedy}")
        yield DataFolder.open(place)


def describe_steps(steps: Sequence[int]) -> str:
    """Describe steps as `600 to 1000, 100 apart`, or list all if they are not evenly spaced."""
    gaps = {later - earlier for earlier, later in itertools.pairwise(steps)}
    if len(steps) < 3 or len(gaps) > 1:
        return ", ".join(map(str, steps))
    return f"{steps[0]} to {steps[-1]}, {gaps.pop()} apart"
