"""Waits for other ranks: each is explained once, and not begun by a rank that cannot take part.

A rank that cannot reach rank 0 reports it soon, in one sentence; one that only starts early waits.
"""

import errno
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest

from dist_transformer.base.errors import UserError
from dist_transformer.cli.command import run
from dist_transformer.data.folder.reader import DataFolder
from dist_transformer.runtime import rendezvous
from dist_transformer.runtime.launch import free_port
from dist_transformer.runtime.process_group import process_group
from dist_transformer.runtime.rendezvous import connect, end_launch, meet
from dist_transformer.runtime.world import World, read_world
from tests.conftest import ROOT, run_python, run_ranks
from tests.runtime.test_distributed import SRUN, environment, port

__all__ = ["environment", "port"]

FOREVER = timedelta(minutes=30)
LEFT_OVER = "are set in the environment: unset them to run alone\n"


def stale(rank: int, size: int = 2) -> World:
    """Read the world of a shell in which an earlier launch left its variables."""
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(size), LOCAL_RANK="0")
    return read_world()


@pytest.fixture
def quick_notice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "_NOTICE_SECONDS", 0.2)
    monkeypatch.setattr(rendezvous, "_TELL_SECONDS", 0.5)


@pytest.mark.usefixtures("quick_notice")
@pytest.mark.parametrize(
    ("rank", "size", "awaited"), [(0, 2, "rank 1 of 2"), (0, 4, "rank 1-3 of 4"), (1, 2, "rank 0 of 2 at 127.0.0.1:{}")]
)
def test_a_long_wait_is_explained_once(
    rank: int, size: int, awaited: str, port: int, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(UserError):
        meet(stale(rank, size), timedelta(seconds=0.8))
    claims = f"RANK={rank} and WORLD_SIZE={size}"
    assert capsys.readouterr().err == f"note: waiting for {awaited.format(port)}; {claims} {LEFT_OVER}"


@pytest.mark.usefixtures("quick_notice", "port")
def test_the_variables_of_srun_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    os.environ.update({name: str(value) for name, value in {**SRUN, "SLURM_PROCID": 0, "SLURM_LOCALID": 0}.items()})
    with pytest.raises(UserError):
        meet(read_world(), timedelta(seconds=0.5))
    claims = "SLURM_STEP_ID=2 and SLURM_NTASKS=4"
    assert capsys.readouterr().err == f"note: waiting for rank 1-3 of 4; {claims} {LEFT_OVER}"


@pytest.mark.usefixtures("quick_notice", "port")
def test_ranks_of_one_machine_explain_a_wait_for_rank_0_once(capsys: pytest.CaptureFixture[str]) -> None:
    def wait(rank: int) -> None:
        with pytest.raises(UserError):
            meet(World(rank=rank, size=4, local_rank=rank, local_size=4), timedelta(seconds=0.8))

    with ThreadPoolExecutor() as ranks:
        list(ranks.map(wait, range(1, 4)))
    assert capsys.readouterr().err.count("note: waiting for rank 0 of 4") == 1


def end_of(work: Callable[[World], object], rank: int) -> str:
    """Play a rank; gives its status, or its error."""
    try:
        work(World(rank=rank, size=2))
    except SystemExit as end:
        return str(end)
    except UserError as error:
        return str(error)
    return "0"


@pytest.mark.usefixtures("port")
@pytest.mark.parametrize("unfit", [0, 1])
@pytest.mark.parametrize("pause", [0.0, 0.3])
def test_a_rank_that_cannot_take_part_ends_those_that_can(
    unfit: int, pause: float, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # A rank that is slow to come is told, too.
    monkeypatch.setattr(rendezvous, "_TELL_SECONDS", 300)

    def join(world: World) -> None:
        if world.rank == unfit:
            end_launch(world, "the model is gone: give another")
        time.sleep(pause)
        meet(world, FOREVER)

    with ThreadPoolExecutor() as ranks:
        assert list(ranks.map(lambda rank: end_of(join, rank), range(2))) == ["1", "1"]
    assert capsys.readouterr().err == "error: the model is gone: give another\n"


@pytest.mark.usefixtures("quick_notice", "port")
@pytest.mark.parametrize("rank", [0, 1])
def test_an_error_that_one_rank_finds_alone_does_not_wait(rank: int, capsys: pytest.CaptureFixture[str]) -> None:
    def fail() -> None:
        raise UserError("the model is gone")

    def join(world: World) -> None:
        with process_group(world, ready=fail):
            pass

    end = end_of(join, rank)
    # An error that is raised is printed by the command.
    assert (capsys.readouterr().err, end) == (
        ("error: the model is gone\n", "1") if rank == 0 else ("", "the model is gone")
    )


@pytest.fixture
def stale_shell(environment: pytest.MonkeyPatch, quick_notice: None) -> None:
    stale_variables = {"RANK": 0, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    os.environ.update({name: str(value) for name, value in stale_variables.items()})


GONE = "is not a model folder (it does not exist): check the path, or make a model with dist-transformer average"


@pytest.mark.usefixtures("stale_shell")
@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["translate", "--model", "{gone}", "--input", "{text}", "--output", "{out}"], f"{{gone}} {GONE}"),
        (["translate", "--model", "{model}", "--input", "{text}", "--output", "{text}"], "--output {text} is also"),
        (["evaluate", "--model", "{model}", "--src", "{text}", "--ref", "{gone}"], "{gone} does not exist"),
        (["score", "--model", "{model}", "--src", "{text}", "--tgt", "{folder}"], "{folder} cannot be read"),
        (["average", "--run-dir", "{gone}", "--sweep", "1,2", "--out", "{out}"], "{gone}"),
    ],
)
def test_what_needs_no_other_rank_is_said_before_the_wait(
    words: list[str], error: str, model_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    places = {name: tmp_path / name for name in ("gone", "text", "out", "folder")} | {"model": model_folder}
    places["text"].write_text("a\n", encoding="utf-8")
    places["folder"].mkdir()
    with pytest.raises(SystemExit, match=r"^1$"):
        run([word.format(**places) for word in words])
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: {error.format(**places)}")
    assert not places["out"].exists()


@pytest.mark.system
@pytest.mark.parametrize(
    ("flags", "error"),
    [
        (["--data", "gone"], "gone is not a data folder, because "),
        (["--test-mode"], "--test-mode is for one process, but 2 were started: "),
    ],
)
def test_a_training_that_cannot_begin_does_not_wait(flags: list[str], error: str, tmp_path: Path) -> None:
    words = ["-m", "dist_transformer", "train", "--preset", "tiny", "--run-dir", "run", *flags]
    stale_variables = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    done = run_python(*words, cwd=tmp_path, **stale_variables)
    assert (done.returncode, done.stdout) == (1, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"error: {error}")
    assert list(tmp_path.iterdir()) == []


PORTS = """
import os, psutil, sys
from dist_transformer.runtime.distributed import gather_objects
from dist_transformer.runtime.process_group import process_group
from dist_transformer.runtime.world import read_world

with process_group(read_world()):
    opened = {each.laddr.ip for each in psutil.Process().net_connections("inet") if each.status == "LISTEN"}
    if gathered := set().union(*gather_objects(sorted(opened))):
        # One write, which the other rank cannot interrupt, also without buffers.
        sys.stdout.write(" ".join(("ports on", *gathered)) + "\\n")
"""


@pytest.mark.system
def test_a_launch_on_one_machine_opens_no_port_to_the_network(tmp_path: Path) -> None:
    (tmp_path / "ports.py").write_text(PORTS)
    said = run_ranks(2, tmp_path / "ports.py").splitlines()
    assert said == ["ports on 127.0.0.1"] * 2


def test_a_launch_may_open_as_many_files_as_the_hard_limit_says(tmp_path: Path) -> None:
    code = (
        "import resource; from dist_transformer.runtime.rendezvous import raise_open_files; "
        "resource.setrlimit(resource.RLIMIT_NOFILE, (100, 900)); "
        "print(raise_open_files(), resource.getrlimit(resource.RLIMIT_NOFILE))"
    )
    assert run_python("-c", code, cwd=tmp_path).stdout == "900 (900, 900)\n"


# A network of its own, whose loopback interface is down.
ALONE = ("unshare", "--map-root-user", "--net")
TRAIN = (
    "-m dist_transformer.train --preset tiny --model.width 16 --model.heads 2 --model.ffn-width 16 "
    "--batch.max-target-tokens 256 --max-steps 1"
)
PATIENCE = timedelta(minutes=10)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rank", "size", "what"),
    [
        (0, 1, "rank 0 on .* finds no network interface for its process group"),
        (0, 2, r"rank 0 on .* cannot serve at 127\.0\.0\.1:29999"),
        (1, 2, r"rank 1 on .* cannot reach rank 0 at 127\.0\.0\.1:29999"),
    ],
)
def test_a_machine_without_loopback_is_told_at_once(rank: int, size: int, what: str, toy_data: DataFolder) -> None:
    if subprocess.run([*ALONE, "true"], capture_output=True, check=False).returncode:
        pytest.skip("this user may not make a network namespace: run as root")
    launcher = {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": size}
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 29999}
    places = ("--data", toy_data.path, "--run-dir", toy_data.path.with_name("alone"))
    ended = subprocess.run(
        [*ALONE, sys.executable, *TRAIN.split(), *places],
        cwd=ROOT,
        env={**os.environ, **{name: str(value) for name, value in {**launcher, **address}.items()}},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert ended.returncode == 1
    remedy = "the loopback interface of this machine is down: bring it up with `ip link set lo up`"
    assert re.fullmatch(f"error: {what}: {remedy}.*\n", ended.stdout + ended.stderr)


@pytest.fixture
def far_port(monkeypatch: pytest.MonkeyPatch) -> int:
    """The port of a rank 0 on another machine, for a process that stops waiting soon."""
    port = free_port()
    monkeypatch.setenv("MASTER_ADDR", "192.0.2.1")
    monkeypatch.setenv("MASTER_PORT", str(port))
    monkeypatch.setattr(rendezvous, "_UNANSWERED_SECONDS", 0.3)
    return port


def failing(*errors: OSError) -> Callable[..., socket.socket]:
    """Attempts to connect that fail in turn; the last error comes again and again."""
    waiting = list(errors)

    def create_connection(*_: object, **__: object) -> socket.socket:
        raise waiting.pop(0) if len(waiting) > 1 else waiting[0]

    return create_connection


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (OSError(errno.ENETUNREACH, "Network is unreachable"), "Network is unreachable"),
        (TimeoutError("timed out"), "timed out"),
        (socket.gaierror(socket.EAI_NONAME, "Name or service not known"), "Name or service not known"),
    ],
)
def test_an_address_that_does_not_answer(
    rank: int, error: OSError, reason: str, far_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(socket, "create_connection", failing(error))
    does = "reach rank 0" if rank else "serve"
    began = time.monotonic()
    with pytest.raises(
        UserError, match=rf"^rank {rank} on .* cannot {does} at 192\.0\.2\.1:{far_port}: nothing answered "
    ) as told:
        connect(World(rank=rank, size=2), PATIENCE)
    assert f"({reason}): set MASTER_ADDR to an address of rank 0" in str(told.value)
    assert time.monotonic() - began < 300


def test_a_refusal_is_an_answer(far_port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 may begin minutes later than the others."""
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    with ThreadPoolExecutor() as ranks:
        early = ranks.submit(connect, World(rank=1, size=2), PATIENCE)
        time.sleep(1.0)
        assert not early.done()
        served = connect(World(rank=0, size=2), PATIENCE)
        early.result().set("rank 1", "is here")
    assert served.get("rank 1") == b"is here"
