"""Measure the memory of training: the engine's states, and the peak of the process."""

import resource
from collections import deque
from collections.abc import Iterator
from typing import Any

import torch

from dist_transformer.training.engine.deepspeed_engine import Engine

# Packages whose objects may hold tensors of the engine.
_OWNERS = {"dist_transformer", "torch", "deepspeed"}


def state_bytes(engine: Engine) -> int:
    """Count the bytes of the engine's tensors on this rank, in GPU and host memory.

    These are the model's parameters and constants, fp32 copies, moments, gradients and DeepSpeed's flat buffers.
    """
    storages = {}
    for tensor in _tensors_of(engine.module, engine.optimizer, engine.ds.optimizer):
        if tensor.device.type != "meta":
            storage = tensor.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def _tensors_of(*roots: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors that can be reached through containers and objects of the model, torch and DeepSpeed."""
    seen: set[int] = set()
    queue: deque[Any] = deque(roots)
    while queue:
        value = queue.popleft()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, torch.Tensor):
            yield value
            if value.is_leaf:
                queue.append(value.grad)
        if isinstance(value, dict):
            queue.extend(value.values())
        elif isinstance(value, list | tuple | set | deque):
            queue.extend(value)
        elif hasattr(value, "__dict__") and type(value).__module__.partition(".")[0] in _OWNERS:
            queue.extend(vars(value).values())


def peak_memory_bytes(device: torch.device) -> int:
    """Return the peak allocation on a GPU; on a CPU, the peak memory of the process, libraries included."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def memory_of(device: torch.device, peak: int) -> dict[str, float]:
    """Return the largest peak of all ranks, and on a GPU its share of the memory, assuming equal GPUs."""
    if device.type != "cuda":
        return {"peak_memory_bytes": peak}
    return {
        "peak_memory_bytes": peak,
        "peak_memory_share": peak / torch.cuda.get_device_properties(device).total_memory,
    }
