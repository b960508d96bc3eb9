"""The command line of training: preset, variant, settings from a file, and one flag per setting."""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any

from dist_transformer.base.errors import UserError
from dist_transformer.base.urls import is_url
from dist_transformer.config.command_line import Given, Page, read_words
from dist_transformer.config.plain import from_plain, read_object
from dist_transformer.config.presets import PRESETS, VARIANTS, preset_with_variant
from dist_transformer.config.schema import Setting, settings_of, values_of
from dist_transformer.config.settings import (
    EMBEDDED_CORPUS,
    NOT_OF_WEIGHTS,
    OF_VOCABULARIES,
    RUN_IDENTITY,
    ModelConfig,
    TrainConfig,
)

# Entries of a run's config.json that belong to that run alone; a new run gets its own.
_OF_THE_RUN = ("run_dir", "resume", *RUN_IDENTITY)
_COMMON = (
    *("preset", "data", "run_dir", "max_steps", "init_from", "deepspeed_config", "precision", "seed"),
    *("validate_every", "save_every", "patience", "batch.target_tokens_per_step", "optimizer.peak_lr", "test_mode"),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Start:
    """Defaults of all settings."""

    preset: Annotated[str, SimpleNamespace(names=tuple(PRESETS))] = "base"
    """Name of the preset, in the table above."""
    variant: Annotated[str, SimpleNamespace(names=tuple(VARIANTS))] = "base"
    """Row of the paper's Table 3, which changes the preset as it changes the paper's base model."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DryRun:
    """A trial."""

    test_mode: bool = False
    """Train for some minutes in one process, on a part of --data or of an embedded corpus, and print memory, speed and
    a table of checks; nothing is written to --run-dir."""


def parse_training(words: Sequence[str]) -> tuple[TrainConfig, bool]:
    """Parse the flags of training. The command line overrides `--config`, and `--config` overrides the preset.

    Returns:
        the settings, and whether `--test-mode` was given; data and run folder may then be missing.

    Raises:
        UserError: an unknown preset or variant, a file that cannot be used, a flag of another toolkit, a flag that is
            given twice, a setting without effect, or nothing to fine-tune.
    """
    known = [*settings_of(Start), *settings_of(DryRun), *settings_of(TrainConfig)]
    page = Page(text=_description(), common=_COMMON, taken=("--processes", "--import"))
    given = read_training(known, words, page, trains=True)
    trial = given.values.pop("test_mode", False)
    default = default_of(given)
    if trial:
        default = default.changed(data=EMBEDDED_CORPUS)
    elif missing := [name for name in ("data", "run_dir") if name not in given.values]:
        flags = " and ".join(f"--{name.replace('_', '-')}" for name in missing)
        raise UserError(f"pass {flags}: training reads data folders and writes a run folder")
    config = given.build(TrainConfig, default)
    if given.values.get("preset") == "finetune" and config.checkpoints.init_from is None:
        raise UserError("--preset finetune trains a model further: pass it with --init-from, or choose another preset")
    # A run's config.json has all settings, meant or not.
    of_a_run = not given.passed_over.isdisjoint(RUN_IDENTITY)
    meant = {name: how for name, how in given.written.items() if how.startswith("--") or not of_a_run}
    refuse_without_effect(meant, config)
    return config, trial


def read_training(known: Sequence[Setting], words: Sequence[str], page: Page, *, trains: bool = False) -> Given:
    """Read the words of a command that takes the settings of training, whose help has the defaults of its preset.

    Args:
        trains: whether it requires a data folder and a run folder.
    """

    def defaults(given: Mapping[str, Any]) -> dict[str, Any]:
        chosen = {each.name: given.get(each.name, each.default) for each in settings_of(Start)}
        values = {**values_of(preset_with_variant(**chosen)), **chosen, "data": None, "run_dir": None}
        return {name: value for name, value in values.items() if not trains or name not in ("data", "run_dir")}

    return read_words(known, page, words, defaults=defaults, of_others=_OF_THE_RUN)


def default_of(given: Given) -> TrainConfig:
    """Return the defaults that were chosen: those of preset and variant, with the architecture of --init-from.

    A run that exists has that in its own folder, so it resumes even if the model is gone. A path that is no model
    folder changes nothing: reading the weights reports that.

    Raises:
        UserError: an unknown preset or variant, or a wrong value in the file with the architecture.
    """
    chosen = {each.name: given.values.get(each.name, each.default) for each in settings_of(Start)}
    default, folder = preset_with_variant(**chosen), given.values.get("init_from")
    if folder is None:
        return default
    for place in (given.values.get("run_dir") or folder, folder):
        file = place / "config.json"
        if isinstance(values := read_object(file).get("model"), dict):
            # What the variant changes stays, so that a contradiction is refused.
            variant, preset = default.model, PRESETS[chosen["preset"]].model
            model = from_plain(ModelConfig, values, str(file))
            names = {field.name for field in dataclasses.fields(model)} - NOT_OF_WEIGHTS - OF_VOCABULARIES
            same = [name for name in names if getattr(variant, name) == getattr(preset, name)]
            changed = dataclasses.replace(variant, **{name: getattr(model, name) for name in same})
            return dataclasses.replace(default, model=changed)
    return default


def refuse_without_effect(given: Mapping[str, str], config: TrainConfig) -> None:
    """Refuse settings that were given although the others leave them without effect, and a data folder given twice.

    Args:
        given: names of settings, and how the user wrote them.

    Raises:
        UserError: there is one; the error names it and why it has no effect.
    """
    for names, why in _without_effect(config):
        for name in names.split():
            if name in given:
                raise UserError(f"{given[name]} has no effect here, because {why}")
    places = config.corpora.data
    folders = [place if is_url(place) else str(Path(place).resolve()) for place in places]
    if twice := [place for place, folder in zip(places, folders, strict=True) if folders.count(folder) > 1]:
        raise UserError(
            f"--data has {twice[0]} twice: pass it once; a larger share of it is a matter of --data-weights"
        )
    packs, tokens = (given.get(f"batch.{name}_per_step") for name in ("packs", "target_tokens"))
    if packs and tokens:
        raise UserError(f"{packs} and {tokens} both set the size of a step: use one of them")


def _without_effect(config: TrainConfig) -> Iterator[tuple[str, str]]:
    """Yield the settings that have no effect, and why. Schedules that a user registered may read both rates."""
    schedule, has_one_folder = config.optimizer.schedule, len(config.corpora.data) < 2
    if schedule == "noam":
        why = "the peak of the noam schedule is --optimizer.lr-scale · (width · warmup_steps)^-0.5: set that factor"
        yield "optimizer.peak_lr", f"{why}, or use another --optimizer.schedule, such as inverse_sqrt"
    if schedule in ("inverse_sqrt", "cosine", "constant"):
        yield "optimizer.lr_scale", "it is a factor of the noam schedule: use --optimizer.peak-lr"
    if config.optimizer.kind != "muon":
        yield "optimizer.momentum", "it is that of Muon: pass --optimizer.kind muon too"
    if config.checkpoints.init_from is None:
        yield "init_vocabulary", "it sets how --init-from is read: pass that too"
    if has_one_folder:
        yield "data_weights", "there is one data folder: leave it out"
    if has_one_folder or config.corpora.data_weights:
        yield "data_temperature", "it mixes several data folders by their sizes, without --data-weights: leave it out"
    if config.validation.validate_every == 0:
        yield "validate_sentences best_by validation_command keep_best", "--validate-every is 0: raise that"
    if config.validation.validation_command is None:
        yield "validation_command_minutes", "it limits --validation-command: set that too"


def _description() -> str:
    rows = "\n".join(_preset_row(name, config) for name, config in PRESETS.items())
    head = f"  {'preset':15} {'layers':>6} {'d_model':>7} {'steps':>8}  trained on, for"
    return f"""Train a Transformer. --preset sets the defaults of all other settings (`plan` counts the parameters):

{head}
{rows}

Flags override a file after --config, such as a run's config.json, and the file overrides the preset."""


# tiny and multi30k: measured, see results/. base and big: from the paper. big_large_batch: from Ott et al. 2018.
_MEANT_FOR = {
    "tiny": "2 CPU cores, minutes",
    "multi30k": "2 CPU cores, 2 hours",
    "finetune": "any, a model of --init-from",
    "ted_en_zh": "not measured yet",
    "ted_tutorial": "not measured yet",
    "base": "8 P100, 12 hours",
    "student": "not measured yet",
    "big": "8 P100, 3.5 days",
    "big_large_batch": "8 V100, 5 hours",
}


def _preset_row(name: str, config: TrainConfig) -> str:
    model = config.model
    layers = f"{model.encoder_layers}+{model.decoder_layers}"
    return f"  {name:15} {layers:>6} {model.width:>7} {config.max_steps:>8,}  {_MEANT_FOR[name]}"
