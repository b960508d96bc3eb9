"""The device of a rank: its choice, its arithmetic, the CPUs near a GPU, freed memory, threads."""

import json
import os
import re
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dist_transformer.base.errors import UserError
from dist_transformer.config.presets import PRESETS
from dist_transformer.runtime import device
from dist_transformer.runtime.device import (
    beside,
    choose_precision,
    cpus_beside,
    find_device,
    kept_threads,
    load_caution,
    multiplies_bf16,
    multiplies_int8,
    threads_for,
)
from dist_transformer.runtime.interpreter import share_cores
from dist_transformer.runtime.process_group import process_group
from dist_transformer.runtime.world import World
from dist_transformer.train import with_precision

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
        ("AVX2", "bf16", "bf16"),
        ("AVX512", "fp32", "fp32"),
    ],
)
def test_the_arithmetic_of_a_cpu(capability: str, wanted: Any, chosen: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    assert choose_precision(torch.device("cpu"), wanted) == chosen


@pytest.mark.parametrize(("before", "given", "chosen"), [("fp32", None, "fp32"), ("fp32", "bf16", "bf16")])
def test_a_run_in_fp32_stays_so_on_a_processor_with_bf16(
    before: str, given: Any, chosen: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")
    (tmp_path / "config.json").write_text(json.dumps({"precision": before}))
    config = PRESETS["tiny"].changed(run_dir=tmp_path, precision=given)
    assert with_precision(config, torch.device("cpu")).precision == chosen


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


def test_products_in_int8_need_sums_that_do_not_overflow(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "cpuinfo").write_text("flags\t\t: fpu avx_vnni\n")
    monkeypatch.setattr(device, "_CPU_INFO", tmp_path / "cpuinfo")
    for most, has in ((2**31 - 1, True), (2**15 - 1, False)):
        monkeypatch.setattr(torch, "_int_mm", lambda x, y, most=most: (x.int() @ y.int()).clamp(max=most))
        assert multiplies_int8(torch.device("cpu")) == has


def test_a_gpu_without_bf16_is_refused_in_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (7, 5))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "Tesla T4")
    with pytest.raises(UserError, match=r"^Tesla T4 has no bf16: pass --precision fp32, or use a GPU of .* 8 or more$"):
        choose_precision(torch.device("cuda", 0), "bf16")


GPU = torch.device("cuda", 0)


@pytest.fixture
def pci(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A bus with one GPU: domain 1, bus 0x1b, device 0."""
    place = SimpleNamespace(pci_domain_id=1, pci_bus_id=0x1B, pci_device_id=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: place)
    monkeypatch.setattr(device, "_PCI", tmp_path)
    folder = tmp_path / "0001:1b:00.0"
    folder.mkdir()
    return folder


def test_a_list_of_cpus_is_read(pci: Path) -> None:
    (pci / "local_cpulist").write_text("0-3,8,64-65\n")
    assert cpus_beside(GPU) == {0, 1, 2, 3, 8, 64, 65}
    (pci / "local_cpulist").write_text("\n")
    assert cpus_beside(GPU) == set()


def test_a_bus_that_is_not_there_says_nothing(pci: Path) -> None:
    pci.rmdir()
    assert cpus_beside(GPU) == set()


def test_this_thread_and_those_it_starts_run_beside_the_gpu(pci: Path) -> None:
    before = os.sched_getaffinity(0)
    one = min(before)
    # One of ours, and one that the launcher has not given.
    (pci / "local_cpulist").write_text(f"{one},{max(before) + 1000}")
    seen = []
    with beside(GPU):
        thread = threading.Thread(target=lambda: seen.append(os.sched_getaffinity(0)))
        thread.start()
        thread.join()
        assert os.sched_getaffinity(0) == {one}
    assert seen == [{one}]
    assert os.sched_getaffinity(0) == before


def test_without_a_cpu_of_ours_beside_the_gpu_nothing_changes(pci: Path) -> None:
    before = os.sched_getaffinity(0)
    (pci / "local_cpulist").write_text(f"{max(before) + 1000}")
    with beside(GPU):
        assert os.sched_getaffinity(0) == before
    with beside(torch.device("cpu")):
        assert os.sched_getaffinity(0) == before


_FAULTS = """
import resource, sys, threading, torch
if sys.argv[1] == "kept":
    from dist_transformer.runtime.device import keep_freed_memory
    keep_freed_memory()

def use():
    for _ in range(10):
        torch.ones(2**24)  # 64 MiB
        torch.ones(2**21)

def count():
    use()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    use()
    faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)

faults = []
count()
thread = threading.Thread(target=count)
thread.start()
thread.join()
print(*faults)
"""


def faults(manner: str) -> list[int]:
    found = subprocess.run([sys.executable, "-c", _FAULTS, manner], capture_output=True, check=True)
    return [int(number) for number in found.stdout.split()]


@pytest.mark.system
@pytest.mark.skipif(sys.platform != "linux", reason="glibc's allocator")
def test_freed_blocks_are_not_zeroed_again() -> None:
    """10 blocks of 2^14 pages of 4 KiB each, in the first thread and in another; a kernel may give larger pages."""
    for kept, returned in zip(faults("kept"), faults("returned"), strict=True):
        assert kept < returned / 10


_RETURNED = """
import torch
from dist_transformer.runtime.device import keep_freed_memory, returning_freed_memory

def held():
    status = open("/proc/self/status").read()
    return int(status.partition("RssAnon:")[2].split()[0]) // 1024

def left():
    before = held()
    torch.ones(2**26)  # 256 MiB
    return held() - before

keep_freed_memory()
with returning_freed_memory(torch.device("cpu")):
    print(left())
print(left())
"""


@pytest.mark.system
@pytest.mark.skipif(sys.platform != "linux", reason="glibc's allocator")
def test_a_start_leaves_no_gaps_in_the_heap() -> None:
    found = subprocess.run([sys.executable, "-c", _RETURNED], capture_output=True, check=True)
    at_start, later = map(int, found.stdout.split())
    assert at_start < 25
    assert later > 250


@pytest.mark.parametrize(("preset", "threads"), [("tiny", 1), ("multi30k", 16), ("base", 16), ("big", 16)])
def test_only_small_shapes_get_one_thread(preset: str, threads: int) -> None:
    config = PRESETS[preset]
    tokens = config.batch.packs_on_a_cpu(1) * config.batch.max_target_tokens
    assert threads_for(width=config.model.width, tokens=tokens, cores=16) == threads


def test_a_resume_keeps_the_threads_that_the_cores_allow() -> None:
    assert kept_threads(4, chosen=4, cores=4) == (4, None)
    kept, note = kept_threads(2, chosen=16, cores=16)
    assert (kept, "OMP_NUM_THREADS" in str(note)) == (2, True)
    # On a smaller machine.
    assert kept_threads(16, chosen=4, cores=4) == (4, None)


def test_a_load_above_the_cores_is_reported_with_the_remedy() -> None:
    assert load_caution((2.0, 2), 2) is None
    assert load_caution(None, 2) is None
    assert "load average is 5.7 on 2 core(s)" in str(line := load_caution((5.7, 2), 2))
    assert "set OMP_NUM_THREADS below 2" in str(line)
    assert "OMP_NUM_THREADS" not in str(load_caution((5.7, 2), 1))


@pytest.fixture
def plain(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name in ("OMP_NUM_THREADS", "OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME"):
        # Set first, so that what the function sets is undone too.
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    return monkeypatch


def test_threads_sleep_while_they_wait_unless_the_user_decides(plain: pytest.MonkeyPatch) -> None:
    plain.setenv("GOMP_SPINCOUNT", "7")
    share_cores()
    assert "OMP_WAIT_POLICY" not in os.environ
    plain.delenv("GOMP_SPINCOUNT")
    plain.setenv("OMP_NUM_THREADS", " ")
    share_cores()
    assert os.environ["OMP_WAIT_POLICY"] == "PASSIVE"
    assert "OMP_NUM_THREADS" not in os.environ


@pytest.mark.parametrize("value", ["0", "abc", "1025", "2,"])
def test_a_number_of_threads_that_openmp_would_ignore_is_refused(plain: pytest.MonkeyPatch, value: str) -> None:
    plain.setenv("OMP_NUM_THREADS", value)
    with pytest.raises(SystemExit, match=r"^error: OMP_NUM_THREADS is .*: set it to a number of threads"):
        share_cores()


def test_every_program_lets_its_threads_sleep_before_it_imports_torch() -> None:
    """OpenMP reads its variables once, when torch is imported."""
    program = (
        "import os, sys\n"
        "os.environ.pop('OMP_WAIT_POLICY', None)\n"
        "from dist_transformer.cli.command import main\n"
        "before = 'torch' in sys.modules\n"
        "sys.argv = ['dist-transformer', '--version']\n"
        "try:\n    main()\nfinally:\n    print(before, os.environ['OMP_WAIT_POLICY'])"
    )
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert found.stdout.splitlines()[-1] == "False PASSIVE"
