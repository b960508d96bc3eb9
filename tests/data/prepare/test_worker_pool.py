"""Real processes do their tasks and leave others alone; test_processes.py has errors, kills and interrupts."""

import multiprocessing
import os
import time
from pathlib import Path

import pytest

from dist_transformer.data.prepare.worker_pool import WorkerPool
from tests.data.prepare.pool_tasks import Fail, Square


def is_running(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def pids(folder: Path) -> list[int]:
    return [int(path.name) for path in folder.iterdir()]


def test_one_process_or_one_task_is_done_here(tmp_path: Path) -> None:
    seen: list[int] = []
    with WorkerPool(1) as pool:
        done = list(pool.run([Square(i, tmp_path).run for i in (3, 4)], seen.append, lambda: None))
    with WorkerPool(8) as pool:
        done += pool.run([Square(5, tmp_path).run], seen.append, lambda: None)
    assert [(index, square) for index, (square, _) in done] == [(0, 9), (1, 16), (0, 25)]
    assert seen == [3, 4, 5]
    assert pids(tmp_path) == [os.getpid()]


@pytest.mark.slow
def test_tasks_are_done_by_the_processes_that_are_free(tmp_path: Path) -> None:
    seen: list[int] = []
    with WorkerPool(2) as pool:
        first = dict(pool.run([Square(i, tmp_path).run for i in range(20)], seen.append, lambda: None))
        second = dict(pool.run([Square(i, tmp_path).run for i in (30, 31)], seen.append, lambda: None))
        assert len(pids(tmp_path)) == 2
        assert os.getpid() not in pids(tmp_path)
    assert first == {i: [i * i, "false"] for i in range(20)}
    assert second == {0: [900, "false"], 1: [961, "false"]}
    assert sorted(seen) == [*range(20), 30, 31]
    assert not any(map(is_running, pids(tmp_path)))


@pytest.mark.slow
def test_children_of_the_program_are_left_alone(tmp_path: Path) -> None:
    own = multiprocessing.get_context("spawn").Process(target=time.sleep, args=(600,))
    own.start()
    try:
        with pytest.raises(ZeroDivisionError), WorkerPool(2) as pool:
            list(pool.run([Fail(tmp_path, "sleeps").run, Fail(tmp_path, "bug").run], lambda _: None, lambda: None))
        own.join(1)
        assert own.is_alive()
    finally:
        own.kill()
