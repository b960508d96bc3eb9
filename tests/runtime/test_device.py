import re
from pathlib import Path
from typing import Any

import pytest
import torch

from dist_transformer.base.errors import UserError
from dist_transformer.runtime import device
from dist_transformer.runtime.device import choose_precision, find_device, multiplies_bf16
from dist_transformer.runtime.process_group import process_group
from dist_transformer.runtime.world import World

SECOND_OF_TWO = World(rank=1, size=2, local_rank=1, local_size=2)


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make torch report two GPUs; nothing is computed."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *size, device: empty(*size, device="cpu"))


@pytest.mark.usefixtures("two_gpus")
@pytest.mark.parametrize(
    ("name", "world", "device"),
    [
        (None, World(), "cuda:0"),
        ("cuda", World(), "cuda:0"),
        ("cuda:1", World(), "cuda:1"),
        ("cpu", World(), "cpu"),
        (None, SECOND_OF_TWO, "cuda:1"),
        ("cuda", SECOND_OF_TWO, "cuda:1"),
        ("cpu", SECOND_OF_TWO, "cpu"),
    ],
)
def test_each_process_has_its_own(name: str | None, world: World, device: str) -> None:
    assert find_device(name, world) == torch.device(device)


@pytest.mark.usefixtures("two_gpus")
def test_processes_do_not_share_a_gpu() -> None:
    with pytest.raises(UserError, match=r"^--device cuda:1 is one GPU, but there are 2 processes: use cpu or cuda$"):
        find_device("cuda:1", SECOND_OF_TWO)
    third = World(rank=2, size=3, local_rank=2, local_size=3)
    with pytest.raises(
        UserError, match=r"^local rank 2 has no GPU: this node shows 2; start at most one process per GPU"
    ):
        find_device(None, third)


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what a machine without a GPU says")
def test_without_a_gpu() -> None:
    assert find_device() == torch.device("cpu")
    for name in ("cuda", "cuda:0"):
        with pytest.raises(UserError, match=rf"^--device {name} cannot be used \(.*\): use cpu or cuda:0$"):
            find_device(name, World())


def test_a_process_group_is_of_the_named_device(monkeypatch: pytest.MonkeyPatch) -> None:
    with process_group(World(), device_name="cpu") as device:
        assert device == torch.device("cpu")
    with (
        pytest.raises(UserError, match=f"^{re.escape('--device meta is not supported: use cpu or cuda:0')}$"),
        process_group(World(), device_name="meta"),
    ):
        pass


@pytest.mark.parametrize(
    ("capability", "wanted", "chosen"),
    [((8, 0), None, "bf16"), ((8, 0), "fp32", "fp32"), ((8, 0), "bf16", "bf16"), ((7, 0), None, "fp32")],
)
def test_the_arithmetic_of_a_gpu(
    capability: tuple[int, int], wanted: Any, chosen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    assert choose_precision(torch.device("cuda", 0), wanted) == chosen


@pytest.mark.parametrize(
    ("capability", "wanted", "chosen"),
    [
        ("AVX512", None, "bf16"),
        ("SVE256", None, "bf16"),
        ("AVX2", None, "fp32"),
        ("DEFAULT", None, "fp32"),
        ("AVX2", "bf16", "bf16"),
        ("AVX512", "fp32", "fp32"),
    ],
)
def test_the_arithmetic_of_a_cpu(capability: str, wanted: Any, chosen: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    assert choose_precision(torch.device("cpu"), wanted) == chosen


@pytest.mark.parametrize(
    ("flags", "has"), [("avx2 avx512_bf16", True), ("amx_bf16", True), ("avx512f avx512_vnni", False), (None, False)]
)
def test_a_cpu_multiplies_bf16_by_avx512_bf16_or_amx(
    flags: str | None, has: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    # AVX-512 alone, in which training computes bf16, has no instruction for it.
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")
    file = tmp_path / "cpuinfo"
    if flags is not None:
        file.write_text(f"flags\t\t: fpu {flags}\nbugs : amx_bf16_none\n")
    monkeypatch.setattr(device, "_CPU_INFO", file)
    assert multiplies_bf16(torch.device("cpu")) == has


def test_a_gpu_without_bf16_is_refused_in_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (7, 5))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "Tesla T4")
    with pytest.raises(UserError, match=r"^Tesla T4 has no bf16: pass --precision fp32, or use a GPU of .* 8 or more$"):
        choose_precision(torch.device("cuda", 0), "bf16")
