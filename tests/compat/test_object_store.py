"""Training data in an object store whose service fails: the same run as from a folder, or one sentence and its end."""

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from dist_transformer.data.folder.reader import DataFolder
from dist_transformer.run.layout import read_records
from tests.compat.environments import extend_environment, make_environment, pinned
from tests.compat.object_store import Fault, ObjectStore, running_store
from tests.support.tiny import TINY_FLAGS

pytestmark = pytest.mark.slice(name="store")

# An epoch is about 75 steps, in four windows of one shard each: 60 steps read all four.
STEPS = 60
SMALL = (
    *TINY_FLAGS,
    *("--batch.packs-per-step", "4", "--batch.window-shards", "1", "--optimizer.warmup-steps", "10"),
    *("--validate-every", "0", "--log-every", "10", "--precision", "fp32", "--save-every", "30"),
)
# As in docs/stores.md. By default, a store that stops answering is asked again after 60 s.
PATIENCE = '{"config_kwargs": {"read_timeout": 2, "retries": {"max_attempts": 1}}}'


@pytest.fixture(scope="module")
def programs(installed: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The installed package and s3fs."""
    return extend_environment(installed, tmp_path_factory.mktemp("s3fs") / "venv", "s3fs", pinned("fsspec"))


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ObjectStore]:
    server = make_environment(tmp_path_factory.mktemp("moto") / "venv", "moto[server]", constrained=False)
    with running_store(server / "moto_server") as store:
        yield store


@pytest.fixture(scope="module")
def url(store: ObjectStore, toy_data: DataFolder) -> str:
    return store.upload(toy_data.path, "toy")


def train(
    programs: Path,
    folder: Path,
    data: object,
    *flags: object,
    store: ObjectStore | None = None,
    status: int = 0,
    cache: str = "cache",
    steps: int = STEPS,
) -> str:
    """Train in `folder`/run, with a cache beside it; give what a user sees, after which nothing of it runs any more."""
    words = [*SMALL, "--data", data, "--run-dir", "run", "--cache-dir", cache, "--max-steps", steps, *flags]
    done = subprocess.run(
        [programs / "dist-transformer", "train", *map(str, words)],
        cwd=folder,
        env={
            "HOME": os.environ["HOME"],
            "PATH": f"{programs}:/usr/bin:/bin",
            "OMP_NUM_THREADS": "1",
            **(store.environment if store else {}),
            "FSSPEC_S3": PATIENCE,
        },
        timeout=600,
        check=False,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    assert done.returncode == status, done.stdout[-4000:]
    assert not [process for process in psutil.process_iter() if works_in(process, folder)]
    return done.stdout


def works_in(process: psutil.Process, folder: Path) -> bool:
    try:
        return process.cwd() == str(folder)
    except psutil.Error:
        return False


def what_it_computed(run_dir: Path) -> tuple[bytes, list[tuple[float, ...]]]:
    """The ledger, and the figures of the metrics that do not depend on the clock."""
    names = ("step", "loss", "nll", "learning_rate", "gradient_norm", "fill")
    return (run_dir / "ledger.jsonl").read_bytes(), [
        tuple(record[name] for name in names) for record in read_records(run_dir, "train")
    ]


def unfinished(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.suffix in (".tmp", ".partial")]


@pytest.fixture(scope="module")
def from_a_folder(programs: Path, toy_data: DataFolder, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("local")
    train(programs, folder, toy_data.path)
    return folder / "run"


@pytest.mark.parametrize(("first", "then"), [("throttle", "cut"), ("change", "silence")])
def test_a_store_that_is_slow_and_fails_for_a_while_changes_nothing(
    first: Fault, then: Fault, programs: Path, store: ObjectStore, url: str, from_a_folder: Path, tmp_path: Path
) -> None:
    """The run stops in the middle and resumes with an empty cache, under another fault."""
    for fault, steps in ((first, STEPS // 2), (then, STEPS)):
        store.suffer(fault, times=1, delay_seconds=0.2)
        train(programs, tmp_path, url, store=store, cache=f"cache-{fault}", steps=steps)
        assert max(count for (_, name), count in store.requests.items() if name.startswith("train-")) == 2
    assert what_it_computed(tmp_path / "run") == what_it_computed(from_a_folder)
    assert unfinished(tmp_path) == []


@pytest.mark.parametrize(
    ("fault", "flags", "reason"),
    [
        ("throttle", (), "Service Unavailable"),
        ("cut", (), "payload"),
        ("change", ("--processes", 2), "no longer exists"),
    ],
)
def test_a_store_that_keeps_failing_ends_the_run_in_one_sentence(
    fault: Fault, flags: tuple[object, ...], reason: str, programs: Path, store: ObjectStore, url: str, tmp_path: Path
) -> None:
    store.suffer(fault)
    said = train(programs, tmp_path, url, *flags, store=store, status=1)
    assert said.count("error: ") == 1, said
    assert "Traceback" not in said
    assert reason in said
    assert ".arrow cannot be fetched after 5 attempts" in said
    assert unfinished(tmp_path) == []
    assert not list((tmp_path / "cache").rglob("train-*.arrow"))
