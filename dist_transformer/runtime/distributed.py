"""Collectives that are no-ops in a world of one."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist

from dist_transformer.base.errors import UserError, logger
from dist_transformer.base.messages import pack, unpack
from dist_transformer.runtime.world import World

T = TypeVar("T")


def world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def barrier() -> None:
    if world_size() > 1:
        dist.barrier()


def all_reduce_sum(tensor: torch.Tensor) -> torch.Tensor:
    """Sum over ranks, in place. int64 wraps around, so hashes can be summed."""
    if world_size() > 1:
        dist.all_reduce(tensor)
    return tensor


def all_gather_flat(tensor: torch.Tensor) -> torch.Tensor:
    """Return the flat tensors of all ranks, which have one size, one after another. Collective."""
    if world_size() == 1:
        return tensor
    whole = tensor.new_empty(world_size() * len(tensor))
    # As bytes, because gloo does not take every type.
    dist.all_gather_into_tensor(whole.view(torch.uint8), tensor.view(torch.uint8))
    return whole


def gather_piece(part: torch.Tensor, start: int, end: int, device: torch.device) -> torch.Tensor:
    """Return elements of the flat tensor that the parts of all ranks, of one size, make one after another. Collective.

    Args:
        end: last element, excluded; the tensor may end before.
    """
    end = min(end, world_size() * len(part))
    if world_size() == 1:
        return part[start:end].to(device)
    piece = part.new_empty(end - start, device=device)
    for owner in range(start // len(part), (end - 1) // len(part) + 1):
        at = owner * len(part)
        first, last = max(start, at), min(end, at + len(part))
        of_owner = piece[first - start : last - start]
        if owner == rank():
            of_owner.copy_(part[first - at : last - at])
        dist.broadcast(of_owner, src=owner)
    return piece


def broadcast_object(value: T) -> T:
    """Return rank 0's value on every rank. Collective: every rank must call it.

    Args:
        value: JSON value; `base.messages.pack` says what it changes. torch's own way would send pickles.
    """
    if world_size() == 1:
        return value
    message = _message(value if rank() == 0 else None)
    dist.broadcast(message, src=0)
    return _value_of(message)


def gather_objects(value: T, group: dist.ProcessGroup | None = None) -> list[T]:
    """Return every rank's value, in order of rank, on every rank of the group. Collective, as `broadcast_object` is."""
    ranks = world_size() if group is None else dist.get_world_size(group)
    if ranks == 1:
        return [value]
    message = _message(value, group)
    messages = [torch.empty_like(message) for _ in range(ranks)]
    dist.all_gather(messages, message, group=group)
    return [_value_of(each) for each in messages]


def _message(value: Any, group: dist.ProcessGroup | None = None) -> torch.Tensor:
    """Make a tensor of bytes as long as the longest one of the group, on the device that the group takes."""
    has_cpu = "cpu:" in str(dist.get_backend_config(group))
    device = torch.device("cpu") if has_cpu else torch.device("cuda", torch.cuda.current_device())
    content = pack(value)
    size = torch.tensor(len(content), device=device)
    dist.all_reduce(size, dist.ReduceOp.MAX, group)
    return torch.frombuffer(bytearray(content.ljust(int(size))), dtype=torch.uint8).to(device)


def _value_of(message: torch.Tensor) -> Any:
    return unpack(message.cpu().numpy().tobytes())


def new_cpu_group(timeout_minutes: float, ranks: Sequence[int] | None = None) -> dist.ProcessGroup | None:
    """Make a group of the given ranks (default: all) for collectives that overlap with those of the training loop.

    Collective: every rank must call it.
    """
    timeout = timedelta(minutes=timeout_minutes)
    if world_size() == 1:
        return None
    group = dist.new_group(ranks, backend="gloo", timeout=timeout)
    if dist.get_rank(group) >= 0:
        connect_ring(group)
    return group


def connect_ring(group: dist.ProcessGroup | None = None) -> None:
    """Connect the ranks of a gloo group that are neighbours: one would wait for a neighbour that dies before they talk.

    Collective: every rank of the group must call it.

    Args:
        group: None: that of all ranks.
    """
    dist.all_reduce(torch.zeros(1), group=group)


def begin_all_reduce_max(tensor: torch.Tensor, group: dist.ProcessGroup | None) -> dist.Work | None:
    """Start to compute the maximum over ranks, in place; wait for the returned work, if any, before reading it."""
    if group is None:
        return None
    # Called in every step. `dist.all_reduce` takes twice as long to return (190 µs instead of 90).
    options = dist.AllreduceOptions()
    options.reduceOp = dist.ReduceOp(dist.ReduceOp.MAX)
    return group.allreduce([tensor], options)


@contextmanager
def error_of_all(world: World) -> Iterator[None]:
    """Print a `UserError` that every rank raises in the block once, and end every rank with status 1."""
    try:
        yield
    except UserError as error:
        # Every rank is here. Rank 0 prints before any rank exits, because a launcher then kills the others.
        if world.is_main:
            logger.error(f"error: {error}")
        barrier()
        raise SystemExit(1) from None


def on_all_ranks(
    work: Callable[[], T],
    *,
    errors: tuple[type[Exception], ...] = (UserError,),
    describe: Callable[[Exception], str] = str,
    group: dist.ProcessGroup | None = None,
) -> T:
    """Do `work` on every rank; an error on one becomes the same error on all, so that no rank waits for another.

    Collective: every rank must call it.

    Args:
        group: from `new_cpu_group`, for another thread than that of the training loop.

    Returns:
        this rank's result.

    Raises:
        UserError: `describe` of the first rank's error among `errors`.
    """
    value, message = None, None
    try:
        value = work()
    except errors as error:
        message = describe(error)
    first = next((m for m in gather_objects(message, group) if m is not None), None)
    if first is not None:
        raise UserError(first)
    return cast(T, value)


def by_main(work: Callable[[], T], **how: Any) -> T | None:
    """Do `work` on rank 0, with errors as in `on_all_ranks`; return None on the others. Collective, as that is."""
    return on_all_ranks(lambda: work() if rank() == 0 else None, **how)
