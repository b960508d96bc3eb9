"""Models of the hub, by names such as `Helsinki-NLP/opus-mt-en-de`."""

from pathlib import Path

from dist_transformer.base.errors import UserError
from dist_transformer.model_folder import is_hub_name

# What an import reads; repositories also hold the weights of other programs.
_READ = ["*.json", "*.spm", "*.model", "*.yml", "*.npz", "*.safetensors", "pytorch_model*.bin"]


def find_folder(path: Path) -> Path:
    """Return a folder that is here, or download one that a path without a folder names.

    Raises:
        UserError: the hub has none, it is private, or the hub cannot be reached.
    """
    if path.exists() or not is_hub_name(str(path)):
        return path
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(str(path), allow_patterns=_READ))
    except Exception as error:  # one of many types: not found, private, gated, no network, a full disk
        raise UserError(
            f"{path} is no folder here, and cannot be downloaded from the hub ({_reason(error)}): check the name and "
            "the network; a private model needs hf auth login"
        ) from error


def push(folder: Path, name: str) -> str:
    """Copy a folder to the hub, where a new model is private; return its address.

    Raises:
        UserError: the hub does not take it.
    """
    from huggingface_hub import HfApi

    try:
        address = HfApi().create_repo(name, private=True, exist_ok=True)
        HfApi().upload_folder(repo_id=name, folder_path=folder)
    except Exception as error:  # as above
        raise UserError(
            f"{folder} is written, but the hub does not take it as {name} ({_reason(error)}): check the name, the "
            f"network and hf auth login, then hf upload {name} {folder}"
        ) from error
    return str(address)


def _reason(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)[:200]
