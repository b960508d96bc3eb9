"""One rank of tests/data/loading/test_sharing.py: draws steps of shared data, and prints what it saw.

python worker_sharing.py DATA NODES STEPS: rank r is on node `r // (world / NODES)`. With STEPS 0 it draws until an
error.
"""

import hashlib
import itertools
import json
import os
import sys
from typing import Any

from dist_transformer.base.errors import UserError
from dist_transformer.config.settings import BatchConfig, DataConfig
from dist_transformer.data.folder import split, storage
from dist_transformer.data.loading.sharing import Sharing
from dist_transformer.runtime import node
from dist_transformer.runtime.process_group import process_group
from dist_transformer.runtime.world import read_world

BATCH = BatchConfig(max_target_tokens=256, packs_per_step=4, window_shards=1)


def count_reads() -> list[str]:
    """Count what this process reads of a data folder: shards and lengths."""
    reads: list[str] = []
    hold_verified = storage.hold_verified

    def read_shard(path: Any, stated: Any) -> Any:
        reads.append(path.name)
        return hold_verified(path, stated)

    def read_lengths(path: Any, stated: Any) -> Any:
        reads.append("/".join(path.parts[-2:]))
        return hold_verified(path, stated)

    storage.hold_verified, split.hold_verified = read_shard, read_lengths  # type: ignore[assignment]
    return reads


def main() -> None:
    data_folder, nodes, steps = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    world, reads = read_world(), count_reads()
    node._place = lambda rank: (str(rank * nodes // world.size),)
    with process_group(world, device_name="cpu", timeout_minutes=2.0):
        sharing = Sharing(skip=True, timeout_minutes=2.0)
        try:
            data = sharing.load(DataConfig(data=(data_folder,)), BATCH, seed=1)
        except UserError as error:
            print(json.dumps({"error": str(error)}), flush=True)
            return
        planned = data.plan.steps(data.plan.start(), 4)
        draw, seen, ended = sharing.draw_from(itertools.islice(planned, steps) if steps else planned), [], None
        print(json.dumps({"pid": os.getpid(), "rank": world.rank}), flush=True)
        try:
            while block := draw(3):
                batches = data.collator.micro_batches_of(block, rank=0, world_size=1)
                data.collator.pairs.forget_past()
                for step, micro_batches in zip(block, batches, strict=True):
                    digest = hashlib.sha256()
                    for micro in micro_batches:
                        digest.update(micro.batch.source.tokens_T.numpy().tobytes())
                        digest.update(micro.batch.labels_T.numpy().tobytes())
                    left_out = [shard.shard for shard in step.left_out]
                    pairs = [summary.totals.pairs for summary in step.ended]
                    seen.append([step.epoch, digest.hexdigest(), step.position.to_json(), left_out, pairs])
        except UserError as error:
            ended = str(error)
        found = {"steps": seen if steps else len(seen), "ended": ended, "reads": reads, "skipped": data.skipped}
        problems = {str(key): text for key, text in sharing.problems.items()}
        print(json.dumps({**found, "problems": problems}), flush=True)
        if ended is None:
            sharing.close()


if __name__ == "__main__":
    main()
