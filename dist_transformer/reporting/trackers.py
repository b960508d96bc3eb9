"""Services that record runs, by the names of `--sinks`: Weights & Biases, and MLflow."""

import json
import os
import uuid
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from dist_transformer.base.errors import UserError
from dist_transformer.base.files import make_folder, write_file
from dist_transformer.config.plain import read_json
from dist_transformer.reporting.sinks import MetricSink
from dist_transformer.run.folder import shareable_settings
from dist_transformer.run.layout import SETTINGS_FILE


class _Tracker:
    """A run of a service, which a resume of training continues. `RUN/NAME/run.json` has its id and last step.

    The services cannot remove steps. Steps that a resume computes again, with the same result, are not sent again.
    """

    name: str

    def __init__(self, run_dir: Path, continues_after: int) -> None:
        self._file = run_dir / self.name / "run.json"
        is_resumed = continues_after > 0 and self._file.is_file()
        self._sent: dict[str, Any] = read_json(self._file) if is_resumed else {"id": None, "step": 0}
        self._known: int = self._sent["step"]
        self._settings = shareable_settings(read_json(run_dir / SETTINGS_FILE))

    def record(self, kind: str, step: int, values: Mapping[str, Any]) -> None:
        if step > self._known:
            # A save may end after a later step.
            self._sent["step"] = max(step, self._sent["step"])
            self._send({f"{kind}/{name}": value for name, value in values.items() if isinstance(value, int | float)})
            write_file(self._file, json.dumps(self._sent), durable=False)

    def _send(self, numbers: dict[str, float]) -> None:
        """Send the numbers of `self._sent["step"]`; wandb takes steps in order only."""
        raise NotImplementedError


class WandbSink(_Tracker):
    """A run of Weights & Biases."""

    name = "wandb"

    def __init__(self, run_dir: Path, continues_after: int) -> None:
        wandb = _installed(self.name)
        super().__init__(run_dir, continues_after)
        self._sent["id"] = self._sent["id"] or uuid.uuid4().hex
        self._run = wandb.init(
            dir=run_dir,
            name=run_dir.resolve().name,
            id=self._sent["id"],
            resume="allow",
            config=self._settings,
            # Our streams stay in place.
            settings=wandb.Settings(console="off"),
        )

    def _send(self, numbers: dict[str, float]) -> None:
        self._run.log(numbers, step=self._sent["step"])

    def close(self) -> None:
        self._run.finish()


class MlflowSink(_Tracker):
    """A run of MLflow, in `RUN/mlflow` unless MLFLOW_TRACKING_URI names a server."""

    name = "mlflow"

    def __init__(self, run_dir: Path, continues_after: int) -> None:
        self._mlflow = _installed(self.name)
        super().__init__(run_dir, continues_after)
        make_folder(self._file.parent)
        if "MLFLOW_TRACKING_URI" not in os.environ:
            # Newer versions demand it for files; the other stores of this machine need the whole of MLflow.
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
            self._mlflow.set_tracking_uri((self._file.parent / "runs").resolve().as_uri())
        run = self._mlflow.start_run(run_id=self._sent["id"], run_name=run_dir.resolve().name)
        if self._sent["id"] is None:
            self._mlflow.log_params(self._settings)
        self._sent["id"] = run.info.run_id

    def _send(self, numbers: dict[str, float]) -> None:
        self._mlflow.log_metrics(numbers, step=self._sent["step"])

    def close(self) -> None:
        self._mlflow.end_run()


TRACKERS: dict[str, Callable[[Path, int], MetricSink]] = {"wandb": WandbSink, "mlflow": MlflowSink}
"""Sinks of the package by the names of `--sinks`."""


def _installed(name: str) -> Any:
    """Import a library of a service.

    Raises:
        UserError: it is not installed.
    """
    try:
        return import_module(name)
    except ModuleNotFoundError:
        raise UserError(f"{name} is not installed: in the clone, pip install -e '.[{name}]'") from None
