"""Names of everything in a run folder.

RUN/config.json                        resolved settings, identity of the data
RUN/tokenizer.json                     the data folder's tokenizer
RUN/environment.json                   versions and hardware of each start
RUN/metrics.jsonl, RUN/ledger.jsonl    what was logged, what was trained on
RUN/checkpoints/latest                 the name of the newest checkpoint
RUN/checkpoints/step-00001000/         manifest.json, state.json, part-00000.safetensors, one part per node
RUN/weights/step-00001000.safetensors  fp32 weights alone, for averaging; ema-… if a moving average is kept
RUN/weights/SHA256SUMS                 their hashes, as `sha256sum --check` reads them
RUN/samples/, RUN/tensorboard/         translations of each validation, event files
RUN/heartbeats/, RUN/lock              what each rank is doing, which process holds the folder
RUN/hangs/                             stacks and last collectives of ranks that made no progress
"""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dist_transformer.base.files import log_lines
from dist_transformer.base.sole_writer import LOCK_FILE

SETTINGS_FILE, ENVIRONMENT_FILE = "config.json", "environment.json"
METRICS_FILE, LEDGER_FILE = "metrics.jsonl", "ledger.jsonl"
FOLDERS = ("checkpoints", "weights", "samples", "tensorboard", "heartbeats", "hangs")
CHECKPOINTS, WEIGHTS, SAMPLES, TENSORBOARD, HEARTBEATS, HANGS = FOLDERS
WRITTEN_IN_PLACE = (LOCK_FILE, METRICS_FILE, LEDGER_FILE, *FOLDERS)
"""Files and folders that a run adds to. Its other files are written under a temporary name, then renamed."""
POINTER, MANIFEST_FILE, STATE_FILE, WEIGHT_HASHES = "latest", "manifest.json", "state.json", "SHA256SUMS"

Record = dict[str, Any]
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


def each_record(path: Path) -> Iterator[tuple[str, Record | None]]:
    """Yield the lines of a `metrics.jsonl` with their records: numbers and texts by name, among them kind and step.

    The record is None for a line that is none.

    Raises:
        OSError: the file cannot be read.
    """
    for line in log_lines(path):
        try:
            record = json.loads(line)
        except ValueError:
            record = None
        is_record = isinstance(record, dict) and {"kind", "step"} <= record.keys()
        yield line, record if is_record else None


def read_records(run_dir: Path, kind: str) -> list[Record]:
    """Read the records of one kind in a run's `metrics.jsonl`, in order.

    The last line may be torn after a power loss; resuming the run removes it.

    Raises:
        OSError: the file does not exist.
        ValueError: another line is not a record.
    """
    records = list[Record]()
    for number, (line, record) in enumerate(each_record(run_dir / METRICS_FILE), 1):
        if record is None and line.endswith("\n"):
            raise ValueError(f"line {number} is not a record of a run")
        if record is not None and record["kind"] == kind:
            records.append(record)
    return records


def scan_records(path: Path, *, only: str | None = None) -> tuple[dict[str, list[Record]], tuple[int, ...]]:
    """Read the records by kind, in order of step, and the numbers of the lines that are not records.

    If a step was recorded twice, as after a resume without truncation, the later record counts.

    Args:
        only: kind to which to restrict the records.

    Raises:
        OSError: the file cannot be read.
    """
    records: dict[str, dict[int, Record]] = {}
    damaged = list[int]()
    for number, (_, record) in enumerate(each_record(path), 1):
        if record is None:
            damaged.append(number)
        elif only in (None, record["kind"]):
            records.setdefault(record["kind"], {})[record["step"]] = record
    return {kind: [steps[step] for step in sorted(steps)] for kind, steps in records.items()}, tuple(damaged)
