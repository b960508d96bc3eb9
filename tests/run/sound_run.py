"""A sound run folder, to be damaged in one place at a time."""

import json
import shutil
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from dist_transformer.base.files import sha256_of
from dist_transformer.data.loading.packing import LeftOut
from dist_transformer.run.verify import verify_run
from tests.run.small_run import SmallRun, small_config

NEWEST = "checkpoints/step-00000004"
LEFT_OUT = LeftOut(corpus=0, shard=1, epoch=0, window=0, packs=0)
PART, WEIGHTS = f"{NEWEST}/part-00000.safetensors", "weights/step-00000004.safetensors"


@pytest.fixture(scope="session")
def sound_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    data = tmp_path_factory.mktemp("data")
    return make_run(data.with_name("sound run"), data)


def make_run(path: Path, data: Path) -> Path:
    """Five steps, saved after two and four of them; the third went without a shard."""
    config = small_config(data.parent, data_name=data.name, run_dir=path)
    with ExitStack() as held:
        run = SmallRun(config, held, keep=9)
        run.train(2)
        run.save()
        run.train(1, (LEFT_OUT,))
        run.train(1)
        run.save()
        run.train(1)
        run.reporter.close()
    return path


@pytest.fixture
def run(sound_run: Path, tmp_path: Path) -> Path:
    """One to damage."""
    return Path(shutil.copytree(sound_run, tmp_path / "a run"))


def failures(run: Path) -> dict[str, str]:
    return {check.name: check.found for check in verify_run(run) if not check.passed}


def edit_json(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def seal(checkpoint: Path) -> None:
    """State in the manifest what is there, as a faulty writer would."""
    files = {
        file.name: {"bytes": file.stat().st_size, "sha256": sha256_of(file)}
        for file in checkpoint.iterdir()
        if file.name != "manifest.json"
    }
    edit_json(checkpoint / "manifest.json", files=files)
