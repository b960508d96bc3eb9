"""Preparations as a user starts them: on several processes, under mpirun, killed, interrupted, in a terminal."""

import fcntl
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from tests.commands import Begun
from tests.conftest import ROOT, allow_interrupts, begin_python, scratch_folder
from tests.data.prepare.preparing import files_of

MPIRUN = Path(sys.executable).parent / "mpirun"
MESSAGE = "interrupted: run the same command again to resume\n"

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four pairs of files, 1,200 pairs in all: each file is a chunk, and each pair nearly a shard of its own."""
    folder = tmp_path_factory.mktemp("text")
    for part in range(4):
        numbers = range(part * 300, part * 300 + 300)
        (folder / f"p{part}.en").write_text("".join(f"word number {i} is here\n" for i in numbers))
        (folder / f"p{part}.de").write_text("".join(f"Wort Nummer {i} ist da\n" for i in numbers))
    return folder


def words(text: Path, out: Path, *more: object) -> list[str]:
    files = ["--src", text / "p*.en", "--tgt", text / "p*.de", "--vocab-size", 400, "--pairs-per-shard", 4]
    return [str(word) for word in (ROOT / "tools/prepare_data.py", *files, "--out", out, *more)]


def start(command: list[str], launcher: Sequence[str] = ()) -> Begun | subprocess.Popen[str]:
    if not launcher:
        folder = scratch_folder()
        return begin_python(*command, output=folder / "output", errors=folder / "errors")
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(
        [*launcher, sys.executable, *command],
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
        preexec_fn=allow_interrupts,  # noqa: PLW1509 - no thread runs here
    )


def finish(process: Begun | subprocess.Popen[str]) -> tuple[int | None, str, str]:
    output, errors = process.communicate(timeout=600)
    return process.returncode, output, errors


def wait_for(condition: Callable[[], object]) -> None:
    end = time.monotonic() + 600
    while not condition():
        assert time.monotonic() < end, "waited too long"
        time.sleep(0.005)


def made(out: Path, pattern: str) -> dict[int, str]:
    """Files in the work folder: their inodes, which a file that is only renamed keeps."""
    found = {}
    for path in (out.parent / f".{out.name}.partial").glob(f"*/{pattern}"):
        with_inode = path.stat().st_ino if path.exists() else None
        if with_inode is not None:
            found[with_inode] = path.name
    return found


def children(process: int) -> list[int]:
    """Workers, found by their command line."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(path.read_text().rpartition(")")[2].split()[1])
            line = (path.parent / "cmdline").read_text()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if parent == process and "spawn_main" in line:
            found.append(int(path.parent.name))
    return found


@pytest.fixture(scope="module")
def straight(text: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """Return the files that one process makes without interruption."""
    out = tmp_path_factory.mktemp("straight") / "out"
    status, output, errors = finish(start(words(text, out, "--workers", 1)))
    assert (status, errors) == (0, "")
    assert "read: 300 pairs from p0.en + p0.de\nread: 300 pairs from p1.en + p1.de\n" in output
    files = files_of(out)
    assert len([name for name in files if name.startswith("train-")]) > 200
    return files


def test_any_number_of_processes_makes_the_same_folder(text: Path, straight: dict[str, bytes], tmp_path: Path) -> None:
    status, output, errors = finish(start(words(text, tmp_path / "out", "--workers", 3)))
    assert (status, errors) == (0, "")
    assert files_of(tmp_path / "out") == straight
    assert output.count("read: 300 pairs") == 4
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_an_error_in_a_process_is_said_once_and_leaves_nothing(text: Path, tmp_path: Path) -> None:
    for path in text.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    with (tmp_path / "p2.de").open("ab") as file:
        file.write(b"Gr\xfcn\n")
    (tmp_path / "out").mkdir()
    expected = f"error: {tmp_path}/p2.de line 301 is not UTF-8 (byte 0xfc at position 2): convert it from its "
    for launcher, workers in (([], 1), ([], 2), ([str(MPIRUN), "-n", "2"], 1)):
        command = words(tmp_path, tmp_path / "out/data", "--workers", workers)
        status, _, errors = finish(start(command, launcher))
        assert (status, errors.count("\n")) == (1, 1)
        assert errors.startswith(expected)
        assert list((tmp_path / "out").iterdir()) == []


def test_killed_again_and_again_it_resumes(text: Path, straight: dict[str, bytes], tmp_path: Path) -> None:
    out = tmp_path / "out"
    # A file of a source, of ids, and some shards, each written by one of two processes: then the parent is killed.
    for pattern, count in (("text-*.arrow", 1), ("ids-*.arrow", 1), ("shard-*.arrow", 20), ("shard-*.arrow", 120)):
        process = start(words(text, out, "--workers", 2))
        wait_for(lambda pattern=pattern, count=count: len(made(out, pattern)) >= count)
        workers = children(process.pid)
        process.kill()
        finish(process)
        wait_for(lambda workers=workers: not any(Path(f"/proc/{worker}").exists() for worker in workers))
        assert not out.exists()
    kept = made(out, "shard-*.arrow")
    assert len(kept) >= 120
    other = finish(start(words(text, out, "--workers", 1)))
    assert other[0] == 0, other
    assert f"resuming the interrupted preparation in {tmp_path}/.out.partial\n" in other[1]
    assert files_of(out) == straight
    # Of the last task that was begun only the results are missing: its shards are written again.
    inodes = {path.stat().st_ino for path in out.glob("train-*.arrow")}
    assert len(inodes & kept.keys()) >= len(kept) - 2 * 5
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize(("how", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_interrupted_it_reports_that_the_same_command_resumes(
    text: Path, straight: dict[str, bytes], tmp_path: Path, how: signal.Signals, status: int
) -> None:
    out = tmp_path / "out"
    process = start(words(text, out, "--workers", 2))
    wait_for(lambda: len(made(out, "shard-*.arrow")) >= 10)
    workers = children(process.pid)
    assert len(workers) == 2
    if how is signal.SIGINT:
        # While it runs, another of the same folder is refused. Stopped, it does not finish meanwhile.
        os.killpg(process.pid, signal.SIGSTOP)
        refused = finish(start(words(text, out, "--workers", 1)))
        os.killpg(process.pid, signal.SIGCONT)
        assert (refused[0], refused[1]) == (1, "")
        assert refused[2].startswith(f"error: {out} is being prepared by another command (process {process.pid} on ")
    os.killpg(process.pid, how)
    done = finish(process)
    assert (done[0], done[2]) == (status, MESSAGE)
    assert not any(Path(f"/proc/{worker}").exists() for worker in workers)
    # Other settings discard what there is.
    (before,) = {path.parent for path in (tmp_path / ".out.partial").glob("*/results")}
    process = start(words(text, tmp_path / "out", "--workers", 1, "--seed", 2))
    wait_for(lambda: not before.exists() and made(out, "shard-*.arrow"))
    process.kill()
    assert "discarded: an interrupted preparation in " in finish(process)[1]
    assert finish(start(words(text, out, "--workers", 2)))[0] == 0
    assert files_of(out) == straight


def test_a_killed_worker_ends_the_preparation_and_loses_no_work(
    text: Path, straight: dict[str, bytes], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    process = start(words(text, out, "--workers", 2))
    wait_for(lambda: len(made(out, "shard-*.arrow")) >= 10)
    workers = children(process.pid)
    os.kill(workers[0], signal.SIGKILL)
    status, _, errors = finish(process)
    assert status == 1
    assert re.fullmatch("error: a worker process was killed by signal 9, .*: run the same command again.*\n", errors)
    assert not any(Path(f"/proc/{worker}").exists() for worker in workers)
    assert len(made(out, "shard-*.arrow")) >= 10
    assert finish(start(words(text, out)))[0] == 0
    assert files_of(out) == straight


def test_under_mpirun(text: Path, straight: dict[str, bytes], tmp_path: Path) -> None:
    launcher = [str(MPIRUN), "-n", "2"]
    status, output, errors = finish(start(words(text, tmp_path / "whole", "--workers", 1), launcher))
    assert (status, errors) == (0, "")
    assert output.count("read: 300 pairs") == 4
    assert output.count("wrote: ") == 1
    assert files_of(tmp_path / "whole") == straight

    # A rank is killed: the launcher ends the others, and the same command resumes without it, too.
    out = tmp_path / "out"
    process = start(words(text, out, "--workers", 1), launcher)
    wait_for(lambda: len(made(out, "shard-*.arrow")) >= 10)
    (rank, *_) = [
        int(path.parent.name)
        for path in Path("/proc").glob("[0-9]*/cmdline")
        if path.read_bytes().startswith(f"{sys.executable}\0{ROOT}/tools/prepare_data.py\0".encode())
        and str(out).encode() in path.read_bytes()
    ]
    os.kill(rank, signal.SIGKILL)
    assert finish(process)[0] != 0
    assert finish(start(words(text, out, "--workers", 2)))[0] == 0
    assert files_of(out) == straight


def test_a_terminal_shows_bars_that_fit(text: Path, tmp_path: Path) -> None:
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    command = [sys.executable, *words(text, tmp_path / "out", "--workers", 2)]
    process = subprocess.Popen(command, env={**os.environ, "PYTHONPATH": str(ROOT)}, stdout=theirs, stderr=theirs)
    os.close(theirs)
    shown = b""
    while True:
        try:
            shown += os.read(ours, 65_536)
        except OSError:  # the terminal is closed when its last user ends
            break
    os.close(ours)
    assert process.wait(30) == 0
    lines = re.split("[\r\n]+", re.sub(r"\x1b\[[0-9]*[A-Z]", "", shown.decode()))
    bars = [line for line in lines if "[" in line and line.startswith(("read", "look", "encode", "write"))]
    assert {line.partition(":")[0] for line in bars if "pairs" in line or "shards" in line} == {
        "read",
        "look",
        "encode",
        "write",
    }
    assert any(re.match(r"write: +\d+%\|", line) for line in bars)
    assert max(map(len, bars)) <= 80
    # The lines of the report stand alone.
    assert "read: 300 pairs from p3.en + p3.de" in lines
