"""Collectives that fail or hang: the advice where to look, and the end of a rank while one is under way."""

from pathlib import Path

import pytest
import torch

from dist_transformer.runtime.process_group import COLLECTIVE_ADVICE, collective_record
from dist_transformer.training.fault_tolerance.signals import HUNG
from tests.conftest import begin_ranks

RANK = """
import os, sys, time, torch
from pathlib import Path
from dist_transformer.runtime import distributed
from dist_transformer.runtime.process_group import process_group
from dist_transformer.runtime.world import read_world
from dist_transformer.training.fault_tolerance.launcher_watch import LauncherWatch
from dist_transformer.training.fault_tolerance.watchdog import Phase, Watchdog

world, mode, folder = read_world(), sys.argv[1], Path(sys.argv[2])
watchdog = Watchdog(world, {Phase.STEP: 2 if world.is_main else 1000})
if mode == "hangs":
    watchdog.start(LauncherWatch())
with process_group(world, device_name="cpu"):
    watchdog.publish_in(folder)
    watchdog.enter(Phase.STEP, 3)
    if not world.is_main:
        os._exit(9) if mode == "dies" else time.sleep(1000)
    if mode == "is under way":
        torch.distributed.all_reduce(torch.ones(1), async_op=True)
        raise RuntimeError("gloo: end now")
    distributed.all_reduce_sum(torch.ones(1))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "reason", "status"), [("dies", "gloo", 1), ("hangs", "rank 1 (", HUNG), ("is under way", "end now", 1)]
)
def test_a_collective_that_fails_or_hangs_says_where_to_look(
    mode: str, reason: str, status: int, tmp_path: Path
) -> None:
    ranks = begin_ranks(range(2), "-c", RANK, mode, tmp_path, output=tmp_path / "output")
    try:
        assert ranks[0].wait() == status
    finally:
        ranks[1].kill()
    said = ranks[0].written()
    assert reason in said
    assert said.count(COLLECTIVE_ADVICE) == 1


def test_torch_records_collectives_by_these_names() -> None:
    """The build for CPUs has the headers of NCCL's group, but not its functions."""
    headers = Path(torch.__file__).parent / "include/torch/csrc/distributed/c10d"
    texts = [(headers / f"{name}.hpp").read_text() for name in ("FlightRecorder", "ProcessGroupNCCL")]
    for name in ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_DUMP_ON_TIMEOUT", "dump_nccl_trace_json"):
        assert any(name in text for text in texts)
    assert hasattr(torch._C._distributed_c10d, "_dump_nccl_trace_json") == torch.distributed.is_nccl_available()
    assert collective_record() is None


def test_a_record_without_collectives_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    for record, expected in ((b'{"version":"2.10"}', None), (found := b'{"entries":[{"record_id":1}]}', found)):
        dump = lambda record=record: record  # noqa: E731
        monkeypatch.setattr(torch._C._distributed_c10d, "_dump_nccl_trace_json", dump, raising=False)
        assert collective_record() == expected
