"""Names of the files of a model folder, and what a path is that is given in place of one."""

import re
from pathlib import Path

from dist_transformer.base.errors import UserError
from dist_transformer.config.plain import read_json
from dist_transformer.runtime.launch import as_typed, own_command

CONFIG_FILE, WEIGHTS_FILE, TOKENIZER_FILE, CARD_FILE = "config.json", "model.safetensors", "tokenizer.json", "README.md"

REMEDY = "write the folder again with dist-transformer average"
OF_ANOTHER_LIBRARY = (
    "only models that dist-transformer wrote are read, so train one with dist-transformer train, or convert a "
    "MarianMT folder with dist-transformer import"
)
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_SHARE = re.compile(r"[0-9]+(\.[0-9]*)?|\.[0-9]+")
_FOREIGN_WEIGHTS = (".bin", ".pt", ".pth", ".ckpt", ".npz", ".h5", ".msgpack", ".onnx", ".gguf")


def is_hub_name(name: str) -> bool:
    """Return whether a word may be the name of a model on the hub."""
    return _HUB_NAME.fullmatch(name) is not None


def is_of_transformers(path: Path) -> bool:
    """Return whether a folder's config.json is that of a model for transformers, such as an export."""
    try:
        values = read_json(path / CONFIG_FILE)
    except UserError:
        return False
    return "model_type" in values and "format_version" not in values


def with_share(path: Path) -> tuple[Path, float]:
    """Split `MODEL:2` into the path of a model and its share; without a number, the share is 1.

    Raises:
        UserError: the share is 0.
    """
    name, _, number = str(path).rpartition(":")
    if not name or path.exists() or not _SHARE.fullmatch(number):
        return path, 1.0
    if float(number) == 0:
        raise UserError(f"{path} has no share in the result: leave it out")
    return Path(name), float(number)


def no_model(path: Path, missing: str) -> UserError:
    """Build the error about a path that is not a model folder: what it is instead, and the way to a model."""
    inner = path / "model"
    found, remedy = f"it has no {missing}", f"{REMEDY}, or check the path"
    if not path.exists():
        found, remedy = "it does not exist", "check the path, or make a model with dist-transformer average"
        if is_hub_name(str(path)):
            remedy += f", or take one of the hub with {as_typed(own_command('import', path, '--out', 'MODEL'))}"
    elif not path.is_dir():
        found, remedy = _no_folder(path)
    elif all((inner / name).exists() for name in (CONFIG_FILE, WEIGHTS_FILE)):
        remedy = f"use the model folder in it, {inner}"
    elif (path / "weights").is_dir():
        remedy = f"make one from this run with {_average_of_run(path)}"
    elif (path / "manifest.json").exists() and (path / "state.json").exists():
        found, remedy = "it is a checkpoint", f"make a model from it with {_average_of(path)}"
    elif path.name in ("checkpoints", "weights") and (path.parent / "metrics.jsonl").exists():
        found = f"it is the {path.name} of a run"
        remedy = f"make a model from that run with {_average_of_run(path.parent)}"
    elif (path / "metrics.jsonl").exists():
        found, remedy = "it is a run folder without weights", "average the run after its first save"
    elif (path / "index.json").exists():
        found, remedy = "it is a data folder", "use a folder that dist-transformer average wrote"
    elif is_of_transformers(path):
        found, remedy = "it is a model for transformers", OF_ANOTHER_LIBRARY
    elif name := next((file.name for file in sorted(path.glob("*")) if file.suffix in _FOREIGN_WEIGHTS), None):
        found, remedy = f"it holds {name}, weights of another library", OF_ANOTHER_LIBRARY
    return UserError(f"{path} is not a model folder ({found}): {remedy}")


def _no_folder(file: Path) -> tuple[str, str]:
    """Describe a file that is given as a model folder, and the way to a model."""
    folder = file.parent
    if all((folder / name).exists() for name in (CONFIG_FILE, WEIGHTS_FILE)) and not is_of_transformers(folder):
        return "it is a file of one", f"use its folder, {folder}"
    if file.suffix == ".safetensors" and folder.name == "weights":
        return "it is a weight file of a run", f"make a model from it with {_average_of(file)}"
    if file.suffix == ".safetensors" and (folder / "manifest.json").exists():
        return "it is a file of a checkpoint", f"make a model from that with {_average_of(folder)}"
    if file.suffix in (*_FOREIGN_WEIGHTS, ".safetensors"):
        return "it is a weight file of another library", OF_ANOTHER_LIBRARY
    return "it is a file", "use a folder that dist-transformer average wrote"


def _average_of_run(run_dir: Path) -> str:
    return as_typed(own_command("average", "--run-dir", run_dir, "--out", run_dir / "model"))


def _average_of(weights: Path) -> str:
    return as_typed(own_command("average", "--checkpoints", weights, "--out", "MODEL"))
