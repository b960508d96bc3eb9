"""Undocumented parts of DeepSpeed and torch that the project uses, each with the reason.

A new version may change them: `tests/training/engine/test_internals.py` checks them in the installed versions, and
fails if one is gone.
"""

import logging
import threading
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from dist_transformer.base.locks import exclusive


def prepare_deepspeed() -> None:
    """Prepare DeepSpeed before `initialize`: prevent needless builds and messages, and time the waits."""
    from deepspeed.utils import logger

    # On a CPU, DeepSpeed would compile an all-reduce that only its inference calls, and leave 69 MB per rank in
    # /dev/shm. Import it by name: the attribute `deepspeed.comm.torch` is PyTorch itself.
    import_module("deepspeed.comm.torch").build_shm_op = lambda: None  # type: ignore[attr-defined]
    _import_muon()
    stage_1: Any = import_module("deepspeed.runtime.bf16_optimizer")
    # It prints the machine's memory six times during its construction.
    stage_1.see_memory_usage = lambda *_, **__: None
    # The original launches a kernel per tensor, and waits twice for the device.
    stage_1.get_global_norm_of_tensors = _norm_of_all
    # The original copies each gradient to fp32 before it adds the copy.
    stage_1.BF16_Optimizer._update_hp_grad = _add_to_sum
    # The original writes all sums, twice per step. A sum that gets a gradient is overwritten, so it may stay as it is.
    stage_1.BF16_Optimizer.clear_hp_grads = _forget_sums
    stage_1.BF16_Optimizer.get_grads_for_reduction = _sums_to_reduce
    logger.setLevel(logging.WARNING)
    # The wheel imports names of torch.distributed that newer versions of torch rename.
    warnings.filterwarnings("ignore", category=FutureWarning, message=".*torch.distributed.*is deprecated.*")
    dist.Work.wait = _timed_wait  # type: ignore[method-assign, assignment]


def _import_muon() -> None:
    """Import DeepSpeed's Muon without torch.compile, for which it asks at every start, and which takes seconds."""
    compiles = torch.compile
    torch.compile = lambda function: function  # type: ignore[assignment]
    try:
        # Older versions have no Muon.
        with suppress(ModuleNotFoundError):
            import_module("deepspeed.runtime.zero.muon.original_muon")
    finally:
        torch.compile = compiles


_waited = threading.local()
_wait = dist.Work.wait


def waited_seconds() -> float:
    """Return the seconds that this thread has waited for collectives since `prepare_deepspeed`.

    On a CPU each collective ends in such a wait, also one that overlaps with other work; the overlap does not count. On
    a GPU the device waits, and the host continues.
    """
    return getattr(_waited, "seconds", 0.0)


def _timed_wait(work: dist.Work, *arguments: Any, **named: Any) -> Any:
    started = time.monotonic()
    try:
        return _wait(work, *arguments, **named)
    finally:
        _waited.seconds = waited_seconds() + time.monotonic() - started


def _norm_of_all(input_tensors: list[torch.Tensor], norm_type: float = 2.0, mpu: None = None) -> torch.Tensor:
    """Compute the norm of stage 1's bf16 gradients, which every rank holds in full; not finite if one is not."""
    return nn.utils.get_total_norm(input_tensors, norm_type)


@torch.no_grad()
def _add_to_sum(zero_optimizer: Any, lp: torch.Tensor, group_idx: int, param_idx: int, clear_lp_grads: bool) -> None:
    """Add a parameter's bf16 gradient to its fp32 sum in one kernel; the rest is DeepSpeed's bookkeeping."""
    if lp.grad is None:
        return
    hp_grad = zero_optimizer.fp32_groups_gradients[group_idx][param_idx]
    has_gradients = zero_optimizer.fp32_groups_has_gradients[group_idx]
    # The sum holds the last step's values until the first gradient of this step.
    (hp_grad.add_ if has_gradients[param_idx] else hp_grad.copy_)(lp.grad.view(hp_grad.shape))
    lp._hp_grad = hp_grad  # type: ignore[attr-defined]
    has_gradients[param_idx] = True
    if clear_lp_grads:
        lp.grad.zero_()


def _forget_sums(zero_optimizer: Any) -> None:
    """Let the next gradients overwrite the fp32 sums of all groups."""
    for has_gradients in zero_optimizer.fp32_groups_has_gradients:
        has_gradients[:] = [False] * len(has_gradients)


@torch.no_grad()
def _sums_to_reduce(zero_optimizer: Any) -> tuple[Any, dict[str, Any]]:
    """Return the fp32 sums for the all-reduce at the end of a step; first set those without a gradient to zero."""
    groups = zip(zero_optimizer.fp32_groups_gradients, zero_optimizer.fp32_groups_has_gradients, strict=True)
    for sums, has_gradients in groups:
        for total, has_gradient in zip(sums, has_gradients, strict=True):
            if not has_gradient:
                total.zero_()
    return zero_optimizer.non_expert_gradients, {}


def look_at_the_norm_alone(zero_optimizer: Any) -> None:
    """Let stages 1 to 3 find a gradient that is not finite by its norm, which is computed anyway.

    DeepSpeed would first search all gradients, and read the result from the device.
    """
    zero_optimizer.check_overflow = lambda **_: None


def link_moments(zero_optimizer: Any) -> None:
    """Link Adam's state to each parameter's fragment, in stages 1 and 2.

    DeepSpeed does so in the first step, which is too late for a restore.
    """
    zero_optimizer._lazy_init_hp_params_optimizer_state()


def flat_partitions(zero_optimizer: Any) -> list[torch.Tensor]:
    """Return this rank's flat fp32 tensors of stage 3, which Adam updates."""
    return list(zero_optimizer.fp32_partitioned_groups_flat)


def places_in_part(parameters: Sequence[nn.Parameter], part: torch.Tensor) -> dict[nn.Parameter, int]:
    """Return where parameters begin in the whole flat tensor of stages 1 and 2: those that are in this rank's part."""
    begin = dist.get_rank() * len(part)
    mappings = {p: getattr(p, "_hp_mapping", None) for p in parameters}
    return {
        p: begin + mapping.hp_fragment_address.start - mapping.lp_fragment_address.start
        for p, mapping in mappings.items()
        if mapping is not None
    }


def parameters_of_partitions(zero_optimizer: Any) -> list[list[nn.Parameter]]:
    """Return the parameters of each of `flat_partitions`, of which it has a piece of each, in this order."""
    return list(zero_optimizer.fp16_groups)


def admit_optimizer(kind: type) -> None:
    """Let ZeRO take an optimizer of this type without a warning."""
    known = import_module("deepspeed.runtime.zero.utils").ZERO_SUPPORTED_OPTIMIZERS
    if kind not in known:
        known.append(kind)


def full_shape(parameter: nn.Parameter) -> torch.Size:
    """Return the full shape of a parameter. Stage 3 leaves an empty placeholder, with the shape in an attribute."""
    return getattr(parameter, "ds_shape", parameter.shape)


def part_size(parameter: nn.Parameter) -> int:
    """Return how many elements of a parameter each rank holds in stage 3, padding included."""
    return int(parameter.ds_tensor.numel())  # type: ignore[attr-defined]


def zero_keys() -> set[str]:
    """List the keys that DeepSpeed accepts under `zero_optimization`, with older names."""
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    fields = DeepSpeedZeroConfig.model_fields
    return set(fields) | {field.alias for field in fields.values() if field.alias}


def zero_problem(zero: dict[str, Any]) -> str | None:
    """Describe what DeepSpeed finds wrong with a `zero_optimization`: key and reason; None if it is valid."""
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
    from pydantic import ValidationError

    try:
        DeepSpeedZeroConfig(**zero)
    except ValidationError as error:
        first = error.errors()[0]
        return f"{'.'.join(str(part) for part in first['loc'])}: {first['msg']}"
    return None


def accumulate_in_fp32(parameter: torch.Tensor) -> None:
    """Sum the gradients of a bf16 parameter in fp32. torch has this attribute since 2.11."""
    parameter.grad_dtype = torch.float32


# Operations on many tensors in few kernels. torch's own optimizers use them under these names.


def lerp_all(tensors: list[torch.Tensor], ends: list[torch.Tensor], weight: float) -> None:
    """Apply tensor += weight · (end - tensor) to each tensor."""
    torch._foreach_lerp_(tensors, ends, weight)


def scale_all(tensors: list[torch.Tensor], factor: float) -> None:
    torch._foreach_mul_(tensors, factor)


def add_all(tensors: list[torch.Tensor], others: list[torch.Tensor], factor: float) -> None:
    torch._foreach_add_(tensors, others, alpha=factor)


def copy_all(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    torch._foreach_copy_(targets, sources)


@contextmanager
def build_lock(kind: type) -> Iterator[None]:
    """Let PyTorch's extension builds take locks of this `kind`; versions before 2.15 would create a file instead."""
    # Importing it looks for CUDA, and warns if there are no GPUs.
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


class KernelLock:
    """Replace `torch.utils.file_baton.FileBaton` by a kernel lock, which ends with its process.

    All processes build one after another; later ones find nothing left to do.
    """

    def __init__(self, lock_file_path: str, **_: object) -> None:
        self.path, self.held = Path(f"{lock_file_path}.flock"), ExitStack()

    def try_acquire(self) -> bool:
        self.held.enter_context(exclusive(self.path))
        return True

    def release(self) -> None:
        self.held.close()

    def wait(self) -> None:
        """Do nothing, because `try_acquire` waits."""


@contextmanager
def builds_survive_kills() -> Iterator[None]:
    """Let PyTorch's extension builds in the block use `KernelLock` instead of a lock file."""
    with build_lock(KernelLock):
        yield
