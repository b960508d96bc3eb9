"""Contents of a run folder for its report. Damaged records are counted, not fatal, because a killed run leaves some."""

import json
import math
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path, PurePath, PurePosixPath
from typing import Any

from safetensors import SafetensorError

from dist_transformer.base.errors import UserError
from dist_transformer.base.files import sha256_of
from dist_transformer.base.tensor_file import open_tensors
from dist_transformer.base.urls import without_secrets
from dist_transformer.config.plain import read_json, read_object
from dist_transformer.data.folder.format import INDEX_FILE
from dist_transformer.evaluation.samples import SampleSheet, read_sheets
from dist_transformer.model_folder import CONFIG_FILE, WEIGHTS_FILE
from dist_transformer.run.environment import read_environments
from dist_transformer.run.layout import METRICS_FILE, SAMPLES, SETTINGS_FILE, scan_records, weight_files

# Rows of the table that shows one sentence over the run.
_ROWS = 10
_NOTHING = "(nothing)"
_METRICS = {
    "bleu": "BLEU",
    "bleu_cased": "BLEU, case counts",
    "bleu_lowercase": "BLEU, case ignored",
    "bleu_tokenized": "BLEU, tokenised by Moses",
    "bleu_compound_split": "BLEU, tokenised, hyphens split",
    "chrf": "chrF",
    "chrf_pp": "chrF++",
    "ter": "TER (lower is better)",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class ScoreFile:
    """A file that dist-transformer evaluate wrote."""

    name: str
    """Path relative to the run folder."""
    values: dict[str, Any]

    @property
    def model(self) -> str:
        """Name of the evaluated model folder, with the steps of its weights, as far as they are recorded."""
        folder, steps = self.values.get("model"), self.values.get("steps") or []
        # Those of an ensemble are joined.
        name = " + ".join(PurePath(each).name for each in folder.split(" + ")) if folder else ""
        mean = f"mean of {len(steps)}, steps" if len(steps) > 1 else "step"
        weights = f"{mean} {' to '.join(f'{step:,}' for step in sorted({min(steps), max(steps)}))}" if steps else ""
        return f"{name} ({weights})" if name and weights else name or weights

    @property
    def row(self) -> tuple[str, ...]:
        """Cells of the table that compares files."""
        sentences = self.values.get("sentences")
        counted = "" if sentences is None else f"{sentences:,.0f}"
        scores = (f"{self.values[name]:.2f}" for name in ("bleu", "chrf", "ter"))
        return self.model, self.name, counted, *scores, self.values["signature"]

    @property
    def metrics(self) -> list[tuple[str, str, str]]:
        """Label, score and signature of each metric; `bleu`, which equals one of the others, is listed once."""
        signatures = {**(self.values.get("signatures") or {}), "bleu": self.values["signature"]}
        found: dict[tuple[float, str], str] = {}
        for name, label in _METRICS.items():
            if (value := self.values.get(name)) is not None:
                found.setdefault((value, str(signatures.get(name, ""))), label)
        return [(label, f"{value:.2f}", signature) for (value, signature), label in found.items()]

    @property
    def facts(self) -> str:
        """List what is known about the evaluation."""
        values = self.values
        sentences, split, seconds, ranks = (
            values.get(name) for name in ("sentences", "split_sentences", "seconds", "world_size")
        )
        facts = (
            f"model: {self.model}" if self.model else "",
            f"{sentences:,.0f} sentences" if sentences is not None else "",
            f"{split:,.0f} of them split" if split else "",
            f"decoded in {seconds:,.1f} s" if seconds is not None else "",
            f"on {ranks:,.0f} rank(s)" if ranks else "",
            f"hypotheses in {shown(values['hypotheses'])}" if values.get("hypotheses") else "",
            "synthetic corpus" if values.get("synthetic") is True else "",
        )
        return ", ".join(fact for fact in facts if fact)


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
    identity: dict[str, Any] = field(default_factory=dict)
    """Corpus, languages and directions, as the folder of a model or of data has them; empty if they are unknown."""
    parameters: int | None = None
    sheets: list[SampleSheet] = field(default_factory=list)
    scores: list[ScoreFile] = field(default_factory=list)
    """Score files, newest first."""
    environments: list[dict[str, Any]] = field(default_factory=list)

    @property
    def newest_sheets(self) -> list[SampleSheet]:
        """Sheets of the newest validation with translations, one per direction."""
        return [sheet for sheet in self.sheets if sheet.step == self.sheets[-1].step]

    def languages(self, sheet: SampleSheet) -> tuple[str | None, str | None]:
        """Return the languages of the sources and of the targets of a sheet."""
        if sheet.direction is None:
            return self.identity.get("source_language"), self.identity.get("target_language")
        return sheet.source_language, sheet.target_language

    def texts(self, sheet: SampleSheet) -> list[tuple[str, str, str]]:
        """List source, reference and hypothesis of each sample."""
        return [(sample.source, sample.reference, sample.hypothesis or _NOTHING) for sample in sheet.samples]

    def history(self, newest: SampleSheet) -> list[tuple[str, str, str]]:
        """List step, BLEU and hypothesis of the first sentence of a sheet, spread over the run, oldest first."""
        of_direction = [sheet for sheet in self.sheets if sheet.direction == newest.direction]
        source = newest.samples[0].source
        found = [(sheet, s.hypothesis) for sheet in of_direction for s in sheet.samples if s.source == source]
        if len(found) > _ROWS:
            found = [found[round(place * (len(found) - 1) / (_ROWS - 1))] for place in range(_ROWS)]
        return [(f"{sheet.step:,}", f"{sheet.bleu:.1f}", text or _NOTHING) for sheet, text in found]

    @property
    def step(self) -> int:
        """Last step with a record; 0 if there is none."""
        return max((r["step"] for r in (*self.train, *self.valid, *self.checkpoints, *self.ends)), default=0)


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
    identity, parameters = _identify(run_dir, settings)
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
        identity=identity,
        parameters=parameters,
        sheets=read_sheets(run_dir),
        scores=read_scores(run_dir),
        environments=read_environments(run_dir),
    )


def _identify(run_dir: Path, settings: dict[str, Any]) -> tuple[dict[str, Any], int | None]:
    """Read identity and parameters from the newest weights, or else the identity of the model or data folder."""
    described: list[dict[str, Any]] = []
    parameters = None
    for file in list(weight_files(run_dir).values())[-1:]:
        with suppress(SafetensorError, OSError, ValueError), open_tensors(file) as weights:
            parameters = sum(math.prod(weights.get_slice(name).get_shape()) for name in weights.keys())  # noqa: SIM118
            described.append({key: json.loads(value) for key, value in (weights.metadata() or {}).items()})
    described.append(read_object(run_dir / "model" / CONFIG_FILE))
    for place, sha256 in list(zip(settings.get("data", ()), settings.get("data_sha256", ()), strict=False))[:1]:
        index = Path(place) / INDEX_FILE
        if index.is_file() and sha256_of(index) == sha256:
            described.append(read_object(index))
    return next((values for values in described if values.get("corpus")), {}), parameters


def read_scores(run_dir: Path) -> list[ScoreFile]:
    """Find the files with the keys of an evaluation in the run folder and one level below, newest first."""
    scores = []
    for file in (*run_dir.glob("*.json"), *run_dir.glob("*/*.json")):
        values = read_object(file)
        has_scores = all(values.get(name) is not None for name in ("bleu", "chrf", "ter", "signature"))
        # Samples of a validation have scores, too.
        if has_scores and file.parent.name != SAMPLES:
            name = file.relative_to(run_dir).as_posix()
            scores.append((-file.stat().st_mtime, name, ScoreFile(name=name, values=values)))
    return [file for _, _, file in sorted(scores, key=lambda score: score[:2])]


def shown(value: Any) -> str:
    """Format a setting: `/home/me/data/wmt` → `…/wmt`; no secrets of a URL, and no folders of the machine."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, list):
        return ", ".join(map(shown, value)) or "none"
    if not isinstance(value, str):
        return str(value)
    return f"…/{PurePosixPath(value).name}" if PurePosixPath(value).is_absolute() else without_secrets(value)
