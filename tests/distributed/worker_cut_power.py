"""Trains, resumes, trains on and averages in a folder of a file system that loses its power: DATA DISK MOMENT.

MOMENT is `operation:N` (before the N-th change of a name or a file, or flush), `promise:N` (right after something is
done for the N-th time) or `never`. The file system is then shut down without a flush of its journal, and so is this
process. Prints what is done, each in a line, and at the end how many operations there were.
"""

import fcntl
import os
import struct
import sys
import threading
from pathlib import Path
from typing import Any

from dist_transformer.api import average
from dist_transformer.config.flags import parse_training
from dist_transformer.run.checkpoint.writer import Saved
from dist_transformer.runtime.process_group import process_group
from dist_transformer.runtime.world import World, read_world
from dist_transformer.training.assembly import assemble
from dist_transformer.training.trainer import Saver
from tests.jobs import SMALL

STEPS = 6
_EVENTS = {"os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.truncate"}
_WRITING = os.O_WRONLY | os.O_RDWR
# linux/fs.h: _IOR('X', 125, __u32), and the flag that leaves the journal as it is on the disk.
_SHUTDOWN, _NO_LOG_FLUSH = 0x8004587D, 2


class Disk:
    """Counts what is asked of a folder's file system, and shuts it down at the moment.

    Args:
        moment: as this program takes it.
    """

    def __init__(self, folder: Path, moment: str) -> None:
        self.folder = str(folder)
        self.what, _, number = moment.partition(":")
        self.number = int(number or 0)
        self.operations = self.promises = 0
        self._handle = os.open(folder, os.O_RDONLY)
        self._counting = threading.Lock()

    def listen(self) -> None:
        """Count from now on."""
        flush = os.fsync

        def counted(handle: int) -> None:
            self.count()
            flush(handle)

        os.fsync = counted
        sys.addaudithook(self._hear)

    def _hear(self, event: str, arguments: tuple[Any, ...]) -> None:
        writes = event == "open" and isinstance(arguments[2], int) and arguments[2] & _WRITING
        if (writes or event in _EVENTS) and str(arguments[0]).startswith(self.folder):
            self.count()

    def count(self) -> None:
        with self._counting:
            self.operations += 1
            if self.what == "operation" and self.operations == self.number:
                self.cut()

    def promise(self, what: str) -> None:
        print(f"promised {what}", flush=True)
        self.promises += 1
        if self.what == "promise" and self.promises == self.number:
            self.cut()

    def cut(self) -> None:
        fcntl.ioctl(self._handle, _SHUTDOWN, struct.pack("I", _NO_LOG_FLUSH))
        os._exit(0)


def main() -> None:
    data, folder, moment = sys.argv[1:]
    world, disk = read_world(), Disk(Path(folder), moment)
    report = Saver._report

    def promise(self: Saver, saved: Saved | None) -> None:
        report(self, saved)
        if saved is not None:
            disk.promise(f"step {saved.step}")

    Saver._report = promise  # type: ignore[method-assign]
    with process_group(world, single=True) as device:
        disk.listen()
        for steps in (2, STEPS):
            train(data, Path(folder) / "run", steps, world, device)
        average(run_dir=Path(folder) / "run", last=2, out=Path(folder) / "model")
        disk.promise("model")
    print(f"operations {disk.operations}", flush=True)


def train(data: str, run_dir: Path, steps: int, world: World, device: Any) -> None:
    flags = [*SMALL, "--validate-every", 0, "--save-every", 2, "--keep-checkpoints", 1, "--keep-weights", 2]
    words = [*flags, "--data", data, "--run-dir", run_dir, "--max-steps", steps]
    config, _ = parse_training([str(word) for word in words], prog="train")
    assert assemble(config, world, device, quiet=True).train()


if __name__ == "__main__":
    main()
