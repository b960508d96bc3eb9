"""One of two ranks of test_saving.py: saves that one rank delays, that fail on one, on a full and a read-only disk.

Usage: worker_saving.py RUN DISK OUT. DISK is a file system of 4 MiB of its own, or `-`. Each rank writes OUT/RANK.json.
"""

import json
import resource
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import safetensors.torch
import torch

from dist_transformer.base.errors import UserError
from dist_transformer.base.files import sha256_of
from dist_transformer.run.checkpoint import reader
from dist_transformer.run.checkpoint import writer as writing
from dist_transformer.run.checkpoint.reader import CheckpointReader, newest_checkpoint
from dist_transformer.run.checkpoint.state import MOMENTS, ParameterState
from dist_transformer.run.checkpoint.writer import CheckpointWriter, Retention
from dist_transformer.run.layout import step_name
from dist_transformer.runtime import distributed
from dist_transformer.runtime.process_group import process_group
from dist_transformer.runtime.world import World, read_world
from tests.support.damage import flip

FIVE_STEPS = threading.Event()
ALL = Retention(checkpoints=99, weights=99)


def states(step: int, parameters: int = 4) -> Iterator[ParameterState]:
    """4 parameters are 64 KiB, and 192 KiB with their moments."""
    for number in range(parameters):
        weight = torch.full((64, 64), float(step + number))
        yield ParameterState(name=f"p{number}", weight=weight, moments=dict.fromkeys(MOMENTS, weight / 2))


def start(writer: CheckpointWriter, step: int, parameters: int = 4) -> None:
    metadata = {"step": str(step)}
    writer.start(states(step, parameters), {"step": step}, retention=ALL, weights_metadata=metadata)


def save(writer: CheckpointWriter, step: int, parameters: int = 4) -> str:
    """Path, or error."""
    start(writer, step, parameters)
    try:
        saved = writer.wait()
        assert saved is not None
        return str(saved.path)
    except UserError as error:
        return str(error)


def slow_saves(writer: CheckpointWriter, world: World, out: Path) -> list[int]:
    """Stop rank 1 in its share until the loop has gone on for some steps; list the steps that noticed each save.

    The next save waits until the test has seen this one.
    """

    def slow(*arguments: Any, **options: Any) -> None:
        assert world.is_main or FIVE_STEPS.wait(300)
        safetensors.torch.save_file(*arguments, **options)
        time.sleep(0.3 * world.rank)

    writing.save_file = slow  # type: ignore[attr-defined]
    noticed = []
    for save_number in range(1, 5):
        FIVE_STEPS.clear()
        start(writer, save_number)
        noticed.append(train_until(writer)[0])
        while not (out / f"seen-{step_name(save_number)}").exists():
            time.sleep(0.01)
    writing.save_file = safetensors.torch.save_file  # type: ignore[attr-defined]
    return noticed


def train_until(writer: CheckpointWriter) -> tuple[int, str]:
    """Steps of a loop that has collectives of its own, until the save is done or fails; and its error."""
    for step in range(10**6):
        time.sleep(0.01)
        if step == 5:
            FIVE_STEPS.set()
        assert distributed.all_reduce_sum(torch.tensor([step])).item() == 2 * step
        try:
            if writer.poll(all_written=not any(distributed.gather_objects(writer.is_writing))) is not None:
                return step, ""
        except UserError as error:
            return step, str(error)
    raise AssertionError("no end")


def too_large_for_one(writer: CheckpointWriter, world: World) -> dict[str, Any]:
    """Rank 1 may write no file above 1,000 bytes: the error of its disk, in the middle of training."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if world.rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    start(writer, 5)
    step, message = train_until(writer)
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    return {"step": step, "message": message, "again": save(writer, 5)}


def fall_back(run: Path, world: World) -> dict[str, Any]:
    hashed: list[str] = []
    reader.sha256_of = lambda path: (hashed.append(path.name), sha256_of(path))[1]  # type: ignore[attr-defined]
    newest = newest_checkpoint(run, lambda _: None)
    shares = distributed.gather_objects(sorted(hashed))
    distributed.barrier()
    if world.is_main:
        flip(run / "checkpoints" / step_name(5) / "part-00001.safetensors")
    distributed.barrier()
    warned: list[str] = []
    older = newest_checkpoint(run, warned.append)
    assert older is not None
    weights = {name: float(CheckpointReader(older).weight(name)[0, 0]) for name in ("p0", "p1", "p2", "p3")}
    return {"newest": str(newest), "shares": shares, "older": str(older), "warned": warned, "weights": weights}


def small_disk(disk: Path, world: World) -> dict[str, Any]:
    """2.6 MiB a save: the second does not fit beside the first."""
    writer = CheckpointWriter(disk / "run")
    found: dict[str, Any] = {"first": save(writer, 1, 40), "full": save(writer, 2, 40)}
    found["left"] = sorted(str(path.relative_to(disk)) for path in disk.rglob("*") if path.is_file())
    found["older"] = str(newest_checkpoint(disk / "run", lambda _: None))
    for option, name in (("size=16m", "freed"), ("ro", "read_only"), ("rw", "writable")):
        distributed.barrier()
        if world.is_main:
            subprocess.run(["mount", "-o", f"remount,{option}", str(disk)], check=True)
        distributed.barrier()
        found[name] = save(writer, 3, 40)
    return found


def one_writer(run: Path) -> dict[str, Any]:
    """A save that rank 1 alone writes: its parts, and the weights that a reader finds."""
    writer = CheckpointWriter(run, writers=[1])
    path = Path(save(writer, 1))
    weights = {name: float(CheckpointReader(path).weight(name)[0, 0]) for name in ("p0", "p1", "p2", "p3")}
    return {"parts": sorted(part.name for part in path.glob("part-*")), "weights": weights}


def main() -> None:
    run, disk, out = (Path(argument) for argument in sys.argv[1:])
    world = read_world()
    with process_group(world, timeout_minutes=5.0):
        writer = CheckpointWriter(run)
        found: dict[str, Any] = {"slow": slow_saves(writer, world, out), "too_large": too_large_for_one(writer, world)}
        found["fall_back"] = fall_back(run, world)
        found["one_writer"] = one_writer(run.with_name("one"))
        found["disk"] = small_disk(disk, world) if disk.is_dir() else None
    (out / f"{world.rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
