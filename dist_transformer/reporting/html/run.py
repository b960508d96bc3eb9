"""What a run folder holds, read for its report. Damaged records are counted, not fatal: a killed run leaves some."""

import hashlib
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from dist_transformer.config.plain import read_json
from dist_transformer.data.folder.format import INDEX_FILE
from dist_transformer.errors import UserError
from dist_transformer.evaluation.samples import SampleSheet, read_sheets
from dist_transformer.files import read_small, regular
from dist_transformer.model_folder import CONFIG_FILE, WEIGHTS_FILE
from dist_transformer.run.environment import read_environments
from dist_transformer.run.layout import METRICS_FILE, SETTINGS_FILE, weight_files
from dist_transformer.run.records import scan_records


@dataclass(frozen=True, kw_only=True, slots=True)
class Identity:
    """What the run trains, as far as its folder tells."""

    corpus: str | None = None
    source_language: str | None = None
    target_language: str | None = None
    directions: tuple[str, ...] = ()
    """Their names, where there are several."""
    synthetic: bool = False
    parameters: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class ScoreFile:
    """A file that dist-transformer evaluate wrote."""

    name: str
    """Relative to the run folder."""
    modified: float
    """Seconds since 1970."""
    values: dict[str, Any]

    @property
    def metrics(self) -> list[tuple[str, float, str]]:
        """Name, score and signature of each metric; BLEU, which is one of the others as well, is named once."""
        signatures = self.values.get("signatures")
        signatures = signatures if isinstance(signatures, dict) else {}
        found: dict[tuple[float, str], str] = {}
        for name in self.values:
            value = number(self.values, name)
            if name.startswith(("bleu", "chrf", "ter")) and value is not None:
                signature = self.values["signature"] if name == "bleu" else signatures.get(name, "")
                found.setdefault((value, str(signature)), name)
        return [(name, value, signature) for (value, signature), name in found.items()]


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """Everything that the report shows."""

    name: str
    settings: dict[str, Any] = field(default_factory=dict)
    """config.json; empty when there is none."""
    train: list[dict[str, Any]] = field(default_factory=list)
    valid: list[dict[str, Any]] = field(default_factory=list)
    checkpoints: list[dict[str, Any]] = field(default_factory=list)
    ends: list[dict[str, Any]] = field(default_factory=list)
    damaged_lines: tuple[int, ...] = ()
    """Lines of metrics.jsonl, counted from 1, that are no record."""
    metrics_written: datetime | None = None
    """When metrics.jsonl last changed; None when there is none."""
    identity: Identity = field(default_factory=Identity)
    sheets: list[SampleSheet] = field(default_factory=list)
    scores: list[ScoreFile] = field(default_factory=list)
    """Newest first."""
    environments: list[dict[str, Any]] = field(default_factory=list)

    @property
    def newest_sheets(self) -> list[SampleSheet]:
        """Those of the newest validation that translated: one per direction."""
        return [sheet for sheet in self.sheets if sheet.step == self.sheets[-1].step]

    @property
    def step(self) -> int:
        """Last step of which there is a record; 0 when there is none."""
        return max((r["step"] for r in (*self.train, *self.valid, *self.checkpoints, *self.ends)), default=0)


def number(record: dict[str, Any], name: str) -> float | None:
    """A finite number of a record; None where it is missing, or was not finite when it was written."""
    value = record.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return float(value)


def load_run(run_dir: Path) -> Run:
    """Read a run folder.

    Raises:
        UserError: it is not a run folder, or its config.json or a sheet of samples cannot be read.
    """
    if not any((run_dir / name).is_file() for name in (SETTINGS_FILE, METRICS_FILE)):
        raise UserError(
            f"{run_dir} is not a run folder: it holds neither {SETTINGS_FILE} nor {METRICS_FILE}; "
            "give the --run-dir of a training"
        )
    if (run_dir / WEIGHTS_FILE).is_file():
        raise UserError(f"{run_dir} is a model folder (it has {WEIGHTS_FILE}): give the run folder that it came from")
    settings = read_json(run_dir / SETTINGS_FILE) if (run_dir / SETTINGS_FILE).is_file() else {}
    metrics = run_dir / METRICS_FILE
    records, damaged = scan_records(metrics) if metrics.is_file() else ({}, ())
    return Run(
        name=run_dir.resolve().name,
        settings=settings,
        train=records.get("train", []),
        valid=records.get("valid", []),
        checkpoints=records.get("checkpoint", []),
        ends=records.get("end", []),
        damaged_lines=damaged,
        metrics_written=datetime.fromtimestamp(metrics.stat().st_mtime, UTC) if metrics.is_file() else None,
        identity=_identify(run_dir, settings),
        sheets=read_sheets(run_dir),
        scores=_read_scores(run_dir),
        environments=read_environments(run_dir),
    )


def _identify(run_dir: Path, settings: dict[str, Any]) -> Identity:
    """From the newest weights; what they cannot say, from the model folder or the data folder of the run."""
    parameters = None
    described: list[dict[str, Any]] = []
    for file in list(weight_files(run_dir).values())[-1:]:
        try:
            with safe_open(regular(file), framework="numpy") as weights:
                parameters = sum(math.prod(weights.get_slice(name).get_shape()) for name in weights.keys())  # noqa: SIM118
                described.append({key: json.loads(value) for key, value in (weights.metadata() or {}).items()})
        except (SafetensorError, OSError, ValueError, RecursionError):
            continue
    described += _read_objects([run_dir / "model" / CONFIG_FILE])
    places, hashes = settings.get("data"), settings.get("data_sha256")
    if isinstance(places, list) and isinstance(hashes, list) and places and hashes:
        index = Path(str(places[0])) / INDEX_FILE
        if index.is_file() and hashlib.sha256(read_small(index)).hexdigest() == hashes[0]:
            described += _read_objects([index])
    known = next((values for values in described if isinstance(values.get("corpus"), str)), {})
    return Identity(
        corpus=known.get("corpus"),
        source_language=known.get("source_language"),
        target_language=known.get("target_language"),
        directions=_direction_names(known.get("directions")),
        synthetic=known.get("synthetic") is True,
        parameters=parameters,
    )


def _direction_names(stated: Any) -> tuple[str, ...]:
    """Of what a weight file or a model folder states of its directions."""
    known = [way for way in stated if isinstance(way, dict)] if isinstance(stated, list) and len(stated) > 1 else []
    return tuple(f"{way.get('source_language')} → {way.get('target_language')}" for way in known)


def _read_objects(files: list[Path]) -> Iterator[dict[str, Any]]:
    """The JSON objects among `files`; others are not ours to complain of."""
    for file in files:
        try:
            values = json.loads(read_small(file))
        except (OSError, ValueError, RecursionError):
            continue
        if isinstance(values, dict):
            yield values


def _read_scores(run_dir: Path) -> list[ScoreFile]:
    """Files of the run folder, and one level below, that hold the keys of an evaluation."""
    scores = []
    for file in sorted([*run_dir.glob("*.json"), *run_dir.glob("*/*.json")]):
        for values in _read_objects([file]):
            has_scores = all(number(values, name) is not None for name in ("bleu", "chrf", "ter"))
            if has_scores and isinstance(values.get("signature"), str):
                name = file.relative_to(run_dir).as_posix()
                scores.append(ScoreFile(name=name, modified=file.stat().st_mtime, values=values))
    return sorted(scores, key=lambda score: (-score.modified, score.name))
