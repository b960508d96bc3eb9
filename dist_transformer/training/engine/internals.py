"""Undocumented parts of DeepSpeed and torch that the project uses, each with the reason.

Those that sum gradients are in `gradient_sums`. A new version may change them:
`tests/training/engine/test_internals.py` checks them in the installed versions, and fails if one is gone.
"""

import logging
import math
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
from dist_transformer.training.engine import gradient_sums


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
    gradient_sums.replace_those_of(stage_1.BF16_Optimizer)
    # The originals wait for the device, to skip a step whose norm is not finite; our optimizers skip it by `found_inf`.
    stage_1.clip_tensors_by_global_norm = _clip
    for module in map(import_module, _WAITING_MODULES):
        module.is_invalid_grad_norm = lambda _: False  # type: ignore[attr-defined]
        module.mask_nan_or_inf_with_val_inplace = _mask  # type: ignore[attr-defined]
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


_WAITING_MODULES = (
    "deepspeed.runtime.bf16_optimizer",
    "deepspeed.runtime.zero.stage_1_and_2",
    "deepspeed.runtime.zero.stage3",
)

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


def _mask(norm: torch.Tensor, device: torch.device | None = None) -> None:
    """Replace a norm that is not finite by -1, in place, with a number that is not copied from the host."""
    norm.masked_fill_(~norm.isfinite(), -1.0)


@torch.no_grad()
def _clip(input_tensors: list[torch.Tensor], max_norm: float, global_norm: torch.Tensor, mpu: None = None) -> None:
    """Shorten the gradient to `max_norm`."""
    scale_all(input_tensors, (max_norm / (global_norm + 1e-6)).clamp(max=1.0))


def skip_by_norm(zero_optimizer: Any, optimizer: torch.optim.Optimizer, *, on_host: bool) -> None:
    """Let the optimizer of stages 1 to 3 skip a step whose norm is not finite, by its attribute `found_inf`.

    Args:
        on_host: the optimizer updates on the host, and must wait for the gradient anyway.
    """

    def note(*_: Any) -> None:
        norm = getattr(zero_optimizer, "_global_grad_norm", None)
        optimizer.found_inf = found_inf(norm) if torch.is_tensor(norm) else None  # type: ignore[attr-defined]

    def step_on_host(*arguments: Any) -> None:
        note()
        if not optimizer.found_inf:  # type: ignore[attr-defined]
            for group in optimizer.param_groups:
                group["lr"] = float(group["lr"])
            update(*arguments)

    update = optimizer.step
    if on_host:
        optimizer.step = step_on_host  # type: ignore[method-assign, assignment]
    else:
        optimizer.register_step_pre_hook(note)


def found_inf(norm: torch.Tensor) -> torch.Tensor:
    """Return 1 if the norm of a gradient is not finite or DeepSpeed's -1 in place of that, otherwise 0, fp32."""
    return 1 - ((norm >= 0) & (norm < math.inf)).float()


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


def tensor_access() -> Any:
    """Return DeepSpeed's functions that read and write a parameter's tensors at stages 1 to 3."""
    from deepspeed import utils

    return utils


def flat_tensors(zero_optimizer: Any) -> list[tuple[dict[nn.Parameter, int], torch.Tensor]]:
    """Return, for each flat tensor of stages 1 and 2, where each parameter begins in it, and this rank's fp32 part."""
    # Stage 1 in bf16 is a class of its own.
    names = ("bf16_groups_flat", "bf16_groups", "fp32_groups_flat_partition")
    if not hasattr(zero_optimizer, names[0]):
        names = ("bit16_groups_flat", "bit16_groups", "single_partition_of_fp32_groups")
    return [
        ({p: p.storage_offset() - flat.storage_offset() for p in parameters}, part)
        for flat, parameters, part in zip(*(getattr(zero_optimizer, name) for name in names), strict=True)
    ]


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


# Operations on many tensors in few kernels. torch's own optimizers use them under these names.


def lerp_all(tensors: list[torch.Tensor], ends: list[torch.Tensor], weight: float | torch.Tensor) -> None:
    """Apply tensor += weight · (end - tensor) to each tensor."""
    torch._foreach_lerp_(tensors, ends, [weight] * len(tensors) if torch.is_tensor(weight) else weight)


def scale_all(tensors: list[torch.Tensor], factor: float | torch.Tensor) -> None:
    torch._foreach_mul_(tensors, factor)


def descend_all(
    tensors: list[torch.Tensor],
    gradients: list[torch.Tensor],
    *,
    rate: float | torch.Tensor,
    means: Sequence[torch.Tensor] = (),
    momentum: float = 0.0,
    weight_decay: float = 0.0,
    found_inf: torch.Tensor | None,
) -> None:
    """Apply tensor -= rate · (weight_decay · tensor + gradient) to each tensor, by the kernel of torch's SGD.

    Args:
        means: first mean += (1 - momentum) · (gradient - mean), and then the mean is the gradient.
        found_inf: 1 on the device if nothing must change.
    """
    torch._fused_sgd_(
        tensors,
        gradients,
        list(means),
        weight_decay=weight_decay,
        momentum=momentum,
        lr=rate,
        dampening=momentum,
        nesterov=False,
        maximize=False,
        is_first_step=False,
        grad_scale=None,
        found_inf=found_inf,
    )


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
