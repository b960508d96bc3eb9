"""Saves of two real ranks, in one launch: one is slow, one fails, a disk is full; and who watches the pointer."""

import itertools
import json
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dist_transformer.run.checkpoint.reader import checkpoint_problem
from tests.conftest import begin_ranks

pytestmark = pytest.mark.slow

RESULTS = list[dict[str, Any]]


@pytest.fixture(scope="module")
def disk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path | None]:
    """A file system of 4 MiB; None where we may not mount one."""
    place = tmp_path_factory.mktemp("disk")
    options = ["-t", "tmpfs", "-o", "size=4m", "tmpfs", str(place)]
    if subprocess.run(["mount", *options], check=False, capture_output=True).returncode != 0:
        yield None
        return
    yield place
    subprocess.run(["umount", str(place)], check=True)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("saving") / "run"


@pytest.fixture(scope="module")
def watched() -> dict[str, str | None]:
    """The checkpoints that `latest` has named, and the problem of each."""
    return {}


@pytest.fixture(scope="module")
def results(run: Path, disk: Path | None, watched: dict[str, str | None]) -> RESULTS:
    worker = ("-m", "tests.distributed.worker_saving", run, disk or "-", run.parent)
    pointer = run / "checkpoints" / "latest"
    ranks = begin_ranks(range(2), *worker, output=run.parent / "output")
    try:
        while ranks[0].poll() is None:
            # The last save's files are damaged on purpose; it waits until the one before was seen.
            if pointer.exists() and "step-00000004\n" not in watched:
                name = pointer.read_text()
                watched[name] = watched.get(name) or checkpoint_problem(pointer.with_name(name.strip()))
                (run.parent / f"seen-{name.strip()}").touch()
            time.sleep(0.002)
        assert [rank.wait(timeout=600) for rank in ranks] == [0, 0]
    finally:
        for rank in ranks:
            rank.kill()
    return [json.loads((run.parent / f"{rank}.json").read_text()) for rank in range(2)]


def test_the_pointer_names_only_whole_checkpoints(results: RESULTS, watched: dict[str, str | None]) -> None:
    assert watched.keys() == {f"step-0000000{number}\n" for number in range(1, 5)}
    assert set(watched.values()) == {None}


def test_training_continues_while_a_slow_rank_saves(results: RESULTS) -> None:
    assert results[0]["slow"] == results[1]["slow"]
    assert all(step > 3 for step in results[0]["slow"])


def test_an_error_on_one_rank_ends_all_at_the_same_step(results: RESULTS, run: Path) -> None:
    found = [result["too_large"] for result in results]
    assert found[0] == found[1]
    assert found[0]["message"].startswith("cannot write the checkpoint (")
    assert "too large" in found[0]["message"]
    assert found[0]["message"].endswith(": free space or fix the folder; older checkpoints are intact")
    assert found[0]["again"] == str(run / "checkpoints" / "step-00000005")
    assert not [path for path in run.rglob("*") if path.name.endswith(".tmp")]


def test_all_ranks_share_the_hashing_and_fall_back_together(results: RESULTS, run: Path) -> None:
    found = [result["fall_back"] for result in results]
    assert found[0] == found[1]
    folder = run / "checkpoints"
    assert found[0]["newest"] == str(folder / "step-00000005")
    assert sorted(len(share) for share in found[0]["shares"]) == [1, 2]
    assert sorted(itertools.chain(*found[0]["shares"])) == [
        "part-00000.safetensors",
        "part-00001.safetensors",
        "state.json",
    ]
    assert found[0]["older"] == str(folder / "step-00000004")
    part = folder / "step-00000005" / "part-00001.safetensors"
    assert found[0]["warned"] == [
        f"{part} is damaged (its size or SHA-256 is not what the manifest states): it is not used",
        f"falling back to {folder / 'step-00000004'}: every step after 4 is computed again",
    ]
    assert found[0]["weights"] == {"p0": 4.0, "p1": 5.0, "p2": 6.0, "p3": 7.0}


def test_a_rank_that_is_no_writer_writes_no_part(results: RESULTS) -> None:
    expected = {"parts": ["part-00001.safetensors"], "weights": {"p0": 1.0, "p1": 2.0, "p2": 3.0, "p3": 4.0}}
    assert results[0]["one_writer"] == results[1]["one_writer"] == expected


def test_a_full_and_a_read_only_disk(results: RESULTS, disk: Path | None) -> None:
    if disk is None:
        pytest.skip("no file system can be mounted here: run as root")
    found = results[0]["disk"]
    assert found == results[1]["disk"]
    first = disk / "run" / "checkpoints" / "step-00000001"
    assert (found["first"], found["older"]) == (str(first), str(first))
    for name, reason in (("full", "No space left on device"), ("read_only", "Read-only file system")):
        assert found[name].startswith("cannot write the checkpoint (")
        assert reason in found[name]
    names = ("manifest.json", "part-00000.safetensors", "part-00001.safetensors", "state.json")
    assert found["left"] == [
        "run/checkpoints/latest",
        *(f"run/checkpoints/step-00000001/{name}" for name in names),
        "run/weights/SHA256SUMS",
        "run/weights/step-00000001.safetensors",
    ]
    assert found["freed"] == found["writable"] == str(first.with_name("step-00000003"))
