"""A rank that cannot reach rank 0 reports it soon, in one sentence; one that only starts early waits."""

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

import pytest

from dist_transformer.base.errors import UserError
from dist_transformer.data.folder.reader import DataFolder
from dist_transformer.runtime import rendezvous
from dist_transformer.runtime.launch import free_port
from dist_transformer.runtime.rendezvous import connect
from dist_transformer.runtime.world import World
from tests.conftest import ROOT

# A network of its own, whose loopback interface is down.
ALONE = ("unshare", "--map-root-user", "--net")
TRAIN = (
    "-m dist_transformer.train --preset tiny --model.width 16 --model.heads 2 --model.ffn-width 16 "
    "--batch.max-target-tokens 256 --max-steps 1"
)
PATIENCE = timedelta(minutes=5)


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
    ended = subprocess.run(
        [
            *ALONE,
            sys.executable,
            *TRAIN.split(),
            "--data",
            toy_data.path,
            "--run-dir",
            toy_data.path.with_name("alone"),
        ],
        cwd=ROOT,
        env={**os.environ, **{name: str(value) for name, value in {**launcher, **address}.items()}},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ended.returncode == 1
    remedy = "the loopback interface of this machine is down: bring it up with `ip link set lo up`"
    assert re.fullmatch(f"error: {what}: {remedy}.*\n", ended.stdout + ended.stderr)


@pytest.fixture
def port(monkeypatch: pytest.MonkeyPatch) -> int:
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
        (OSError(errno.EHOSTUNREACH, "No route to host"), "No route to host"),
        (TimeoutError("timed out"), "timed out"),
        (socket.gaierror(socket.EAI_NONAME, "Name or service not known"), "Name or service not known"),
    ],
)
def test_an_address_that_does_not_answer(
    rank: int, error: OSError, reason: str, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(socket, "create_connection", failing(error))
    does = "reach rank 0" if rank else "serve"
    began = time.monotonic()
    with pytest.raises(
        UserError, match=rf"^rank {rank} on .* cannot {does} at 192\.0\.2\.1:{port}: nothing answered "
    ) as told:
        connect(World(rank=rank, size=2), PATIENCE)
    assert f"({reason}): set MASTER_ADDR to an address of rank 0" in str(told.value)
    assert time.monotonic() - began < 5


def test_a_refusal_is_an_answer(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 may begin minutes later than the others."""
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    with ThreadPoolExecutor() as ranks:
        early = ranks.submit(connect, World(rank=1, size=2), PATIENCE)
        time.sleep(1.0)
        assert not early.done()
        served = connect(World(rank=0, size=2), PATIENCE)
        early.result().set("rank 1", "is here")
    assert served.get("rank 1") == b"is here"
