"""Names of ranks. What is missing or stuck: tests/distributed/test_doctor.py, with real processes."""

import socket
import subprocess
import sys

import pytest

from dist_transformer.base.errors import UserError
from dist_transformer.preflight.watch import joined
from dist_transformer.runtime.rendezvous import as_ranges
from dist_transformer.runtime.world import World


@pytest.mark.parametrize(("ranks", "text"), [([0], "0"), ([0, 1, 2], "0-2"), ([5, 1, 2, 7], "1-2, 5, 7"), ([], "")])
def test_ranges(ranks: list[int], text: str) -> None:
    assert as_ranges(ranks) == text


def test_alone_no_address_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    with joined(World(), seconds=1) as watch, watch.stage("anything"):
        pass


def test_several_need_an_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    with pytest.raises(UserError, match="MASTER_ADDR and MASTER_PORT are not set"), joined(World(size=2), seconds=1):
        pass


def test_a_port_that_is_taken_has_a_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("", 0)) as other:
        for name, value in {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": other.getsockname()[1], "CROSS_SIZE": 1}.items():
            monkeypatch.setenv(name, str(value))
        with pytest.raises(UserError, match=r"^port \d+ of this machine is taken.*such as deepspeed --master_port \d+"):
            joined(World(size=2), seconds=1).__enter__()


STUCK = """
import time
from dist_transformer.runtime.distributed import World
from dist_transformer.preflight.watch import joined
with joined(World(), seconds=0.5) as watch:
    with watch.stage("first"):
        pass
    time.sleep(1)
    with watch.stage("disk"):
        time.sleep(60)
"""


@pytest.mark.system
def test_what_does_not_end_ends_the_program() -> None:
    done = subprocess.run([sys.executable, "-c", STUCK], capture_output=True, text=True, check=False, timeout=50)
    assert done.returncode == 1
    assert '"disk" did not end within 0.5 s (rank 0 on ' in done.stderr
