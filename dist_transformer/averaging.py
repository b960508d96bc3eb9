"""Checkpoint averaging (section 6.1): the mean of the weights of several moments of training, as a model folder.

Sources may be weight files of a run, checkpoints or model folders. The mean is summed in fp32, tensor by tensor: at any
time the result and one more tensor are in memory, for any number of sources.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError, safe_open

from dist_transformer.config import ModelConfig, from_plain, read_json
from dist_transformer.data.tokenizer import Tokenizer
from dist_transformer.errors import UserError
from dist_transformer.model_folder import TOKENIZER_FILE, WEIGHTS_FILE, ModelInfo, read_model_info, write_model_folder
from dist_transformer.training.checkpoint import checkpoint_problem, step_name
from dist_transformer.training.metrics import read_records

# The prefix under which a checkpoint keeps weights beside moments.
_CHECKPOINT_PREFIX = "weight/"
METRICS_FILE = "metrics.jsonl"

Measure = Literal["nll", "bleu"]
"""Of a validation: -log p a target token, the lowest is best; sacreBLEU of its translations, the highest is best."""


@dataclass(frozen=True, slots=True)
class WeightSource:
    """Weights that can be averaged, read tensor by tensor."""

    path: Path
    info: ModelInfo
    tokenizer_file: Path
    tensors: dict[str, Any]
    """Name of a parameter to the open file that holds it."""
    prefix: str = ""

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: tuple(self.tensors[name].get_slice(self.prefix + name).get_shape()) for name in self.tensors}

    def tensor(self, name: str) -> torch.Tensor:
        return self.tensors[name].get_tensor(self.prefix + name)


def open_weights(path: Path) -> WeightSource:
    """Open a weight file, a checkpoint or a model folder.

    Raises:
        UserError: it is none of these, or it is damaged.
    """
    if path.is_file():
        opened = _open_tensors(path)
        info = _model_info(_metadata(opened, path), path)
        return WeightSource(path, info, path.absolute().parents[1] / TOKENIZER_FILE, _names(opened))
    if (path / "state.json").exists():
        problem = checkpoint_problem(path)
        if problem:
            raise UserError(f"{problem}: choose another checkpoint")
        tensors: dict[str, Any] = {}
        for part in sorted(path.glob("part-*.safetensors")):
            tensors.update(_names(_open_tensors(part), _CHECKPOINT_PREFIX))
        info = _model_info(read_json(path / "state.json"), path)
        return WeightSource(path, info, path.absolute().parents[1] / TOKENIZER_FILE, tensors, _CHECKPOINT_PREFIX)
    if (path / WEIGHTS_FILE).exists():
        return WeightSource(
            path, read_model_info(path), path / TOKENIZER_FILE, _names(_open_tensors(path / WEIGHTS_FILE))
        )
    raise UserError(f"{path} is neither a weight file nor a checkpoint nor a model folder: check the path")


def newest_weights(run_dir: Path, count: int) -> list[Path]:
    """The newest `count` weight files of a run, oldest first.

    Raises:
        UserError: there are fewer.
    """
    files = sorted((run_dir / "weights").glob("step-*.safetensors"))
    if len(files) < count:
        raise UserError(
            f"{run_dir / 'weights'} has {len(files)} weight files, not {count}: "
            + (f"use --last {len(files)} or train on" if files else "train first, or check --run-dir")
        )
    return files[-count:]


@dataclass(frozen=True, kw_only=True, slots=True)
class BestWeights:
    """The weight files of a run's best validations, oldest first."""

    by: Measure
    paths: tuple[Path, ...]
    steps: tuple[int, ...]
    values: tuple[float, ...]
    """The measure at each step."""
    better_without_file: tuple[int, ...]
    """Steps that validated better than the worst of these, and whose weights are no longer kept."""

    def __str__(self) -> str:
        decimals = 2 if self.by == "bleu" else 4
        pairs = zip(self.steps, self.values, strict=True)
        return f"best validation {self.by}: {', '.join(f'step {step} ({value:.{decimals}f})' for step, value in pairs)}"


def best_weights(run_dir: Path, count: int, by: Measure | None = None) -> BestWeights:
    """The `count` weight files of a run whose validations were best; of equal ones the earlier, as in training.

    Args:
        by: None: what the run itself compares, its `best_by`.

    Raises:
        UserError: fewer validated steps have a weight file, or no validation has the measure.
    """
    records = _validations(run_dir)
    if by is None:
        by = read_json(run_dir / "config.json")["best_by"]
    # A loss that was not finite is written as null.
    values = {record["step"]: record[by] for record in records if record.get(by) is not None}
    if not values:
        remedy = "use --by nll" if records else "use --last, or train with --validate-every above 0"
        raise UserError(f"{run_dir / METRICS_FILE} has no validation with {by}: {remedy}")
    files = {step: run_dir / "weights" / f"{step_name(step)}.safetensors" for step in values}
    sign = 1 if by == "nll" else -1
    ranked = sorted(values, key=lambda step: (sign * values[step], step))
    kept = [step for step in ranked if files[step].exists()]
    if len(kept) < count:
        listed = f" ({', '.join(map(str, sorted(kept)))})" if kept else ""
        remedy = f"use --best {len(kept)}" if kept else "use --last"
        raise UserError(
            f"{run_dir} has weight files of {len(kept)} validated steps{listed}, not of {count}: {remedy}, or train "
            f"with keep_best {count} or more, which keeps the weights of so many best validations"
        )
    steps = sorted(kept[:count])
    before_worst = ranked[: ranked.index(kept[count - 1])]
    return BestWeights(
        by=by,
        paths=tuple(files[step] for step in steps),
        steps=tuple(steps),
        values=tuple(values[step] for step in steps),
        better_without_file=tuple(sorted(set(before_worst) - set(kept))),
    )


def _validations(run_dir: Path) -> list[dict[str, Any]]:
    file = run_dir / METRICS_FILE
    try:
        return read_records(run_dir, "valid")
    except FileNotFoundError:
        raise UserError(f"{file} does not exist: train first, or check --run-dir") from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{file} cannot be read ({error}): resume the run, which repairs it, or use --last") from None


def average(paths: Sequence[Path], out: Path, *, notes: Sequence[str] = ()) -> ModelInfo:
    """Write the mean of the weights at `paths` to the model folder `out`.

    Args:
        notes: lines of the model card: how the weights were chosen.

    Raises:
        UserError: sources that do not fit together, appear twice or hold numbers that are not finite; each by name.
    """
    sources = [open_weights(path) for path in paths]
    _check_together(sources)
    first = sources[0]
    tokenizer, tokenizer_json = _read_tokenizer(first)
    weights = {name: _mean(name, sources) for name in first.tensors}
    steps = tuple(sorted({step for source in sources for step in source.info.steps}))
    info = ModelInfo(
        model=first.info.model,
        tokenizer_sha256=first.info.tokenizer_sha256,
        source_language=first.info.source_language,
        target_language=first.info.target_language,
        corpus=first.info.corpus,
        synthetic=first.info.synthetic,
        steps=steps,
    )
    notes = [f"Normalisation of text: {tokenizer.text_rule}", *notes]
    write_model_folder(out, info=info, weights=weights, tokenizer_json=tokenizer_json, notes=notes)
    return info


def _mean(name: str, sources: Sequence[WeightSource]) -> torch.Tensor:
    # A copy: the tensor of a file is a view of its memory map, and adding to it would change what the file gives next.
    total = sources[0].tensor(name).to(torch.float32, copy=True)
    for source in sources[1:]:
        total += source.tensor(name)
    if not torch.isfinite(total).all():
        culprit = next((s.path for s in sources if not torch.isfinite(s.tensor(name)).all()), sources[0].path)
        raise UserError(f"{culprit}: {name} holds numbers that are not finite: leave this one out")
    return total.div_(len(sources))


def _check_together(sources: Sequence[WeightSource]) -> None:
    first = sources[0]
    seen: set[Path] = set()
    shapes = first.shapes()
    for source in sources:
        if source.path.resolve() in seen:
            raise UserError(f"{source.path} is given twice: name each source once")
        seen.add(source.path.resolve())
        if source.info.tokenizer_sha256 != first.info.tokenizer_sha256:
            raise UserError(
                f"{source.path} was trained with another tokenizer than {first.path}: average one run's weights"
            )
        if source.info.model != first.info.model or source.shapes() != shapes:
            raise UserError(
                f"{source.path} has another model configuration than {first.path}: average one run's weights"
            )


def _read_tokenizer(source: WeightSource) -> tuple[Tokenizer, bytes]:
    tokenizer = Tokenizer.load(source.tokenizer_file)
    if tokenizer.sha256 != source.info.tokenizer_sha256:
        raise UserError(f"{source.tokenizer_file} is not the tokenizer of {source.path}: restore the data folder's")
    return tokenizer, source.tokenizer_file.read_bytes()


def _metadata(opened: Any, path: Path) -> dict[str, Any]:
    """What a weight file says of itself: JSON values in the header."""
    header = {key: value for key, value in (opened.metadata() or {}).items() if key != "format"}
    try:
        described = {key: json.loads(value) for key, value in header.items()}
    except ValueError:
        described = {}
    if "model" not in described:
        raise UserError(
            f"{path} is not a weight file of a run: give files of RUN/weights, checkpoints or model folders"
        )
    return described


def _model_info(described: dict[str, Any], path: Path) -> ModelInfo:
    try:
        return ModelInfo(
            model=from_plain(ModelConfig, described["model"], str(path)),
            tokenizer_sha256=described["tokenizer_sha256"],
            source_language=described["source_language"],
            target_language=described["target_language"],
            corpus=described["corpus"],
            synthetic=described["synthetic"],
            steps=(described["step"],),
        )
    except KeyError as missing:
        raise UserError(f"{path} does not say its {missing}: it was not written by this program") from None


def _open_tensors(file: Path) -> Any:
    try:
        return safe_open(file, framework="pt")
    except (SafetensorError, OSError) as error:
        raise UserError(f"{file} cannot be read ({error}): leave it out, or restore it") from None


def _names(opened: Any, prefix: str = "") -> dict[str, Any]:
    return {name.removeprefix(prefix): opened for name in opened.keys() if name.startswith(prefix)}  # noqa: SIM118
