"""Records of a run in Weights & Biases; `--import dist_transformer.reporting.wandb_sink` turns it on."""

import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dist_transformer.base.errors import UserError
from dist_transformer.base.files import read_small, write_file
from dist_transformer.config.plain import read_json
from dist_transformer.reporting.sinks import SINKS
from dist_transformer.run.folder import shareable_settings
from dist_transformer.run.layout import SETTINGS_FILE


@SINKS.register("wandb")
class WandbSink:
    """A run of Weights & Biases with the steps of training; a resume continues it after the checkpoint's step."""

    def __init__(self, run_dir: Path, continues_after: int) -> None:
        try:
            import wandb
        except ModuleNotFoundError:
            raise UserError("wandb is not installed: pip install 'dist_transformer[wandb]'") from None
        file = run_dir / "wandb" / "id"
        is_resumed = continues_after > 0 and file.is_file()
        name = read_small(file).decode() if is_resumed else uuid.uuid4().hex
        # What is newer than the checkpoint is removed there, as in metrics.jsonl.
        place = {"resume_from": f"{name}?_step={continues_after}"} if is_resumed else {"id": name}
        settings = shareable_settings(read_json(run_dir / SETTINGS_FILE))
        # Our streams stay in place.
        without_console = wandb.Settings(console="off")
        self._run = wandb.init(
            dir=run_dir, name=run_dir.resolve().name, config=settings, settings=without_console, **place
        )
        write_file(file, name)

    def record(self, kind: str, step: int, values: Mapping[str, Any]) -> None:
        numbers = {f"{kind}/{name}": value for name, value in values.items() if isinstance(value, int | float)}
        self._run.log(numbers, step=step)

    def close(self) -> None:
        self._run.finish()
