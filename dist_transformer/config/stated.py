"""Checks of what a user states: flags of other toolkits, repetitions, settings without effect."""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from dist_transformer.base.errors import UserError
from dist_transformer.base.paths import refuse_secrets
from dist_transformer.config.settings import TrainConfig

_STEP = (
    "--batch.target-tokens-per-step, the target tokens of a step on all processes together, as --batch.packs-per-step "
    "packs of --batch.max-target-tokens"
)
_PEAK = "--optimizer.peak-lr, or --optimizer.lr-scale with the noam schedule"
# Flags of other toolkits, and their counterparts here.
_FOREIGN = {
    "--batch-size": _STEP,
    "--per-device-train-batch-size": _STEP,
    "--max-tokens": f"{_STEP} (for fairseq's, multiply --max-tokens, --update-freq and the processes)",
    "--update-freq": f"{_STEP} (for fairseq's, multiply --max-tokens, --update-freq and the processes)",
    "--accum-count": f"{_STEP}; accumulation follows from it and the processes",
    "--gradient-accumulation-steps": f"{_STEP}; accumulation follows from it and the processes",
    "--lr": _PEAK,
    "--learning-rate": _PEAK,
    "--lr-scheduler": "--optimizer.schedule",
    "--lr-scheduler-type": "--optimizer.schedule",
    "--warmup-updates": "--optimizer.warmup-steps",
    "--warmup-steps": "--optimizer.warmup-steps",
    "--adam-betas": "--optimizer.beta1 and --optimizer.beta2",
    "--weight-decay": "--optimizer.weight-decay",
    "--clip-norm": "--optimizer.max-grad-norm",
    "--max-grad-norm": "--optimizer.max-grad-norm",
    "--epochs": "--max-steps; `plan` prints how many epochs that is",
    "--max-epoch": "--max-steps; `plan` prints how many epochs that is",
    "--num-train-epochs": "--max-steps; `plan` prints how many epochs that is",
    "--max-update": "--max-steps",
    "--train-steps": "--max-steps",
    "--save-interval-updates": "--save-every",
    "--validate-interval-updates": "--validate-every",
    "--fp16": "--precision bf16, which needs no loss scaling",
    "--bf16": "--precision bf16",
    "--fp32": "--precision fp32",
    "--dropout": "--model.dropout",
    "--d-model": "--model.width",
    "--encoder-embed-dim": "--model.width",
    "--encoder-ffn-embed-dim": "--model.ffn-width",
    "--layers": "--model.encoder-layers and --model.decoder-layers",
    "--encoder-layers": "--model.encoder-layers",
    "--decoder-layers": "--model.decoder-layers",
    "--share-all-embeddings": "--model.tie-embeddings, the default",
    "--label-smoothing": "--optimizer.label-smoothing",
    "--save-dir": "--run-dir",
    "--output-dir": "--run-dir",
    "--restore-file": "--init-from with a model folder; a run resumes by itself",
    "--finetune-from-model": "--init-from with a model folder",
    "--arch": "--preset",
    "--deepspeed": "--deepspeed_config, with the name of a shipped one (zero2) or a file",
}


def _has_one_folder(config: TrainConfig) -> bool:
    return len(config.corpora.data) < 2


def _never_validates(config: TrainConfig) -> bool:
    return config.validation.validate_every == 0


# When a setting has no effect, and why. Schedules that a user registered may read both rates.
_WITHOUT_EFFECT: dict[str, tuple[Callable[[TrainConfig], bool], str]] = {
    "optimizer.peak_lr": (
        lambda config: config.optimizer.schedule == "noam",
        "the peak of the noam schedule is --optimizer.lr-scale · (width · warmup_steps)^-0.5: give that factor, or "
        "another --optimizer.schedule, such as inverse_sqrt",
    ),
    "optimizer.lr_scale": (
        lambda config: config.optimizer.schedule in ("inverse_sqrt", "cosine", "constant"),
        "it is a factor of the noam schedule: give --optimizer.peak-lr",
    ),
    "init_vocabulary": (
        lambda config: config.checkpoints.init_from is None,
        "it tells how to read --init-from: give that too",
    ),
    "data_weights": (_has_one_folder, "there is one data folder: leave it out"),
    "data_temperature": (
        lambda config: _has_one_folder(config) or bool(config.corpora.data_weights),
        "it mixes several data folders by their sizes, without --data-weights: leave it out",
    ),
    "validate_sentences": (_never_validates, "--validate-every is 0: raise that"),
    "best_by": (_never_validates, "--validate-every is 0: raise that"),
    "keep_best": (_never_validates, "--validate-every is 0: raise that"),
}


def refuse_foreign_and_repeated(words: Sequence[str]) -> None:
    """Refuse flags of other toolkits, all at once, and flags that are given twice, of which only one would count.

    Also refuse the secrets of URLs, because errors of the parser repeat words.

    Raises:
        UserError: there are such flags or words.
    """
    for word in words:
        refuse_secrets(word)
    flags = [word.partition("=")[0] for word in words if word.startswith("--")]
    names = [_name_of(flag) for flag in flags]
    foreign = {flag: _FOREIGN[name] for flag, name in zip(flags, names, strict=True) if name in _FOREIGN}
    if len(foreign) == 1:
        ((flag, ours),) = foreign.items()
        raise UserError(f"{flag} is not a flag here: use {ours}")
    if foreign:
        remedies: dict[str, list[str]] = {}
        for flag, ours in foreign.items():
            remedies.setdefault(ours, []).append(flag)
        uses = "; ".join(f"for {' and '.join(flags)} {ours}" for ours, flags in remedies.items())
        raise UserError(f"{', '.join(foreign)} are not flags here: use {uses}")
    twice = next((flag for flag, name in zip(flags, names, strict=True) if names.count(name) > 1), None)
    if twice is not None:
        raise UserError(f"{twice} is given twice: give it once, with all its values")


def stated_by_flags(words: Iterable[str]) -> dict[str, str]:
    """Map the settings that a command line states, such as `optimizer.peak_lr`, to their flags."""
    flags = [word.partition("=")[0] for word in words if word.startswith("--")]
    return {_name_of(flag)[2:].replace("-", "_"): flag for flag in flags}


def stated_by_values(values: Mapping[str, Any], where: str) -> dict[str, str]:
    """Map the settings in plain values, as in config.json, to their names after `where`."""
    inner = {
        f"{name}.{key}" for name, value in values.items() if isinstance(value, Mapping) for key in value
    } | values.keys()
    return {name: f"{where}: {name}" for name in inner}


def refuse_without_effect(stated: Mapping[str, str], config: TrainConfig) -> None:
    """Refuse settings that were stated although the others leave them without effect.

    Args:
        stated: names of settings, and how the user wrote them.

    Raises:
        UserError: there is one; the error names it and why it has no effect.
    """
    for name, (is_unused, why) in _WITHOUT_EFFECT.items():
        if name in stated and is_unused(config):
            raise UserError(f"{stated[name]} has no effect here, because {why}")
    packs, tokens = (stated.get(f"batch.{name}_per_step") for name in ("packs", "target_tokens"))
    if packs and tokens:
        raise UserError(f"{packs} and {tokens} both set the size of a step: give one of them")


def _name_of(flag: str) -> str:
    """Give the name that all spellings of a flag share: with hyphens, without the `no-` that switches it off."""
    return re.sub(r"(^--|\.)no-", r"\1", flag.replace("_", "-"))
