"""Check that this machine or job is fit to train. Run it before a long job, or as the first line of one.

dist-transformer doctor --run-dir runs/mine --data data/mine
srun dist-transformer doctor --run-dir runs/mine --data data/mine

It runs in one process or under any launcher (deepspeed, srun, torchrun, mpirun), with as many processes as training
will have. It checks versions, code, GPUs, memory, disks, network, NCCL's settings and the network that NCCL uses,
InfiniBand, whether the run folder is shared and its locks work, the data, and the sums of an all-reduce and its speed
compared with the nominal rate of the ports. It prints one table and a remedy for each problem. The exit status is 1 if
something would stop training. It leaves nothing on disk. No check waits longer than --timeout; ranks that are missing
or stuck are named.
"""

import time

from dist_transformer.base.checks import check_table, failed
from dist_transformer.base.errors import UserError, say
from dist_transformer.config.command_line import Page, parse
from dist_transformer.preflight.settings import PreflightSettings
from dist_transformer.run.outputs import claim_folder
from dist_transformer.runtime.world import read_world

_GRACE_SECONDS = 3


def main() -> None:
    settings = parse(PreflightSettings, Page(text=__doc__))
    claim_folder(settings.cache_dir, "--cache-dir", (settings.run_dir, *settings.data))

    from dist_transformer.preflight.job import check_job

    world = read_world()
    try:
        checks = check_job(world, settings)
        if world.is_main:
            say(check_table(checks))
        if names := ", ".join(failed(checks)):
            raise UserError(f"not fit to train ({names}): follow the remedies above, then run doctor again")
    except UserError:
        if not world.is_main:
            # Rank 0 reports the result for all ranks. The launcher ends the other ranks when rank 0 exits.
            time.sleep(_GRACE_SECONDS)
        raise
