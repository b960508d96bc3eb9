"""The commands as Python functions: prepare, train, average, evaluate, and a trained model in memory.

Bad input raises `UserError`, whose message is one sentence for the user. Paths are `str` or `Path`.
"""

import json
import sys
import tempfile
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any, Literal

from dist_transformer.averaging.interpolation import interpolate
from dist_transformer.averaging.mean import write_mean
from dist_transformer.averaging.settings import AVERAGE_RULES, AverageSettings
from dist_transformer.averaging.sweep import choose_better, sweep, write_best
from dist_transformer.base.errors import UserError, log_line, logger, print_messages
from dist_transformer.base.files import write_file
from dist_transformer.config.command_line import read_keywords
from dist_transformer.config.flags import refuse_without_effect
from dist_transformer.config.presets import preset_with_variant
from dist_transformer.config.settings import TrainConfig
from dist_transformer.data.folder.format import DataIndex
from dist_transformer.data.prepare.pipeline import prepare as make_data_folder
from dist_transformer.data.prepare.settings import PREPARE_RULES, PrepareSettings
from dist_transformer.evaluation.compare import compare
from dist_transformer.evaluation.evaluate import Evaluation, write_evaluation
from dist_transformer.evaluation.evaluate import evaluate as evaluate_folder
from dist_transformer.evaluation.report import write_report
from dist_transformer.evaluation.settings import EVALUATE_RULES, EvaluateSettings
from dist_transformer.inference.trained_model import TrainedModel
from dist_transformer.model_folder import ModelInfo
from dist_transformer.model_tags import preparation_caution
from dist_transformer.run.layout import read_records
from dist_transformer.runtime.child import run_child
from dist_transformer.runtime.device import find_device
from dist_transformer.runtime.extensions import import_extension
from dist_transformer.training.fault_tolerance.signals import INTERRUPTED

AnyPath = str | PathLike[str]
Paths = AnyPath | Sequence[AnyPath]

load = TrainedModel.load


def _show_messages() -> None:
    # As commands do, unless the program has configured them.
    if not logger.hasHandlers():
        print_messages()


def prepare(*, out: AnyPath, report: Callable[[str], None] = log_line, **settings: Any) -> DataIndex:
    """Make a data folder, as the command `prepare` does, in one process.

    Args:
        out: folder to make; it must be new or empty.
        report: called with lines about the text that was read, dropped and written; by default they are logged.
        settings: settings by the names of their flags or of the fields of `PrepareSettings` and `TextSettings`: `src`
            and `tgt`, which are a file, a pattern or several each, `valid_src` and `valid_tgt`, `vocab_size` or
            `tokenizer`, `max_tokens=128`, `source_tags=("<2de>",)`. `sources` and `validation` are more text as objects
            (`LineFiles`, `TsvFile`, `HubDataset`, … of `dist_transformer.data.text`). With `workers` above 1, a script
            needs `if __name__ == "__main__":`.

    Returns:
        the contents of the folder's index.json.

    Raises:
        UserError: bad text, files or settings.
    """
    _show_messages()
    stated = read_keywords(PrepareSettings, {**settings, "out": out}, "prepare", also=["report"])
    wanted = stated.build(PrepareSettings, rules=PREPARE_RULES)
    if caution := preparation_caution(wanted):
        warnings.warn(caution, stacklevel=2)
    return make_data_folder(wanted, report)


@dataclass(frozen=True, slots=True)
class Run:
    """A run folder after `train`."""

    path: Path
    finished: bool
    """Whether training is complete. If not, it was stopped and has saved; the same call resumes it."""

    def records(self, kind: Literal["train", "valid", "epoch", "checkpoint", "end"]) -> list[dict[str, Any]]:
        """Read the records of one kind in metrics.jsonl, in order."""
        return read_records(self.path, kind)


def train(
    *,
    data: Paths,
    run_dir: AnyPath,
    preset: str = "base",
    variant: str = "base",
    processes: int = 1,
    imports: Sequence[AnyPath] = (),
    **settings: Any,
) -> Run:
    """Train in child processes, as the command `train` does, and wait for them. Resume the run in `run_dir`, if any.

    Args:
        data: data folders.
        run_dir: run folder; it is made, or resumed from its last checkpoint.
        preset: name of the defaults of all settings; `variant`, a row of the paper's Table 3, changes them.
        processes: number of processes on this machine, one per GPU if there are GPUs.
        imports: modules, or files that end with .py, that register names (docs/extending.md).
        settings: settings by their names in config.json, groups as dicts: `max_steps=1000, model={"width": 128}`.

    Raises:
        UserError: settings or data are bad, or training failed.
        KeyboardInterrupt: Ctrl-C was pressed, and training has saved and ended.
    """
    _show_messages()
    for name in imports:
        import_extension(str(name))
    values = {**settings, "data": data, "run_dir": run_dir}
    stated = read_keywords(TrainConfig, values, "train", also=("preset", "variant", "processes", "imports"))
    refuse_without_effect(stated.written, stated.build(TrainConfig, preset_with_variant(preset, variant)))
    with tempfile.TemporaryDirectory(prefix="dist_transformer-") as folder:
        file = Path(folder) / "settings.json"
        write_file(file, json.dumps(stated.values, default=str))
        flags = ["--preset", preset, "--variant", variant, "--config", file, "--run-dir", Path(run_dir)]
        extensions = [word for name in imports for word in ("--import", name)]
        ranks = ["--processes", processes] if processes > 1 else []
        # A file of settings may come from a stranger, or from another run, so none may say these two.
        for name in ("validation_command", "resume"):
            if settings.get(name) is not None:
                flags += [f"--{name.replace('_', '-')}", settings[name]]
        program = [sys.executable, "-m", "dist_transformer", "train"]
        status, error = run_child([*program, *extensions, *flags, *ranks])
    if status not in (0, INTERRUPTED):
        said = error or f"training ended with status {status}: see its last lines above"
        raise UserError(said.replace(f" in {file} (line 1)", "").replace(str(file), "settings"))
    return Run(Path(run_dir), finished=status == 0)


def average(**settings: Any) -> ModelInfo:
    """Write the mean of weights of a run to a model folder, as the command `average` does, in this process.

    With `run_dir` and `out` alone, the regular weight files after the warm-up are averaged, or the newest one alone if
    its validation loss is lower.

    Args:
        settings: those of the command, by the names of its flags.
            `out`: model folder to write; `run_dir`: run folder.
            `last`: number of newest weight files to average; `every`: the training time between them in minutes.
            `best`: number of best weight files instead; `by`: a measure of their validation: `nll`, `bleu`, `chrf`,
            `ter` or `command`; by default the one by which the run ranked them.
            `checkpoints`: weight files, checkpoints or model folders instead of a run; `interpolate`: models with
            shares, `["BASE:0.5", "TUNED:0.5"]`, of which one was trained from the other.
            `sweep`: numbers of weight files, whose means are compared by their BLEU on the text `src` with the
            reference `ref`, by default the validation text; the best is written. Its translations have the settings of
            `evaluate`, without those of samples.

    Returns:
        the contents of the model folder's config.json: the averaged `steps`, the languages, the network.

    Raises:
        UserError: the weights do not fit together, or are too few, or settings have no effect.
    """
    wanted = read_keywords(AverageSettings, settings, "average").build(AverageSettings, rules=AVERAGE_RULES)
    if wanted.interpolate:
        return interpolate(wanted.interpolate, wanted.out)
    if wanted.sweep:
        result = sweep(wanted, find_device(wanted.loading.device))
        chosen, info = result.best.chosen, write_best(result)
    else:
        chosen = choose_better(wanted)
        info = write_mean(chosen, wanted.out)
    for caution in chosen.warnings:
        warnings.warn(caution, stacklevel=2)
    return info


def evaluate(**settings: Any) -> Evaluation | Any:
    """Translate a test set with a model folder and score it, as the command `evaluate` does, in this process.

    Args:
        settings: those of the command, by the names of its flags.
            `model`: model folder, or those of an ensemble (see `load`).
            `src`: source text, one sentence per line; `ref`: raw reference text, a file or several references; or
            `test_set`: one of sacreBLEU's, such as `wmt14/full`.
            `lowercase`: ignore case. `json`: file for the scores, beside which the hypotheses are written.
            `device`: `cpu`, `cuda` or `cuda:N`; default: a GPU if there is one.
            `precision`: `fp32`, `bf16` or `int8`; default: bf16 if the processor has instructions for it, otherwise
            fp32.
            `direction`: direction such as `en-de`, if the model has several; `tags` replace the direction's.
            `beam`, `length_penalty`, `max_extra_tokens`, `batch_tokens`: as for `TrainedModel.translate`; `split_over`,
            too, but lines are translated as they stand by default.
            `mbr`: samples per line, of which the one with the best expected `utility` is scored, instead of a search;
            `epsilon` and `seed` are those of the samples.
            `hypotheses`: files of translations, instead of a model; `tgt_lang`: their language.

    Returns:
        `.scores` with their signatures, and `.hypotheses`. For files of hypotheses, `.scores` of each file, and
        `.resampled`, the differences from the first.

    Raises:
        UserError: a file or a setting is unfit.
    """
    wanted = read_keywords(EvaluateSettings, settings, "evaluate").build(EvaluateSettings, rules=EVALUATE_RULES)
    if wanted.hypotheses:
        found = compare(wanted.hypotheses, wanted.ref, target_language=wanted.tgt_lang, lowercase=wanted.lowercase)
        if wanted.json is not None:
            write_report(found.report(), wanted.json)
        return found
    warn = partial(warnings.warn, stacklevel=3)
    evaluation = evaluate_folder(wanted, device=find_device(wanted.loading.device), warn=warn)
    if wanted.json is not None:
        write_evaluation(evaluation, wanted.json)
    return evaluation
