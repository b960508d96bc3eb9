"""Names of everything in a run folder.

RUN/config.json                        resolved settings, identity of the data
RUN/tokenizer.json                     the data folder's tokenizer
RUN/environment.json                   versions and hardware of each start
RUN/metrics.jsonl, RUN/ledger.jsonl    what was logged, what was trained on
RUN/checkpoints/latest                 the name of the newest checkpoint
RUN/checkpoints/step-00001000/         manifest.json, state.json, part-00000.safetensors, one part per rank
RUN/weights/step-00001000.safetensors  fp32 weights alone, for averaging; ema-… if a moving average is kept
RUN/weights/SHA256SUMS                 their hashes, as `sha256sum --check` reads them
RUN/samples/, RUN/tensorboard/         translations of each validation, event files
RUN/heartbeats/, RUN/lock              what each rank is doing, which process holds the folder
RUN/hangs/                             stacks of ranks that made no progress
"""

import re
from pathlib import Path

SETTINGS_FILE, ENVIRONMENT_FILE, LOCK_FILE = "config.json", "environment.json", "lock"
METRICS_FILE, LEDGER_FILE = "metrics.jsonl", "ledger.jsonl"
CHECKPOINTS, WEIGHTS, SAMPLES, TENSORBOARD, HEARTBEATS, HANGS = (
    "checkpoints",
    "weights",
    "samples",
    "tensorboard",
    "heartbeats",
    "hangs",
)
FOLDERS = (CHECKPOINTS, WEIGHTS, SAMPLES, TENSORBOARD, HEARTBEATS, HANGS)
WRITTEN_IN_PLACE = (LOCK_FILE, METRICS_FILE, LEDGER_FILE, *FOLDERS)
"""Files and folders that a run adds to. Its other files are written under a temporary name, then renamed."""
POINTER, MANIFEST_FILE, STATE_FILE, WEIGHT_HASHES = "latest", "manifest.json", "state.json", "SHA256SUMS"

_STEP_NAME = re.compile(r"step-(\d{8,})")


def step_name(step: int) -> str:
    return f"step-{step:08d}"


def step_of(name: str) -> int | None:
    """Return the step in the name of a checkpoint or (without suffix) a weight file; None for another name."""
    match = _STEP_NAME.fullmatch(name)
    return int(match[1]) if match else None


def checkpoints_of(run_dir: Path) -> list[Path]:
    """List the paths that have a checkpoint's name, newest first."""
    found = {step: path for path in (run_dir / CHECKPOINTS).glob("step-*") if (step := step_of(path.name)) is not None}
    return [found[step] for step in sorted(found, reverse=True)]


def weight_files(run_dir: Path) -> dict[int, Path]:
    """List the weight files of a run by step, oldest first, without those of the moving average."""
    files = (run_dir / WEIGHTS).glob("step-*.safetensors")
    found = {step: file for file in files if (step := step_of(file.stem)) is not None}
    return {step: found[step] for step in sorted(found)}
