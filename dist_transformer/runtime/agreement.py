"""Ranks of a launch that join and agree: one command, one code, one set of libraries."""

import json
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from dist_transformer.base.errors import UserError
from dist_transformer.runtime.extensions import IMPORTED
from dist_transformer.runtime.versions import hash_of_code, versions
from dist_transformer.runtime.world import World

# Commands check their arguments first, and torch costs seconds.
if TYPE_CHECKING:
    import torch

# Launchers give each rank its own, and Python's patch releases compute the same.
_OWN = ("local_rank", "python")


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

    from dist_transformer.runtime.distributed import error_of_all
    from dist_transformer.runtime.process_group import process_group

    group = process_group(world, device_name=stated["device"], timeout_minutes=timeout_minutes, ready=check)
    with group as device, error_of_all(world):
        require_agreement(stated)
        yield device


def require_agreement(stated: Mapping[str, Any]) -> None:
    """Refuse a launch whose ranks were started with different settings, code or libraries, which would go unnoticed.

    Collective: every rank must call it.

    Args:
        stated: what must be equal on all ranks: JSON values, or values with a text, such as paths.

    Raises:
        UserError: on all ranks; the error names the first difference.
    """
    from dist_transformer.runtime.distributed import gather_objects, world_size

    if world_size() == 1:
        return
    difference = first_difference(gather_objects((socket.gethostname(), statement_of(stated))))
    if difference is not None:
        raise UserError(
            f"the ranks were started differently ({difference}): use the same command, code and libraries on all ranks"
        )


def statement_of(stated: Mapping[str, Any]) -> dict[str, str]:
    """Return what is compared: `stated`, versions, code and extensions, as JSON by dotted name."""
    extensions = {f"--import {name}": code for name, code in IMPORTED.items()}
    values = {**versions(), "code": hash_of_code(), **extensions, **stated}
    flat = {name: json.dumps(value, sort_keys=True, default=str) for name, value in flattened(values).items()}
    return {name: text for name, text in flat.items() if name not in _OWN}


def first_difference(statements: Sequence[tuple[str, Mapping[str, str]]]) -> str | None:
    """Describe the first name whose values differ between rank 0 and the next rank with another value; None if equal.

    Args:
        statements: host and statement of each rank.
    """
    host, first = statements[0]
    for rank, (other_host, other) in enumerate(statements):
        for name in (*first, *other):
            if first.get(name) != other.get(name):
                ours, theirs = (each.get(name, "not given") for each in (first, other))
                return f"{name} is {ours:.100} on rank 0 ({host}) and {theirs:.100} on rank {rank} ({other_host})"
    return None


def flattened(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return values by dotted name."""
    flat: dict[str, Any] = {}
    for name, value in values.items():
        inner = isinstance(value, Mapping)
        flat |= flattened(value, f"{prefix}{name}.") if inner else {f"{prefix}{name}": value}
    return flat
