"""Check that this machine or job is fit to train. Run it before a long job, or as the first line of one.

dist-transformer doctor --run-dir runs/mine --data data/mine
srun dist-transformer doctor --run-dir runs/mine --data data/mine

It runs in one process or under any launcher (deepspeed, srun, torchrun, mpirun), with as many processes as training
will have. It checks versions, code, GPUs, their speed and the CPUs close to them, memory, open files, disks, network,
NCCL's settings and the network that NCCL uses, InfiniBand, clocks, whether the run folder is shared and its locks work,
the data, and the sums of an all-reduce and its speed compared with the nominal rate of the ports. It prints one table
and a remedy for each problem. The exit status is 1 if something would stop training. It leaves nothing on disk. No
check waits longer than --timeout; ranks that are missing or stuck are named.
"""

import argparse
import time
from pathlib import Path
from typing import TYPE_CHECKING

from tqdm import tqdm

from dist_transformer.base.checks import check_table, failed
from dist_transformer.base.errors import UserError, say
from dist_transformer.base.paths import usable_place
from dist_transformer.cli.parser import make_parser
from dist_transformer.run.outputs import claim_folder
from dist_transformer.runtime.world import read_world

if TYPE_CHECKING:
    from dist_transformer.preflight.preflight import PreflightSettings

_GRACE_SECONDS = 3


def main() -> None:
    settings = parse_arguments()

    from dist_transformer.preflight.preflight import preflight

    world = read_world()
    try:
        with tqdm(bar_format="{desc}", disable=None if world.is_main else True, leave=False) as bar:
            checks = preflight(world, settings, progress=bar.set_description_str)
        if world.is_main:
            say(check_table(checks))
        if names := ", ".join(failed(checks)):
            raise UserError(f"not fit to train ({names}): follow the remedies above, then run doctor again")
    except UserError:
        if not world.is_main:
            # Rank 0 reports the result for all ranks. The launcher ends the other ranks when rank 0 exits.
            time.sleep(_GRACE_SECONDS)
        raise


def parse_arguments() -> "PreflightSettings":
    parser = make_parser(__doc__)
    parser.add_argument("--run-dir", type=Path, metavar="RUN", help="run folder of the training (default: not checked)")
    parser.add_argument(
        "--data",
        nargs="+",
        type=usable_place,
        default=[],
        metavar="DATA",
        help="data folders or their URLs (default: not checked)",
    )
    parser.add_argument(
        "--verify-data", action="store_true", help="also check the SHA-256 of every file, shared among the processes"
    )
    parser.add_argument("--cache-dir", type=Path, metavar="DIR", help="cache of shards behind URLs (default: ~/.cache)")
    text = "free space in GiB that the run folder must have (default: 20)"
    parser.add_argument("--run-gib", type=float, default=20.0, metavar="G", help=text)
    parser.add_argument(
        "--timeout",
        type=float,
        default=120.0,
        metavar="S",
        help="seconds until all processes have joined, and for each check (default: 120)",
    )
    # DeepSpeed's launcher adds this flag; the environment has the same value.
    parser.add_argument("--local_rank", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()

    from dist_transformer.preflight.preflight import PreflightSettings

    # Negated, so that NaN is refused too.
    if not (arguments.timeout > 0 and arguments.run_gib >= 0):
        parser.error("--timeout must be above 0, and --run-gib 0 or above")
    if arguments.verify_data and not arguments.data:
        parser.error("--verify-data needs --data: name the folders")
    claim_folder(arguments.cache_dir, "--cache-dir", (arguments.run_dir, *arguments.data))
    return PreflightSettings(
        run_dir=arguments.run_dir,
        data=tuple(arguments.data),
        cache_dir=arguments.cache_dir,
        verify_data=arguments.verify_data,
        run_gib=arguments.run_gib,
        timeout_seconds=arguments.timeout,
    )
