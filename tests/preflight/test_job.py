"""The watch over the checks. What is missing or stuck: tests/distributed/test_doctor.py, with real processes."""

import subprocess
import sys

import pytest

from dist_transformer.preflight.job import joined, network_in
from dist_transformer.runtime.rendezvous import as_ranges
from dist_transformer.runtime.world import World


@pytest.mark.parametrize(("ranks", "text"), [([0], "0"), ([0, 1, 2], "0-2"), ([5, 1, 2, 7], "1-2, 5, 7"), ([], "")])
def test_ranges(ranks: list[int], text: str) -> None:
    assert as_ranges(ranks) == text


def test_alone_no_address_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    with joined(World(), seconds=1) as watch, watch.stage("anything"):
        pass


def test_the_network_is_the_one_that_nccl_states() -> None:
    messages = "n1:7:7 [0] NCCL INFO NET/IB : No device found.\nn1:7:7 [0] NCCL INFO Using network Socket\n"
    assert [network_in(messages), network_in("")] == ["Socket", ""]


STUCK = """
import time
from dist_transformer.runtime.distributed import World
from dist_transformer.preflight.job import joined
with joined(World(), seconds=0.5) as watch:
    with watch.stage("first"):
        pass
    time.sleep(1)
    with watch.stage("disk"):
        time.sleep(1000)
"""


@pytest.mark.system
def test_what_does_not_end_ends_the_program() -> None:
    done = subprocess.run([sys.executable, "-c", STUCK], capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 1
    assert '"disk" did not end within 0.5 s (rank 0 on ' in done.stderr
