"""The device that a process computes on."""

from typing import Literal

import torch

from dist_transformer.errors import UserError
from dist_transformer.runtime.world import World


def find_device(name: str | None = None, world: World | None = None) -> torch.device:
    """Choose this process's device and check that it can be used; each process of a node has a GPU of its own.

    Args:
        name: cpu, cuda or cuda:N, as `--device` gives it; without it, cuda where there is a GPU, and cpu elsewhere.
        world: this process among its peers; alone when not given.

    Raises:
        UserError: the device does not exist, or is one GPU for several processes.
    """
    world = World() if world is None else world
    try:
        device = torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))
        if device.type == "cuda" and device.index is None:
            device = torch.device("cuda", _gpu_of(world))
        elif device.type == "cuda" and world.size > 1:
            raise UserError(f"--device {name} is one GPU, and there are {world.size} processes: give cpu or cuda")
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise UserError(f"--device {name} cannot be used ({str(error).splitlines()[0]}): give cpu or cuda:0") from None
    if device.type not in ("cpu", "cuda"):
        raise UserError(f"--device {name} is not supported: give cpu or cuda:0")
    if device.type == "cuda":
        _choose_kernels()
    return device


def choose_precision(device: torch.device, wanted: Literal["bf16", "fp32"] | None) -> Literal["bf16", "fp32"]:
    """Return what is wanted; without a wish bf16 where the device has arithmetic for it, and otherwise fp32.

    A CPU without AVX-512 or SVE emulates bf16: a step of `tiny` took 12 times as long as in fp32 (AMD EPYC with AVX2,
    2026-11-23).

    Raises:
        UserError: bf16 is wanted on a GPU that does not compute it.
    """
    if device.type == "cuda":
        has_bf16 = torch.cuda.get_device_capability(device)[0] >= 8
        if wanted == "bf16" and not has_bf16:
            name = torch.cuda.get_device_name(device)
            raise UserError(f"{name} computes no bf16: give --precision fp32, or a GPU of compute capability 8 or more")
    else:
        has_bf16 = torch.backends.cpu.get_cpu_capability().startswith(("AVX512", "SVE"))
    return wanted or ("bf16" if has_bf16 else "fp32")


def _choose_kernels() -> None:
    """What torch may compute with on a GPU, whatever its defaults become."""
    # fp32 means fp32: TF32 keeps 10 bits of a factor, and bf16 is there for speed.
    torch.backends.cuda.matmul.allow_tf32 = False
    # cuDNN's attention plans anew for each shape, which decoding has many of.
    torch.backends.cuda.enable_cudnn_sdp(False)


def _gpu_of(world: World) -> int:
    """Without CUDA, of which torch says more, the number is not checked."""
    if torch.cuda.is_available() and world.local_rank >= torch.cuda.device_count():
        raise UserError(
            f"local rank {world.local_rank} has no GPU: this node shows {torch.cuda.device_count()}; "
            "start at most one process a GPU, or set CUDA_VISIBLE_DEVICES"
        )
    return world.local_rank
