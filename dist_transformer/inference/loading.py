"""Reading of one model folder, or of several whose models decode together, and the arithmetic of a model."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dist_transformer.base.errors import UserError
from dist_transformer.data.text.lines import require_readable
from dist_transformer.data.vocabulary.tokenizer import Vocabulary
from dist_transformer.inference.decoding import Loading
from dist_transformer.model_folder import ModelInfo, load_model, read_model_info, with_share
from dist_transformer.runtime.launch import as_typed, own_command

# Commands check their arguments with this module, and torch costs seconds.
if TYPE_CHECKING:
    import torch

    from dist_transformer.inference.ensemble import DecodingModel


def read_joint_info(paths: Sequence[Path], loading: Loading) -> ModelInfo:
    """Read config.json of a model folder, or of all folders of an ensemble, for one direction.

    Paths may end with a share in the ensemble, such as `MODEL:2`.

    Returns:
        The info of the only model. For an ensemble, the first one's, but `corpus` names the data of all models,
        `longest_source` and `several_sentences` are the least that is known, and there are no `steps`, because no
        weights are averaged.

    Raises:
        UserError: a folder has no model, lacks the direction, or differs from the first one in vocabulary or direction.
    """
    folders = [with_share(path)[0] for path in paths]
    infos = [read_model_info(path).facing(loading.direction, loading.tags) for path in folders]
    first, *others = infos
    for path, info in zip(folders[1:], others, strict=True):
        if info.tokenizer_sha256 != first.tokenizer_sha256:
            raise UserError(
                f"{path} has another vocabulary than {folders[0]}, and the models of an ensemble must share one: use "
                "models with the same tokenizer.json"
            )
        if info.direction != first.direction:
            raise UserError(
                f"{path} translates {info.direction.name} and {folders[0]} {first.direction.name}, or their tags "
                "differ: use models of one direction, or set it with --direction and --tag"
            )
    if not others:
        return first

    def least(name: str) -> Any:
        return min((value for info in infos if (value := getattr(info, name)) is not None), default=None)

    return replace(
        first,
        corpus=", ".join(dict.fromkeys(info.corpus for info in infos)),
        synthetic=any(info.synthetic for info in infos),
        steps=(),
        longest_source=least("longest_source"),
        several_sentences=least("several_sentences"),
    )


def require_inputs(models: Sequence[Path], loading: Loading, texts: Iterable[Path | None]) -> None:
    """Check early that a command can read its model's description and its texts.

    Raises:
        UserError: it cannot.
    """
    read_joint_info(models, loading)
    for path in filter(None, texts):
        require_readable(path)


def load_joint(
    paths: Sequence[Path], loading: Loading, device: "torch.device"
) -> "tuple[DecodingModel, Vocabulary, ModelInfo]":
    """Read a model folder, or several as an ensemble, for one direction; the model is in evaluation mode.

    Raises:
        UserError: `read_joint_info` or `load_model` failed, or the device does not compute in that precision.
    """
    from dist_transformer.inference.ensemble import Ensemble

    info, arithmetic = read_joint_info(paths, loading), as_arithmetic(loading.precision, device)
    folders, shares = zip(*map(with_share, paths), strict=True)
    loaded = [load_model(path, device, *arithmetic) for path in folders]
    models = [model for model, _, _ in loaded]
    return models[0] if len(models) == 1 else Ensemble(models, shares).eval(), loaded[0][1], info


def with_agreed_precision(loading: Loading, device: "torch.device") -> Loading:
    """Set the precision if it was not: bf16 if all ranks have instructions for it, otherwise fp32.

    Collective: every rank must call it.
    """
    from dist_transformer.runtime.device import multiplies_bf16
    from dist_transformer.runtime.distributed import gather_objects

    if loading.precision is not None:
        return loading
    return replace(loading, precision="bf16" if all(gather_objects(multiplies_bf16(device))) else "fp32")


def as_arithmetic(precision: str | None, device: "torch.device") -> "tuple[torch.dtype, bool]":
    """Return the dtype of a model that decodes in a precision, and whether it multiplies in int8.

    Raises:
        UserError: there is no such precision, or this device does not support it.
    """
    from dist_transformer.model import cpu_kernels
    from dist_transformer.runtime.device import as_dtype, multiplies_bf16, multiplies_int8

    if precision != "int8":
        return as_dtype(precision), False
    dtype = as_dtype("bf16" if multiplies_bf16(device) else "fp32")
    if not multiplies_int8(device):
        where = "it computes on a CPU alone" if device.type == "cuda" else "this CPU has no instructions for it (VNNI)"
        raise UserError(f"precision is int8, but {where}: use bf16 or fp32")
    if not cpu_kernels.takes(dtype):
        raise UserError("precision is int8, but its C++ code does not compile (see the note): use bf16 or fp32")
    return dtype, True


def translate_command(models: Sequence[Path], loading: Loading) -> str:
    """Return the command that translates lines as they are typed, for a user who has a model."""
    direction = ("--direction", loading.direction) if loading.direction else ()
    tags = ("--tag", *loading.tags) if loading.tags else ()
    return as_typed(own_command("translate", "--model", *models, *direction, *tags))
