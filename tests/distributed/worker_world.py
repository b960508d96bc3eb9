"""One rank of tests/runtime/test_distributed.py: finds its world, all-reduces over gloo, and prints what it saw."""

import json
import math
import sys
from collections.abc import Callable

import torch
import torch.distributed as dist

from dist_transformer.base.errors import UserError
from dist_transformer.runtime import distributed
from dist_transformer.runtime.process_group import process_group
from dist_transformer.runtime.world import read_world


def fail_on(rank: int, own: int) -> None:
    if own == rank:
        raise UserError("disk full")


def error_of(work: Callable[[], None]) -> str:
    try:
        distributed.on_all_ranks(work)
    except UserError as error:
        return str(error)
    return "none"


def main() -> None:
    world = read_world()
    with process_group(world, timeout_minutes=1.0) as device:
        # 2^63 - 1 plus one on every rank: int64 sums wrap around, as the ledger's hashes need.
        total = distributed.all_reduce_sum(torch.tensor([world.rank + 1, 2**63 - 1], device=device))
        seen = {
            "rank": world.rank,
            "size": world.size,
            "local_rank": world.local_rank,
            "local_size": world.local_size,
            "is_main": world.is_main,
            "group": [distributed.rank(), distributed.world_size()],
            "sums": total.tolist(),
            "from_rank_0": distributed.broadcast_object(f"rank {world.rank}"),
            "gathered": distributed.gather_objects(world.rank),
            "lists": repr(distributed.gather_objects((math.inf, {"own": world.rank}))),
            "long": [len(text) for text in distributed.gather_objects("ü" * 100_000 * world.rank)],
            "own_result": distributed.on_all_ranks(lambda: world.rank),
            "error": error_of(lambda: fail_on(1, world.rank)),
        }
        distributed.barrier()
    seen["left"] = not dist.is_initialized()
    # One write a rank, so that lines do not mix.
    sys.stdout.write(json.dumps(seen) + "\n")


if __name__ == "__main__":
    main()
