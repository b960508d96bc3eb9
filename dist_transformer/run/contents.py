"""Check which files a run folder contains, and the model folders that were written into it."""

import os
import re
from pathlib import Path

import torch

from dist_transformer.base.errors import UserError
from dist_transformer.base.files import is_pickle
from dist_transformer.model_folder import load_model
from dist_transformer.model_paths import CONFIG_FILE, WEIGHTS_FILE, is_of_transformers
from dist_transformer.run.layout import CHECKPOINTS, FOLDERS, HANGS, POINTER, WEIGHT_HASHES, WEIGHTS

STEP_NAME = re.compile(r"step-(\d{8,})")
WEIGHTS_NAME = re.compile(r"(step|ema)-(\d{8,})\.safetensors")


def require_known(path: Path, run_dir: Path) -> None:
    """Refuse pickles and temporary files, and in checkpoints/ and weights/ any name that a run does not write.

    Raises:
        UserError: naming the path and the fix.
    """
    if path.name.endswith(".tmp"):
        raise UserError(f"{path} is being written now, or a killed process left it: remove it if no training runs")
    place = path.relative_to(run_dir).parts
    # NCCL's record of a hang is a pickle, which only torch's own tools read.
    if path.is_file() and place[0] != HANGS and is_pickle(path):
        raise UserError(f"{path} is a pickle, which can run code when it is loaded; a run writes none: remove it")
    known = {
        CHECKPOINTS: re.compile(rf"{POINTER}|{STEP_NAME.pattern}"),
        WEIGHTS: re.compile(rf"{WEIGHT_HASHES}|{WEIGHTS_NAME.pattern}"),
    }
    if len(place) == 2 and place[0] in known and not known[place[0]].fullmatch(place[1]):
        raise UserError(f"{path} is not a file of a run: move it away")


def model_folders(run_dir: Path) -> list[Path]:
    """List the models that were written into the run. Hidden folders are still being written, so they are left out."""
    found = []
    for parent, folders, files in os.walk(run_dir):
        path = Path(parent)
        own = FOLDERS if path == run_dir else ()
        folders[:] = sorted(name for name in folders if name not in own and not name.startswith("."))
        if path != run_dir and WEIGHTS_FILE in files and not is_of_transformers(path):
            found.append(path)
    return found


def check_model(path: Path) -> str:
    """Load a model folder, which checks its hashes and weights; return a description.

    Raises:
        UserError: a file is missing, or not what the folder states.
    """
    # Every command that uses the model loads it this way.
    model, _, info = load_model(path, torch.device("cpu"))
    parameters = sum(parameter.numel() for parameter in model.state_dict().values())
    steps = f"step{'s' * (len(info.steps) > 1)} {', '.join(f'{step:,}' for step in info.steps)}"
    return f"model of {steps}: {parameters:,} parameters, all finite, hashes match {CONFIG_FILE}"
