"""Real processes: they do their tasks, and none outlives an error, a kill or its parent."""

import multiprocessing
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from dist_transformer.base.errors import TransientError, UserError
from dist_transformer.data.prepare.worker_pool import WorkerPool
from tests.conftest import ROOT, allow_interrupts
from tests.data.prepare.pool_tasks import Fail, Square


def is_running(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def holds_back_interrupts(process: int) -> bool:
    (blocked,) = re.findall(r"^SigBlk:\t(\w+)$", Path(f"/proc/{process}/status").read_text(), flags=re.MULTILINE)
    return bool(int(blocked, 16) & 1 << (signal.SIGINT - 1))


def wait_for(condition: Callable[[], bool], seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited too long"
        time.sleep(0.02)


def pids(folder: Path) -> list[int]:
    return [int(path.name) for path in folder.iterdir()]


def test_one_process_or_one_task_is_done_here(tmp_path: Path) -> None:
    seen: list[int] = []
    with WorkerPool(1) as pool:
        done = list(pool.run([Square(i, tmp_path) for i in (3, 4)], seen.append, lambda: None))
    with WorkerPool(8) as pool:
        done += pool.run([Square(5, tmp_path)], seen.append, lambda: None)
    assert [(index, square) for index, (square, _) in done] == [(0, 9), (1, 16), (0, 25)]
    assert seen == [3, 4, 5]
    assert pids(tmp_path) == [os.getpid()]


@pytest.mark.slow
def test_tasks_are_done_by_the_processes_that_are_free(tmp_path: Path) -> None:
    seen: list[int] = []
    with WorkerPool(2) as pool:
        first = dict(pool.run([Square(i, tmp_path) for i in range(20)], seen.append, lambda: None))
        second = dict(pool.run([Square(i, tmp_path) for i in (30, 31)], seen.append, lambda: None))
        assert len(pids(tmp_path)) == 2
        assert os.getpid() not in pids(tmp_path)
    assert first == {i: [i * i, "false"] for i in range(20)}
    assert second == {0: [900, "false"], 1: [961, "false"]}
    assert sorted(seen) == [*range(20), 30, 31]
    assert not any(map(is_running, pids(tmp_path)))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "kind", "message"),
    [
        ("user", UserError, "^bad.en line 3 is not UTF-8$"),
        ("killed", TransientError, "a worker process was killed by signal 9, .* to resume"),
        ("bug", ZeroDivisionError, "^a bug$"),
    ],
)
def test_an_error_of_one_ends_all(tmp_path: Path, how: str, kind: type[Exception], message: str) -> None:
    started = time.monotonic()
    tasks = [Fail(tmp_path, "sleeps"), Fail(tmp_path, how)]
    with pytest.raises(kind, match=message), WorkerPool(2) as pool:
        list(pool.run(tasks, lambda _: None, lambda: None))
    assert time.monotonic() - started < 60
    assert not any(map(is_running, pids(tmp_path)))


@pytest.mark.slow
def test_children_of_the_program_are_left_alone(tmp_path: Path) -> None:
    own = multiprocessing.get_context("spawn").Process(target=time.sleep, args=(600,))
    own.start()
    try:
        with pytest.raises(ZeroDivisionError), WorkerPool(2) as pool:
            list(pool.run([Fail(tmp_path, "sleeps"), Fail(tmp_path, "bug")], lambda _: None, lambda: None))
        own.join(1)
        assert own.is_alive()
    finally:
        own.kill()


PARENT = """
import sys
from pathlib import Path
from dist_transformer.data.prepare.worker_pool import WorkerPool
from tests.data.prepare.pool_tasks import Fail

with WorkerPool(2) as pool:
    list(pool.run([Fail(Path(sys.argv[1]), "sleeps")] * 2, print, lambda: None))
"""


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_processes_end_with_their_parent(tmp_path: Path, how: signal.Signals) -> None:
    (tmp_path / "pids").mkdir()
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with (tmp_path / "err").open("w") as errors:
        parent = subprocess.Popen(
            [sys.executable, "-c", PARENT, tmp_path / "pids"],
            env=environment,
            stderr=errors,
            start_new_session=True,
            preexec_fn=allow_interrupts,  # noqa: PLW1509 - no thread runs here
        )
        try:
            wait_for(lambda: len(pids(tmp_path / "pids")) == 2)
            # They may be killed before they could say anything of Ctrl-C, so that their silence alone proves little.
            assert all(map(holds_back_interrupts, pids(tmp_path / "pids")))
            if how is signal.SIGINT:
                # As a terminal does: to the whole group.
                os.killpg(parent.pid, how)
            else:
                parent.kill()
            assert parent.wait(30) != 0
        finally:
            parent.kill()
    wait_for(lambda: not any(map(is_running, pids(tmp_path / "pids"))), seconds=10)
    assert (tmp_path / "err").read_text().count("Traceback") == (how is signal.SIGINT)
