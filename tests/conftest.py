"""Fixtures that several tests share: a small prepared corpus, the real corpora where they exist, and launches."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

# Many small tensors on few cores: threads would wait for each other longer than they compute. Before torch is loaded.
os.environ.setdefault("OMP_NUM_THREADS", "1")

from dist_transformer.data.folder.reader import DataFolder
from dist_transformer.runtime.launch import RANK_VARIABLES, deepspeed_command
from tests.rights import umask
from tests.small_model import model_folder, model_info, random_model, toy_lines, toy_tokenizer
from tests.variants import distant, registrations

__all__ = [
    "deepspeed_command",
    "distant",
    "model_folder",
    "model_info",
    "random_model",
    "registrations",
    "toy_lines",
    "toy_tokenizer",
    "umask",
]

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="session")
def toy_data(tmp_path_factory: pytest.TempPathFactory) -> DataFolder:
    """2,000 synthetic pairs in four shards, 400 entries of vocabulary, raw text in `text/`."""
    path = tmp_path_factory.mktemp("toy") / "data"
    tool = [sys.executable, str(ROOT / "tools" / "prepare_data.py")]
    sizes = ["--toy", "2000", "--vocab-size", "400", "--pairs-per-shard", "500"]
    subprocess.run([*tool, *sizes, "--out", str(path)], check=True, capture_output=True)
    return DataFolder.open(path)


@pytest.fixture(scope="session")
def corpora() -> Path:
    """The folder of real corpora; a test that asks for it is skipped where there is none."""
    path = Path(os.environ.get("DIST_TRANSFORMER_DATA", ROOT.parent / "shared" / "data"))
    if not path.is_dir():
        pytest.skip(f"no corpora at {path}: set DIST_TRANSFORMER_DATA")
    return path


def allow_interrupts() -> None:
    """Let Ctrl-C end a child (its `preexec_fn`), although a process in the background of a shell ignores it."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def run_command(*command: object, status: int = 0, timeout: float = 600) -> str:
    """Run a command as a user would, from the repository root; gives its output, standard error included."""
    # This process may hold a group of its own.
    no_rank = {name: value for name, value in os.environ.items() if name not in RANK_VARIABLES}
    done = subprocess.run(
        [str(word) for word in command],
        cwd=ROOT,
        env={**no_rank, "DS_ACCELERATOR": "cpu"},
        timeout=timeout,
        check=False,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    assert done.returncode == status, f"status {done.returncode}, wanted {status}:\n{done.stdout[-4000:]}"
    return done.stdout
