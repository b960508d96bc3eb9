"""Checkpoint averaging (section 6.1): the mean of the weights of several moments of training, as a model folder.

Sources may be weight files of a run, checkpoints or model folders. The mean is summed in fp32, tensor by tensor: at any
time the result and one more tensor are in memory, for any number of sources.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from dist_transformer.config import ModelConfig, from_plain, read_json
from dist_transformer.data.tokenizer import Tokenizer
from dist_transformer.errors import UserError
from dist_transformer.model_folder import TOKENIZER_FILE, WEIGHTS_FILE, ModelInfo, read_model_info, write_model_folder
from dist_transformer.training.checkpoint import checkpoint_problem

# The prefix under which a checkpoint keeps weights beside moments.
_CHECKPOINT_PREFIX = "weight/"


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


def average(paths: Sequence[Path], out: Path) -> ModelInfo:
    """Write the mean of the weights at `paths` to the model folder `out`.

    Raises:
        UserError: sources that do not fit together, appear twice or hold numbers that are not finite; each by name.
    """
    sources = [open_weights(path) for path in paths]
    _check_together(sources)
    first = sources[0]
    tokenizer_json = _read_tokenizer(first)
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
    write_model_folder(out, info=info, weights=weights, tokenizer_json=tokenizer_json)
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


def _read_tokenizer(source: WeightSource) -> bytes:
    tokenizer = Tokenizer.load(source.tokenizer_file)
    if tokenizer.sha256 != source.info.tokenizer_sha256:
        raise UserError(f"{source.tokenizer_file} is not the tokenizer of {source.path}: restore the data folder's")
    return source.tokenizer_file.read_bytes()


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
