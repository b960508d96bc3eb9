"""The ranks of a command that shares its work."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from dist_transformer.runtime.world import World

# Commands check their arguments first, and torch costs seconds.
if TYPE_CHECKING:
    import torch


@contextmanager
def joined(
    world: World, stated: Mapping[str, Any], check: Callable[[], object], *, timeout_minutes: float = 30.0
) -> Iterator["torch.device"]:
    """Join the process group of a launch and yield the device of this rank; an error of the block is printed once.

    Args:
        stated: settings of the command, which must be equal on all ranks, with its `device`.
        check: checks what this rank can check alone, such as files.
        timeout_minutes: how long a collective waits for a rank.

    Raises:
        SystemExit: a rank was not ready, or every rank raised a UserError in the block.
        UserError: this rank is not ready and is alone.
    """
    if world.size == 1:
        # Early, because the imports below take seconds.
        check()

    from dist_transformer.runtime.agreement import require_agreement
    from dist_transformer.runtime.distributed import error_of_all
    from dist_transformer.runtime.process_group import process_group

    group = process_group(world, device_name=stated["device"], timeout_minutes=timeout_minutes, ready=check)
    with group as device, error_of_all(world):
        require_agreement(stated)
        yield device
