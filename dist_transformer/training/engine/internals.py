"""What we use of DeepSpeed's and torch's insides, each use with its reason.

None of it is documented, so a new version may change it: `tests/training/engine/test_internals.py` compares with the
versions that are installed, and fails where one is gone.
"""

import logging
import threading
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist
from torch import nn


def prepare_deepspeed() -> None:
    """Before `initialize`: no needless build, no line for each part that it constructs, and waits that are timed."""
    from deepspeed.utils import logger

    # On CPU DeepSpeed would compile an all-reduce that only its inference calls, and leave 69 MB a rank in /dev/shm.
    # By name: `deepspeed.comm.torch` as an attribute is PyTorch itself.
    import_module("deepspeed.comm.torch").build_shm_op = lambda: None  # type: ignore[attr-defined]
    stage_1: Any = import_module("deepspeed.runtime.bf16_optimizer")
    # It prints the machine's memory six times while it is built.
    stage_1.see_memory_usage = lambda *_, **__: None
    # A kernel for each tensor, and two waits for the device.
    stage_1.get_global_norm_of_tensors = _norm_of_all
    # A copy of each gradient in fp32, which is then added.
    stage_1.BF16_Optimizer._update_hp_grad = _add_to_sum
    logger.setLevel(logging.WARNING)
    # The wheel imports names of torch.distributed that newer torch renames.
    warnings.filterwarnings("ignore", category=FutureWarning, message=".*torch.distributed.*is deprecated.*")
    dist.Work.wait = _timed_wait  # type: ignore[method-assign, assignment]


_waited = threading.local()
_wait = dist.Work.wait


def waited_seconds() -> float:
    """Seconds that this thread has waited for collectives since `prepare_deepspeed`.

    On a CPU each collective ends in such a wait, also where a caller asked for it to run beside other work; what ran
    meanwhile does not count. On a GPU the wait is the device's, and the host goes on.
    """
    return getattr(_waited, "seconds", 0.0)


def _timed_wait(work: dist.Work, *arguments: Any, **named: Any) -> Any:
    started = time.monotonic()
    try:
        return _wait(work, *arguments, **named)
    finally:
        _waited.seconds = waited_seconds() + time.monotonic() - started


def _norm_of_all(input_tensors: list[torch.Tensor], norm_type: float = 2.0, mpu: None = None) -> torch.Tensor:
    """The norm of stage 1's gradients in bf16, each of which every rank holds whole; not finite where one is not."""
    return nn.utils.get_total_norm(input_tensors, norm_type)


@torch.no_grad()
def _add_to_sum(zero_optimizer: Any, lp: torch.Tensor, group_idx: int, param_idx: int, clear_lp_grads: bool) -> None:
    """Add a parameter's gradient in bf16 to its fp32 sum, in one kernel; the rest is DeepSpeed's bookkeeping."""
    if lp.grad is None:
        return
    hp_grad = zero_optimizer.fp32_groups_gradients[group_idx][param_idx]
    hp_grad.add_(lp.grad.view(hp_grad.shape))
    lp._hp_grad = hp_grad  # type: ignore[attr-defined]
    zero_optimizer.fp32_groups_has_gradients[group_idx][param_idx] = True
    if clear_lp_grads:
        lp.grad.zero_()


def look_at_the_norm_alone(zero_optimizer: Any) -> None:
    """Let stages 1 to 3 find a gradient that is not finite by its norm, which is looked at anyway.

    DeepSpeed would search all gradients first, and read the outcome from the device.
    """
    zero_optimizer.check_overflow = lambda **_: None


def link_moments(zero_optimizer: Any) -> None:
    """Stages 1 and 2: link Adam's state to each parameter's fragment.

    DeepSpeed does so at the first step, which is too late for a restore.
    """
    zero_optimizer._lazy_init_hp_params_optimizer_state()


def flat_partitions(zero_optimizer: Any) -> list[torch.Tensor]:
    """Stage 3: the flat fp32 tensors of this rank, which Adam updates."""
    return list(zero_optimizer.fp32_partitioned_groups_flat)


def full_shape(parameter: nn.Parameter) -> torch.Size:
    """The shape of a parameter: stage 3 leaves an empty placeholder, and keeps the shape beside it."""
    return getattr(parameter, "ds_shape", parameter.shape)


def part_size(parameter: nn.Parameter) -> int:
    """Stage 3: elements of a parameter that each rank holds, padding included."""
    return int(parameter.ds_tensor.numel())  # type: ignore[attr-defined]


def zero_keys() -> set[str]:
    """The keys that DeepSpeed knows under `zero_optimization`, older names included."""
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    fields = DeepSpeedZeroConfig.model_fields
    return set(fields) | {field.alias for field in fields.values() if field.alias}


def zero_problem(zero: dict[str, Any]) -> str | None:
    """What DeepSpeed finds wrong with a `zero_optimization`: the key and the reason; None if it is sound."""
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
    from pydantic import ValidationError

    try:
        DeepSpeedZeroConfig(**zero)
    except ValidationError as error:
        first = error.errors()[0]
        return f"{'.'.join(str(part) for part in first['loc'])}: {first['msg']}"
    return None


def accumulate_in_fp32(parameter: torch.Tensor) -> None:
    """Sum the gradients of a bf16 parameter in fp32; torch has the attribute since 2.11."""
    parameter.grad_dtype = torch.float32


# Loops over many tensors in few kernels, which torch's own optimizers use under these names.


def lerp_all(tensors: list[torch.Tensor], ends: list[torch.Tensor], weight: float) -> None:
    """tensor += weight · (end - tensor), for each."""
    torch._foreach_lerp_(tensors, ends, weight)


def scale_all(tensors: list[torch.Tensor], factor: float) -> None:
    torch._foreach_mul_(tensors, factor)


def copy_all(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    torch._foreach_copy_(targets, sources)


@contextmanager
def build_lock(kind: type) -> Iterator[None]:
    """Let PyTorch's builds of extensions take locks of this `kind`, where they would leave a file: before 2.15."""
    # Its import looks for CUDA, and warns where the GPUs are missing.
    from torch.utils import cpp_extension

    usual = getattr(cpp_extension, "FileBaton", None)
    if usual is None:
        yield
        return
    cpp_extension.FileBaton = kind  # type: ignore[misc, assignment]
    try:
        yield
    finally:
        cpp_extension.FileBaton = usual  # type: ignore[misc]
