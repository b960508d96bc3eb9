"""Read the records in `metrics.jsonl`, for reports, averaging and planning."""

import contextlib
import json
from pathlib import Path
from typing import Any

from dist_transformer.base.files import read_log
from dist_transformer.run.layout import METRICS_FILE


def read_records(run_dir: Path, kind: str) -> list[dict[str, Any]]:
    """Read the records of one kind in a run's `metrics.jsonl`, in order.

    The last line may be torn after a power loss; resuming the run removes it.

    Raises:
        OSError: the file does not exist.
        ValueError: another line is not a record.
    """
    *lines, last = read_log(run_dir / METRICS_FILE).split("\n")
    with contextlib.suppress(ValueError, RecursionError):
        json.loads(last)
        lines.append(last)
    try:
        records = [json.loads(line) for line in lines]
    except RecursionError:
        raise ValueError("a line is nested too deeply") from None
    for number, record in enumerate(records, 1):
        if not isinstance(record, dict) or type(record.get("step")) is not int:
            raise ValueError(f"line {number} is not a record of a run")
    return [record for record in records if record.get("kind") == kind]


def scan_records(path: Path) -> tuple[dict[str, list[dict[str, Any]]], tuple[int, ...]]:
    """Read the records by kind, in order of step, and the numbers of the lines that are not records.

    If a step was recorded twice, as after a resume without truncation, the later record counts.
    """
    records: dict[str, dict[int, dict[str, Any]]] = {}
    damaged = []
    for row, line in enumerate(read_log(path).splitlines(), start=1):
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            record = None
        if isinstance(record, dict) and isinstance(record.get("kind"), str) and type(record.get("step")) is int:
            records.setdefault(record["kind"], {})[record["step"]] = record
        else:
            damaged.append(row)
    return {kind: [steps[step] for step in sorted(steps)] for kind, steps in records.items()}, tuple(damaged)
