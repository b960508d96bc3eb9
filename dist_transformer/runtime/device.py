"""The device that a process computes on."""

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


def require_precision(device: torch.device, precision: str) -> None:
    """
    Raises:
        UserError: training in bf16 on a GPU that has no arithmetic for it.
    """
    if device.type == "cuda" and precision == "bf16" and torch.cuda.get_device_capability(device)[0] < 8:
        name = torch.cuda.get_device_name(device)
        raise UserError(f"{name} computes no bf16: give --precision fp32, or a GPU of compute capability 8 or more")


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
