"""Comparison of a mean with the newest weight file alone, by the loss on the run's validation text.

A mean is worse than the newest file if the others are from steps long before, as early in a training.
"""

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from dist_transformer.averaging.choice import ChosenWeights
from dist_transformer.averaging.mean import mean_weights
from dist_transformer.averaging.settings import AverageSettings
from dist_transformer.averaging.sweep import choose, validation_folders
from dist_transformer.base.errors import UserError
from dist_transformer.evaluation.evaluate import reference_nll
from dist_transformer.model.transformer import Transformer
from dist_transformer.model_folder import for_decoding, refuse_other_content
from dist_transformer.run.layout import weight_files
from dist_transformer.runtime.launch import as_typed, own_command

COMPARED_PAIRS = 500
"""Most validation pairs per direction on which weights are compared."""

_Texts = list[tuple[tuple[str, ...], list[tuple[str, str]]]]
"""Tags and pairs of each direction."""


def choose_better(settings: AverageSettings) -> ChosenWeights:
    """Choose the named weights, or weights of a run, and compare all but the `best` with the newest file alone.

    Raises:
        UserError: there are too few, they cannot be averaged, or the model folder holds other files.
    """
    if settings.run_dir is None:
        return ChosenWeights(paths=settings.checkpoints, steps=(), how="")
    chosen = choose(settings, settings.last if settings.best is None else settings.best)
    if settings.best is not None:
        return chosen
    # Before minutes of work.
    refuse_other_content(settings.out)
    return compare_with_newest(chosen, settings.run_dir, settings.out, obey=settings.last is not None)


def compare_with_newest(chosen: ChosenWeights, run_dir: Path, out: Path, *, obey: bool) -> ChosenWeights:
    """Compare the validation nll of the mean of `chosen` with that of the run's newest file alone, on the CPU.

    Args:
        out: model folder that will be written, for the command in a warning.
        obey: return `chosen`, with a warning if the newest file alone is better. Otherwise return the better of both.

    Returns:
        the choice; `how` states the figures, or that there are none.

    Raises:
        UserError: the weights cannot be averaged.
    """
    files = weight_files(run_dir)
    newest = max(files)
    if chosen.steps == (newest,):
        return chosen
    try:
        texts = _validation_texts(run_dir)
    except (UserError, OSError):
        reason = "the run's data folder is not available, or has changed"
        return dataclasses.replace(chosen, how=f"{chosen.how} (not compared with the newest one alone: {reason})")
    alone, mean = (_nll(paths, texts) for paths in ([files[newest]], chosen.paths))
    figures = f"validation nll {mean:.4f}, that of the newest one alone {alone:.4f}"
    # A loss that is not a number decides nothing.
    if not mean > alone:
        return dataclasses.replace(chosen, how=f"{chosen.how}; {figures}")
    if not obey:
        how = f"the newest weight file, validation nll {alone:.4f}; that of the mean of {chosen.how} is {mean:.4f}"
        return ChosenWeights(paths=(files[newest],), steps=(newest,), how=how)
    better = as_typed(own_command("average", "--run-dir", run_dir, "--last", 1, "--out", out))
    warning = (
        f"the mean is worse than the newest weight file alone (validation nll {mean:.4f}, and {alone:.4f}), which "
        f"this command writes instead: {better}"
    )
    return dataclasses.replace(chosen, how=f"{chosen.how}; {figures}", warnings=(*chosen.warnings, warning))


def _validation_texts(run_dir: Path) -> _Texts:
    texts: dict[str, tuple[tuple[str, ...], list[tuple[str, str]]]] = {}
    for folder in validation_folders(run_dir):
        direction = folder.index.direction
        if direction.name not in texts:
            pairs = list(zip(*folder.valid_text(), strict=True))
            spread = np.linspace(0, len(pairs) - 1, min(COMPARED_PAIRS, len(pairs))).round().astype(int)
            texts[direction.name] = direction.tags, [pairs[i] for i in spread]
    return list(texts.values())


def _nll(paths: Sequence[Path], texts: _Texts) -> float:
    """Compute the validation nll of a mean, in which every direction has equal weight, as in training."""
    mean = mean_weights(paths)
    model = Transformer(mean.info.model)
    model.load_state_dict(mean.weights)
    mean.weights.clear()
    model = for_decoding(model, torch.device("cpu"), torch.float32)
    try:
        values = [reference_nll(model, mean.tokenizer, pairs, tags=tags) for tags, pairs in texts]
    except UserError:
        # The model computes numbers that are not finite.
        return math.inf
    return sum(values) / len(values)
