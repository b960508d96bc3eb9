"""The device that a process computes on, and its threads on a CPU.

The number of threads can change the last digits of sums. So it follows from the shape of the work, not from a
measurement at the start, and a run keeps the number that it began with. OMP_NUM_THREADS overrides it.
"""

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import torch

from dist_transformer.base.errors import UserError
from dist_transformer.base.native import cpu_info
from dist_transformer.runtime.world import World

# Width times target tokens of a micro-batch, below which a rank has one thread. It lies between `tiny` and `multi30k`,
# and was chosen, not fitted: results/speed/threads.json was measured on two shared cores, and neither way wins clearly.
_ENOUGH_FOR_THREADS = 2**18
_VARIABLE = "OMP_NUM_THREADS"
PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16}
"""Types of numbers by the names of their flags."""
_CPU_INFO = Path("/proc/cpuinfo")
# Instructions of CPUs for products in bf16, and of integers of 8 bits, as Linux names them.
_BF16_FLAGS = {"avx512_bf16", "amx_bf16"}
_INT8_FLAGS = {"avx512_vnni", "avx_vnni", "amx_int8"}


def find_device(name: str | None = None, world: World | None = None) -> torch.device:
    """Choose this process's device and check that it can be used. Each process of a node has a GPU of its own.

    Args:
        name: cpu, cuda or cuda:N, as given by `--device`. Default: cuda if there is a GPU, otherwise cpu.
        world: rank and world size of this process; default: a world of one.

    Raises:
        UserError: the device does not exist, or several processes would share one GPU.
    """
    world = World() if world is None else world
    try:
        device = torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))
        if device.type == "cuda" and device.index is None:
            device = torch.device("cuda", _gpu_of(world))
        elif device.type == "cuda" and world.size > 1:
            raise UserError(f"--device {name} is one GPU, but there are {world.size} processes: use cpu or cuda")
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise UserError(f"--device {name} cannot be used ({str(error).splitlines()[0]}): use cpu or cuda:0") from None
    if device.type not in ("cpu", "cuda"):
        raise UserError(f"--device {name} is not supported: use cpu or cuda:0")
    if device.type == "cuda":
        _choose_kernels()
    return device


def choose_precision(device: torch.device, wanted: Literal["bf16", "fp32"] | None) -> Literal["bf16", "fp32"]:
    """Return the wanted precision; the default is bf16 if the device computes it natively, otherwise fp32.

    A CPU without AVX-512 or SVE emulates bf16: a step of `tiny` took 12 times as long as in fp32 (AMD EPYC with AVX2,
    2026-11-23).

    Raises:
        UserError: bf16 is wanted on a GPU that does not support it.
    """
    if device.type == "cuda":
        has_bf16 = multiplies_bf16(device)
        if wanted == "bf16" and not has_bf16:
            name = torch.cuda.get_device_name(device)
            raise UserError(f"{name} has no bf16: pass --precision fp32, or use a GPU of compute capability 8 or more")
    else:
        has_bf16 = torch.backends.cpu.get_cpu_capability().startswith(("AVX512", "SVE"))
    return wanted or ("bf16" if has_bf16 else "fp32")


def as_dtype(precision: str | None) -> torch.dtype:
    """Return the dtype of a precision by name.

    Raises:
        UserError: there is no such precision.
    """
    if precision not in PRECISIONS:
        raise UserError(f"precision is {precision!r}: it must be {' or '.join(PRECISIONS)}")
    return PRECISIONS[precision]


def multiplies_bf16(device: torch.device) -> bool:
    """Decide whether a device has instructions for products in bf16, without which fp32 is the faster choice."""
    if device.type == "cuda":
        return torch.cuda.get_device_capability(device)[0] >= 8
    return not _BF16_FLAGS.isdisjoint(cpu_info(_CPU_INFO).split())


def multiplies_int8(device: torch.device) -> bool:
    """Decide whether a device is a CPU with instructions for products of integers of 8 bits, and torch uses them.

    Without them oneDNN adds two products in 16 bits, which may overflow.
    """
    if device.type != "cpu" or _INT8_FLAGS.isdisjoint(cpu_info(_CPU_INFO).split()):
        return False
    square = torch.full((64, 64), 127, dtype=torch.int8)
    return bool((torch._int_mm(square, square) == 64 * 127**2).all())


def _choose_kernels() -> None:
    """Choose the kernels that torch may use on a GPU, independent of its defaults."""
    # fp32 means fp32: TF32 keeps only 10 bits of each factor's mantissa. Use bf16 for speed.
    torch.backends.cuda.matmul.allow_tf32 = False
    # cuDNN's attention makes a new plan for each shape, and decoding has many shapes.
    torch.backends.cuda.enable_cudnn_sdp(False)


def _gpu_of(world: World) -> int:
    """Return this process's GPU; without CUDA the number is not checked, because torch's own error is clearer."""
    if torch.cuda.is_available() and world.local_rank >= torch.cuda.device_count():
        raise UserError(
            f"local rank {world.local_rank} has no GPU: this node shows {torch.cuda.device_count()}; "
            "start at most one process per GPU, or set CUDA_VISIBLE_DEVICES"
        )
    return world.local_rank


# mallopt(3)
_M_TRIM_THRESHOLD, _M_MMAP_MAX, _M_ARENA_MAX = -1, -4, -8
# glibc's default.
_MMAPPED_BLOCKS = 65_536


def keep_freed_memory() -> None:
    """Let this process reuse the memory that it frees, so that it keeps its peak. No effect without glibc."""
    # All blocks come from the one heap, which never shrinks; heaps of other threads hold at most 64 MB.
    _mallopt({_M_MMAP_MAX: 0, _M_TRIM_THRESHOLD: -1, _M_ARENA_MAX: 1})


@contextmanager
def returning_freed_memory(device: torch.device) -> Iterator[None]:
    """Return large blocks to the system when they are freed, while the block lasts, in a process that keeps them."""
    if device.type == "cpu":
        _mallopt({_M_MMAP_MAX: _MMAPPED_BLOCKS})
    yield
    if device.type == "cpu":
        _mallopt({_M_MMAP_MAX: 0})


def _mallopt(options: dict[int, int]) -> None:
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        for option, value in options.items():
            mallopt(option, value)


_PCI = Path("/sys/bus/pci/devices")


@contextmanager
def beside(device: torch.device) -> Iterator[None]:
    """Run this thread, and threads that it starts, on the CPUs near a GPU while the block lasts.

    On a machine with several sockets, kernel launches and copies from host memory otherwise cross the link between
    sockets if the process runs on the wrong one. Only CPUs that the launcher gave to the process are used; if none of
    them is near the GPU, nothing changes.
    """
    before = os.sched_getaffinity(0)
    near = before & cpus_beside(device) if device.type == "cuda" else set()
    if near:
        os.sched_setaffinity(0, near)
    try:
        yield
    finally:
        if near:
            os.sched_setaffinity(0, before)


def cpus_beside(device: torch.device) -> set[int]:
    """Read from the PCI bus which CPUs are near a GPU; none if it does not report them, as in some containers."""
    properties = torch.cuda.get_device_properties(device)
    address = f"{properties.pci_domain_id:04x}:{properties.pci_bus_id:02x}:{properties.pci_device_id:02x}.0"  # type: ignore[attr-defined]
    try:
        return _members((_PCI / address / "local_cpulist").read_text(encoding="ascii"))
    except OSError:
        return set()


def _members(ranges: str) -> set[int]:
    """Parse `0-2,8` as 0, 1, 2, 8."""
    numbers = set[int]()
    for span in filter(None, ranges.strip().split(",")):
        first, _, last = span.partition("-")
        numbers.update(range(int(first), int(last or first) + 1))
    return numbers


def cores_of_rank(local_size: int) -> int:
    """Return this rank's share of the cores that its node lets it use, at least 1."""
    return max(1, len(os.sched_getaffinity(0)) // local_size)


def threads_are_given() -> bool:
    """Decide whether the user or a launcher chose the number of threads."""
    return _VARIABLE in os.environ


def threads_for(*, width: int, tokens: int, cores: int) -> int:
    """Return 1 for small work, otherwise one thread per core.

    Args:
        width: d_model.
        tokens: target tokens of a micro-batch.
        cores: the rank's cores.
    """
    return cores if width * tokens >= _ENOUGH_FOR_THREADS else 1


def kept_threads(recorded: int, *, chosen: int, cores: int) -> tuple[int, str | None]:
    """Return the threads of a resumed run, and a line for the user if another number would be chosen today.

    Args:
        recorded: threads that it had.
        chosen: number by the rule for this machine.
        cores: the rank's cores, which the threads may not exceed.
    """
    kept = min(recorded, cores)
    if kept == chosen:
        return kept, None
    return kept, (
        f"keeps {kept} thread(s) per rank, as before, so that its sums stay the same; a new run would have {chosen}: "
        f"set {_VARIABLE} to change it"
    )


def load_of_machine() -> tuple[float, int] | None:
    """Return the load average of the last minute and the cores of the machine; None if the system has no such figure.

    The load counts the work of all users, so it is compared with all cores, not only with those of this process.
    """
    try:
        return os.getloadavg()[0], os.cpu_count() or 1
    except OSError:
        return None


def load_caution(load: tuple[float, int] | None, threads: int) -> str | None:
    """Return a line with the remedy if more work wants to run than there are cores, otherwise None.

    Args:
        load: as from `load_of_machine`.
        threads: threads of this process.
    """
    if load is None or load[0] <= load[1]:
        return None
    fewer = f", or set {_VARIABLE} below {threads}" if threads > 1 else ""
    return (
        f"the load average is {load[0]:.1f} on {load[1]} core(s), so other work slows this machine down: let it end, "
        f"or use another machine{fewer}"
    )
