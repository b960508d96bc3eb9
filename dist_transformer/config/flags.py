"""The command line of training: preset, variant, settings from a file, and one flag per setting."""

import argparse
import dataclasses
import math
import shutil
import textwrap
import tomllib
import typing
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import tyro

from dist_transformer.base.errors import UserError
from dist_transformer.base.paths import usable_path
from dist_transformer.config.architecture import with_architecture
from dist_transformer.config.plain import choices_of, from_plain, hints_of_settings, read_json, to_plain
from dist_transformer.config.presets import PRESETS
from dist_transformer.config.settings import EMBEDDED_CORPUS, RUN_IDENTITY, ModelConfig, TrainConfig
from dist_transformer.config.stated import (
    refuse_repeated,
    refuse_without_effect,
    stated_by_flags,
    stated_by_values,
)
from dist_transformer.config.table3 import VARIANTS, preset_with_variant
from dist_transformer.config.wrong_names import (
    LIST_FLAGS,
    list_flags,
    refuse_wrong_choices,
    refuse_wrong_flags,
    refuse_wrong_settings,
)

# Entries of a run's config.json that belong to that run alone; a new run gets its own.
_OF_THE_RUN = ("run_dir", "resume", *RUN_IDENTITY)


def parse_training(arguments: Sequence[str], *, prog: str) -> tuple[TrainConfig, bool]:
    """Parse the flags of training. The command line overrides `--config`, and `--config` overrides the preset.

    Returns:
        the settings, and whether `--test-mode` was given; data and run folder may then be missing.

    Raises:
        UserError: an unknown preset or variant, a file that cannot be used, a flag of another toolkit, a flag that is
            given twice, a setting without effect, or nothing to fine-tune.
    """
    choices = flags_of_training() | {"--preset": [*PRESETS], "--variant": [*VARIANTS]}
    choices |= dict.fromkeys(("--config", "--test-mode", "--local_rank"), ())
    # The program takes these two before this command starts.
    check_flags(arguments, choices, program=prog, also=("--processes", "--import"))
    chooser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    chooser.add_argument("--preset", default="base")
    chooser.add_argument("--variant", default="base")
    chooser.add_argument("--config", type=usable_path)
    chooser.add_argument("--test-mode", action="store_true", dest="dry_run")
    # DeepSpeed's launcher adds this flag; the environment has the same value.
    chooser.add_argument("--local_rank", "--local-rank", type=int)
    chosen, rest = chooser.parse_known_args(arguments)
    missing: dict[str, Any] = {"data": tyro.MISSING, "run_dir": tyro.MISSING}
    stated = stated_by_flags(rest)
    values, of_a_run = _read_settings(chosen.config) if chosen.config is not None else ({}, False)
    default = defaults_of(chosen.preset, chosen.variant, arguments, init_from=values.get("init_from"))
    if chosen.config is not None:
        weights = values.get("data_weights")
        if isinstance(weights, list) and "data" not in values:
            if "data" not in stated:
                raise UserError(f"{chosen.config} has data_weights and no data: pass the folders with --data")
            # Weights are checked with their folders. The flag replaces these.
            values["data"] = [""] * len(weights)
        if values.get("validation_command") is not None and "validation_command" not in stated:
            # The file may come from a stranger.
            raise UserError(
                f"{chosen.config} has a validation_command, and no file may name a program to run: pass "
                "--validation-command on the command line, with the same words, others, or None"
            )
        default = over(default, values, str(chosen.config))
        # A run's config.json has all settings, meant or not.
        stated = ({} if of_a_run else stated_by_values(values, str(chosen.config))) | stated
        missing = {name: value for name, value in missing.items() if name not in values}
    print_above_help(_description(chosen.preset, chosen.variant), rest)
    config = tyro.cli(
        TrainConfig,
        default=default.changed(**({"data": EMBEDDED_CORPUS} if chosen.dry_run else missing)),
        args=rest,
        prog=prog,
        description="",
    )
    if chosen.preset == "finetune" and config.checkpoints.init_from is None:
        raise UserError("--preset finetune trains a model further: pass it with --init-from, or choose another preset")
    refuse_without_effect(stated, config)
    return config, chosen.dry_run


def defaults_of(preset: str, variant: str, arguments: Sequence[str], *, init_from: object = None) -> TrainConfig:
    """Return the defaults of a command line: those of preset and variant, with the architecture of --init-from.

    Args:
        init_from: the value of a file of settings, which the flag overrides.

    Raises:
        UserError: an unknown preset or variant, or a wrong value in the file with the architecture.
    """
    chooser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for flags in (("--init-from", "--init_from"), ("--run-dir", "--run_dir")):
        chooser.add_argument(*flags, type=Path)
    given, _ = chooser.parse_known_args(arguments)
    default = preset_with_variant(preset, variant)
    folder = given.init_from or (Path(init_from) if isinstance(init_from, str) else None)
    if folder is None:
        return default
    model = with_architecture(default.model, preset=PRESETS[preset].model, init_from=folder, run_dir=given.run_dir)
    return dataclasses.replace(default, model=model)


def flags_of_training() -> dict[str, Sequence[str]]:
    """Return the flag of every setting of training, with its choices if it has some."""
    return {f"--{name.replace('_', '-')}": _words_of(hint) for name, hint in hints_of_settings(TrainConfig).items()}


def _words_of(hint: Any) -> list[str]:
    """List the words that a flag takes for the choices of a setting, also for none."""
    choices = [str(choice) for choice in choices_of(hint)]
    return [*choices, "None"] if choices and type(None) in typing.get_args(hint) else choices


def check_flags(
    words: Sequence[str], choices: Mapping[str, Sequence[str]], *, program: str, also: Iterable[str] = ()
) -> None:
    """Refuse wrong flags, flags that are given twice, and values that are none of a flag's choices.

    If `words` asks for it, list the flags for completion in a shell, and end the program.

    Args:
        choices: flags of the command, with their choices.
        also: flags that the program takes out of the command line before.

    Raises:
        UserError: there is one.
    """
    if LIST_FLAGS in words:
        print(list_flags({**choices, **dict.fromkeys((*also, "--help"), ())}))
        raise SystemExit
    refuse_repeated(words)
    refuse_wrong_flags(words, {*choices, "--help", "-h"}, program=program, also=also, any_spelling=True)
    refuse_wrong_choices(words, choices)


def _read_settings(file: Path) -> tuple[dict[str, Any], bool]:
    """Read settings from JSON or TOML, and tell whether they are a run's config.json."""
    if file.suffix != ".toml":
        values = read_json(file)
    else:
        try:
            values = tomllib.loads(file.read_bytes().decode())
        except FileNotFoundError:
            raise UserError(f"{file} does not exist: check the path") from None
        except (OSError, ValueError) as error:
            raise UserError(f"{file} cannot be read as TOML ({error}): correct it") from None
    return {name: value for name, value in values.items() if name not in _OF_THE_RUN}, not values.keys().isdisjoint(
        RUN_IDENTITY
    )


def over(default: TrainConfig, values: dict[str, Any], where: str, *, also: Iterable[str] = ()) -> TrainConfig:
    """Override the settings of `default` with `values`, which are plain values as in config.json.

    Args:
        also: what can be given beside the settings, and may have been meant by a wrong name.

    Raises:
        UserError: an unknown name or a wrong value; the message names `where`.
    """
    known = hints_of_settings(TrainConfig)
    groups = {name.partition(".")[0] for name in known if "." in name}
    given = [name for name in stated_by_values(values, where) if name not in groups]
    refuse_wrong_settings(given, {*known, *also}, where, only_with_remedy=True)
    plain = to_plain(default)
    for name, value in values.items():
        whole = isinstance(value, dict) and isinstance(plain.get(name), dict)
        plain[name] = plain[name] | value if whole else value
    return from_plain(TrainConfig, plain, where)


def _description(preset: str, variant: str) -> str:
    rows = "\n".join(_preset_row(name, config) for name, config in PRESETS.items())
    head = f"  {'preset':15} {'layers':>6} {'d_model':>7} {'params':>6} {'steps':>8}  trained on, for"
    paragraphs = [
        "Train a Transformer. Common flags: --preset NAME, --data DATA, --run-dir RUN, --max-steps N, "
        "--deepspeed_config zero2, --config FILE, --test-mode; with the program dist-transformer, also --processes N.",
        f"--preset sets the defaults below (now: {preset}):",
        f"{head}\n{rows}",
        f"--variant {{{', '.join(VARIANTS)}}} changes them as that row of the paper's Table 3 changes its base model "
        f"(now: {variant}).",
        "--config FILE reads defaults from a run's config.json or a part of it (JSON or TOML); flags override them.",
        "--test-mode is a dry run: it trains for some minutes in one process, on a part of --data or of an embedded "
        "corpus, and prints memory, speed and a table of checks. It writes nothing to --run-dir.",
    ]
    columns = shutil.get_terminal_size().columns
    return "\n\n".join(text if text.startswith(" ") else textwrap.fill(text, columns) for text in paragraphs)


def print_above_help(text: str, arguments: Sequence[str]) -> None:
    """Print the description of a command if `arguments` ask for help."""
    # tyro would join the lines of its own description.
    if {"-h", "--help"} & set(arguments):
        print(f"{text}\n")


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
    millions = parameters(model, vocab_size=37_000) / 1e6
    size = f"{millions:,.0f}M"
    return f"  {name:15} {layers:>6} {model.width:>7} {size:>6} {config.max_steps:>8,}  {_MEANT_FOR[name]}"


def parameters(model: ModelConfig, *, vocab_size: int) -> int:
    """Count the parameters of a model of one vocabulary without building it.

    They are those of embeddings, attention, feed-forward layers and norms.
    """
    inner = model.heads * model.attention_head_width
    attention = 4 * model.width * inner + 3 * inner + model.width
    feed_forward = 2 * model.width * model.ffn_width + model.ffn_width + model.width
    norm = 2 * model.width
    encoder = model.encoder_layers * (attention + feed_forward + 2 * norm)
    decoder = model.decoder_layers * (2 * attention + feed_forward + 3 * norm)
    matrices = {"all": 1, "target": 2, "none": 3}[model.tie_embeddings]
    return math.prod((matrices, vocab_size, model.width)) + vocab_size * model.output_bias + encoder + decoder
