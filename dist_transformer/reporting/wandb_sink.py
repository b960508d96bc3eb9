"""Records of a run in Weights & Biases; `--import dist_transformer.reporting.wandb_sink` turns it on."""

import json
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dist_transformer.base.errors import UserError
from dist_transformer.base.files import write_file
from dist_transformer.config.plain import read_json
from dist_transformer.reporting.sinks import SINKS
from dist_transformer.run.folder import shareable_settings
from dist_transformer.run.layout import SETTINGS_FILE


@SINKS.register("wandb")
class WandbSink:
    """A run of Weights & Biases, which a resume of training continues. `RUN/wandb/run.json` has its id and last step.

    Its service cannot remove steps. Steps that a resume computes again, with the same result, are not sent again.
    """

    def __init__(self, run_dir: Path, continues_after: int) -> None:
        try:
            import wandb
        except ModuleNotFoundError:
            raise UserError("wandb is not installed: in the clone, pip install -e '.[wandb]'") from None
        self._file = run_dir / "wandb" / "run.json"
        is_resumed = continues_after > 0 and self._file.is_file()
        self._sent: dict[str, Any] = read_json(self._file) if is_resumed else {"id": uuid.uuid4().hex, "step": 0}
        self._known: int = self._sent["step"]
        self._run = wandb.init(
            dir=run_dir,
            name=run_dir.resolve().name,
            id=self._sent["id"],
            resume="allow",
            config=shareable_settings(read_json(run_dir / SETTINGS_FILE)),
            # Our streams stay in place.
            settings=wandb.Settings(console="off"),
        )

    def record(self, kind: str, step: int, values: Mapping[str, Any]) -> None:
        if step > self._known:
            # wandb takes steps in order only, and a save may end after a later step.
            self._sent["step"] = max(step, self._sent["step"])
            numbers = {f"{kind}/{name}": value for name, value in values.items() if isinstance(value, int | float)}
            self._run.log(numbers, step=self._sent["step"])
            write_file(self._file, json.dumps(self._sent), durable=False)

    def close(self) -> None:
        self._run.finish()
