"""Contents of a run folder for its report. Damaged records are counted, not fatal, because a killed run leaves some."""

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path, PurePath
from typing import Any

from safetensors import SafetensorError

from dist_transformer.base.errors import UserError
from dist_transformer.base.files import sha256_of
from dist_transformer.base.tensor_file import open_tensors
from dist_transformer.config.plain import read_json
from dist_transformer.data.folder.format import INDEX_FILE
from dist_transformer.evaluation.samples import SampleSheet, read_sheets
from dist_transformer.model_folder import CONFIG_FILE, WEIGHTS_FILE
from dist_transformer.run.environment import read_environments
from dist_transformer.run.layout import METRICS_FILE, SETTINGS_FILE, scan_records, weight_files


@dataclass(frozen=True, kw_only=True, slots=True)
class Identity:
    """Corpus and model of the run, as far as its folder records them."""

    corpus: str | None = None
    source_language: str | None = None
    target_language: str | None = None
    directions: tuple[str, ...] = ()
    """Names of the directions, if there are several."""
    synthetic: bool = False
    parameters: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class ScoreFile:
    """A file that dist-transformer evaluate wrote."""

    name: str
    """Path relative to the run folder."""
    modified: float
    """Time of the last change in seconds since 1970."""
    values: dict[str, Any]

    @property
    def model(self) -> str | None:
        """Name of the evaluated model folder, with the steps of its weights; None if neither is recorded."""
        folder, steps = self.values.get("model"), self.values.get("steps") or []
        # Those of an ensemble are joined.
        name = " + ".join(PurePath(each).name for each in folder.split(" + ")) if folder else ""
        mean = f"mean of {len(steps)}, steps" if len(steps) > 1 else "step"
        weights = f"{mean} {' to '.join(f'{step:,}' for step in sorted({min(steps), max(steps)}))}" if steps else ""
        return f"{name} ({weights})" if name and weights else name or weights or None

    @property
    def metrics(self) -> list[tuple[str, float, str]]:
        """Name, score and signature of each metric; `bleu`, which equals one of the others, is listed once."""
        signatures = self.values.get("signatures") or {}
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
    """Contents of config.json; empty if there is none."""
    train: list[dict[str, Any]] = field(default_factory=list)
    valid: list[dict[str, Any]] = field(default_factory=list)
    checkpoints: list[dict[str, Any]] = field(default_factory=list)
    ends: list[dict[str, Any]] = field(default_factory=list)
    damaged_lines: tuple[int, ...] = ()
    """Numbers, from 1, of lines of metrics.jsonl that are not records."""
    metrics_written: datetime | None = None
    """Time of the last change of metrics.jsonl; None if there is none."""
    identity: Identity = field(default_factory=Identity)
    sheets: list[SampleSheet] = field(default_factory=list)
    scores: list[ScoreFile] = field(default_factory=list)
    """Score files, newest first."""
    environments: list[dict[str, Any]] = field(default_factory=list)

    @property
    def newest_sheets(self) -> list[SampleSheet]:
        """Sheets of the newest validation with translations, one per direction."""
        return [sheet for sheet in self.sheets if sheet.step == self.sheets[-1].step]

    @property
    def step(self) -> int:
        """Last step with a record; 0 if there is none."""
        return max((r["step"] for r in (*self.train, *self.valid, *self.checkpoints, *self.ends)), default=0)


def number(record: dict[str, Any], name: str) -> float | None:
    """Read a finite number of a record; None if it is missing or not finite."""
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
            f"{run_dir} is not a run folder (it has no {SETTINGS_FILE} or {METRICS_FILE}): "
            "use the --run-dir of a training run"
        )
    if (run_dir / WEIGHTS_FILE).is_file():
        raise UserError(f"{run_dir} is a model folder (it has {WEIGHTS_FILE}): use the run folder that it came from")
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
    """Read the identity from the newest weights, or else from the model folder or the data folder of the run."""
    parameters = None
    described: list[dict[str, Any]] = []
    for file in list(weight_files(run_dir).values())[-1:]:
        try:
            with open_tensors(file) as weights:
                parameters = sum(math.prod(weights.get_slice(name).get_shape()) for name in weights.keys())  # noqa: SIM118
                described.append({key: json.loads(value) for key, value in (weights.metadata() or {}).items()})
        except (SafetensorError, OSError, ValueError):
            continue
    described += _read_objects([run_dir / "model" / CONFIG_FILE])
    for place, sha256 in list(zip(settings.get("data", ()), settings.get("data_sha256", ()), strict=False))[:1]:
        index = Path(place) / INDEX_FILE
        if index.is_file() and sha256_of(index) == sha256:
            described += _read_objects([index])
    known = next((values for values in described if values.get("corpus")), {})
    directions = known.get("directions") or ()
    return Identity(
        corpus=known.get("corpus"),
        source_language=known.get("source_language"),
        target_language=known.get("target_language"),
        directions=tuple(f"{way['source_language']} → {way['target_language']}" for way in directions)
        if len(directions) > 1
        else (),
        synthetic=known.get("synthetic") is True,
        parameters=parameters,
    )


def _read_objects(files: list[Path]) -> Iterator[dict[str, Any]]:
    """Yield the JSON objects among `files`; skip all other files."""
    for file in files:
        try:
            values = json.loads(file.read_bytes())
        except (OSError, ValueError):
            continue
        if isinstance(values, dict):
            yield values


def _read_scores(run_dir: Path) -> list[ScoreFile]:
    """Find the files with the keys of an evaluation in the run folder and one level below."""
    scores = []
    for file in sorted([*run_dir.glob("*.json"), *run_dir.glob("*/*.json")]):
        for values in _read_objects([file]):
            has_scores = all(number(values, name) is not None for name in ("bleu", "chrf", "ter"))
            if has_scores and "signature" in values:
                name = file.relative_to(run_dir).as_posix()
                scores.append(ScoreFile(name=name, modified=file.stat().st_mtime, values=values))
    return sorted(scores, key=lambda score: (-score.modified, score.name))
