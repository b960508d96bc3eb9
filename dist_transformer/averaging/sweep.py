"""Sweep over the number of weight files to average: each mean translates a dev set and is scored.

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

import torch

from dist_transformer.averaging.choice import ChosenWeights, choose_weights
from dist_transformer.averaging.mean import mean_weights, write_mean
from dist_transformer.averaging.settings import AverageSettings
from dist_transformer.base.errors import UserError
from dist_transformer.base.files import make_folder, sha256_of, write_file
from dist_transformer.base.markdown import code
from dist_transformer.base.messages import as_kind
from dist_transformer.base.urls import is_url
from dist_transformer.config.plain import read_json
from dist_transformer.config.schema import values_of
from dist_transformer.data.folder.format import INDEX_FILE, VALID_FOLDER, VALID_SOURCE_FILE, VALID_TARGET_FILE
from dist_transformer.data.folder.reader import DataFolder
from dist_transformer.evaluation.evaluate import (
    Evaluation,
    ReferencedText,
    evaluate_model,
    read_test_set,
    reference_nll,
)
from dist_transformer.inference.decoding import Decoding
from dist_transformer.inference.loading import as_arithmetic, with_agreed_precision
from dist_transformer.model.transformer import Transformer
from dist_transformer.model_folder import ModelInfo, for_decoding
from dist_transformer.run.layout import SETTINGS_FILE
from dist_transformer.runtime.distributed import broadcast_object, on_all_ranks, rank


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
    # One rank chooses, because files may change meanwhile.
    found = on_all_ranks(lambda: [choose(settings, n) for n in sorted(set(settings.sweep))] if rank() == 0 else [])
    choices = as_kind(list[ChosenWeights], broadcast_object(found))
    source, reference = on_all_ranks(lambda: _dev_set(settings))
    settings = dataclasses.replace(settings, loading=with_agreed_precision(settings.loading, device))
    text = read_test_set(source, reference)
    candidates = []
    for chosen in choices:
        candidates.append(_score(chosen, text, settings, device))
        report(candidates[-1])
    return Sweep(settings=settings, source=source, reference=reference, candidates=tuple(candidates))


def choose(settings: AverageSettings, count: int | None) -> ChosenWeights:
    """Choose this number of weight files of the run; None: the regular ones."""
    assert settings.run_dir is not None
    last, best = (count, None) if settings.best is None else (None, count)
    return choose_weights(settings.run_dir, last=last, every=settings.every, best=best, by=settings.by)


def _dev_set(settings: AverageSettings) -> tuple[Path, Path]:
    assert settings.run_dir is not None
    if settings.src is None or settings.ref is None:
        return validation_text(settings.run_dir, settings.loading.direction)
    return settings.src, settings.ref


def _score(chosen: ChosenWeights, text: ReferencedText, settings: AverageSettings, device: torch.device) -> Candidate:
    loading, decoding = settings.loading, Decoding(split_over="no", **values_of(settings.search))
    mean = on_all_ranks(lambda: mean_weights(chosen.paths))
    info = on_all_ranks(lambda: mean.info.facing(loading.direction, loading.tags))
    model = Transformer(mean.info.model)
    model.load_state_dict(mean.weights)
    mean.weights.clear()
    model = for_decoding(model, device, *on_all_ranks(lambda: as_arithmetic(loading.precision, device)))
    evaluation = evaluate_model(model, mean.tokenizer, info, text, settings=decoding, device=device)
    pairs = list(zip(text.sources, text.references[0], strict=True))
    nll = reference_nll(model, mean.tokenizer, pairs, tags=info.direction.tags)
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
    places, hashes = settings.get("data"), settings.get("data_sha256")
    if not (isinstance(places, list) and isinstance(hashes, list) and len(places) == len(hashes)):
        raise UserError(f"{run_dir / SETTINGS_FILE} does not name the training data: pass --src and --ref")
    for place, sha256 in zip(map(str, places), hashes, strict=True):
        yield _validated_on(run_dir, place, sha256)


def _validated_on(run_dir: Path, place: str, sha256: str) -> DataFolder:
    index = Path(place) / INDEX_FILE
    if is_url(place) or not index.exists():
        raise UserError(f"{run_dir} was validated on text of {place}, which is not available: pass --src and --ref")
    try:
        found = sha256_of(index)
    except OSError as error:
        raise UserError(f"{index} cannot be read ({error.strerror or error}): pass --src and --ref") from None
    if found != sha256:
        raise UserError(f"the data folder {place} is not the one that {run_dir} was trained on: pass --src and --ref")
    return DataFolder.open(place)


def describe_steps(steps: Sequence[int]) -> str:
    """Describe steps as `600 to 1000, 100 apart`, or list all if they are not evenly spaced."""
    gaps = {later - earlier for earlier, later in itertools.pairwise(steps)}
    if len(steps) < 3 or len(gaps) > 1:
        return ", ".join(map(str, steps))
    return f"{steps[0]} to {steps[-1]}, {gaps.pop()} apart"
