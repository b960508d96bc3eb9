"""Find out what a run folder has lost: checkpoints, or records of its metrics."""

import os
from pathlib import Path

from dist_transformer.base.errors import UserError
from dist_transformer.config.plain import read_object
from dist_transformer.run.layout import (
    CHECKPOINTS,
    LEDGER_FILE,
    METRICS_FILE,
    POINTER,
    SETTINGS_FILE,
    WEIGHTS,
    each_record,
    step_name,
    step_of,
    weight_files,
)
from dist_transformer.run.ledger import follow_ledger


def lost_checkpoint(run_dir: Path, found: Path) -> list[str]:
    """Report if the pointer names a checkpoint that is gone and is newer than the one found."""
    pointer = run_dir / CHECKPOINTS / POINTER
    name = pointer.read_bytes().decode(errors="replace").strip() if pointer.is_file() else ""
    step, known = step_of(name), step_of(found.name) or 0
    if step is None or step <= known or os.path.lexists(pointer.with_name(name)):
        return []
    return [f"{pointer} names {name}, which is gone: every step after {known:,} is computed again"]


def require_nothing_lost(run_dir: Path) -> list[str]:
    """Refuse to start over in a run folder whose checkpoints are gone; report steps that are computed again.

    A training that was killed before its first checkpoint was complete starts over. It leaves at most one weight file,
    and then also the temporary folder of that save.

    Raises:
        UserError: a checkpoint was complete; the error names what shows it.
    """
    folder, ledger, found = run_dir / CHECKPOINTS, run_dir / LEDGER_FILE, None
    weights, metrics = weight_files(run_dir), run_dir / METRICS_FILE
    unfinished = [step for step in weights if any(folder.glob(f".{step_name(step)}.*.tmp"))]
    records = each_record(metrics) if metrics.exists() else ()
    saved = next(
        (record["step"] for _, record in records if record is not None and record["kind"] == "checkpoint"), None
    )
    steps = max((entry["step"] for entry in follow_ledger(ledger) if entry is not None), default=0)
    every = read_object(run_dir / SETTINGS_FILE).get("save_every")
    if os.path.lexists(folder / POINTER):
        found = f"{folder / POINTER} names one"
    elif weights and [*weights] != unfinished[:1]:
        found = f"{run_dir / WEIGHTS} has the weights of step {max(weights):,}"
    elif saved is not None:
        found = f"{metrics} has the save of step {saved:,}"
    elif every and steps > 2 * every:
        # The second save waits for the first.
        found = f"{ledger} has {steps:,} steps, of which every {every:,}th was saved"
    if found:
        raise UserError(
            f"{folder} holds no checkpoint, but {found}: restore the step folders, or start a new run in another "
            f"--run-dir, or after you move {run_dir} away"
        )
    return [f"{ledger} has {steps:,} steps, and none was saved: they are computed again"] if steps else []


def lost_records(run_dir: Path, step: int) -> list[str]:
    """Report if `metrics.jsonl` has lost records up to `step`. Reports need them, training does not."""
    file = run_dir / METRICS_FILE
    records = each_record(file) if file.exists() else ()
    steps = (record["step"] for _, record in records if record is not None and record["kind"] == "train")
    last = max((recorded for recorded in steps if recorded <= step), default=0)
    if last == step:
        return []
    return [f"{file} has lost the records from step {last + 1:,} to {step:,}: reports lack them"]
