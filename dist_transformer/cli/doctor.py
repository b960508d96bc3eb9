"""Is this machine, or this job, fit to train? Run it before a long job, or as the first line of one.

dist-transformer doctor --run-dir runs/mine --data data/mine
srun dist-transformer doctor --run-dir runs/mine --data data/mine

Alone or under any launcher (deepspeed, srun, torchrun, mpirun), with as many processes as training will have: versions,
code, GPUs and the CPUs beside them, memory, disks, network, NCCL's settings, InfiniBand, clocks, a shared run folder
with locks that hold, the data, and an all-reduce whose sums are checked and timed. Prints one table, and a remedy for
each problem; the exit status is 1 when something would stop training. Nothing stays on disk. Nothing waits longer than
--timeout: ranks that are missing or stuck are named.
"""

import argparse
import time
from pathlib import Path

from tqdm import tqdm

from dist_transformer.checks import check_table, failed
from dist_transformer.cli.parser import make_parser
from dist_transformer.errors import UserError, say
from dist_transformer.preflight.preflight import PreflightSettings, preflight
from dist_transformer.runtime.world import read_world

_GRACE_SECONDS = 3


def main() -> None:
    settings = parse_arguments()
    world = read_world()
    try:
        with tqdm(bar_format="{desc}", disable=None if world.is_main else True, leave=False) as bar:
            checks = preflight(world, settings, progress=bar.set_description_str)
        if world.is_main:
            say(check_table(checks))
        if names := ", ".join(failed(checks)):
            raise UserError(f"not fit to train ({names}): follow the remedies above, and run this again")
    except UserError:
        if not world.is_main:
            # What all ranks found, rank 0 says once: the launcher ends the others when it exits.
            time.sleep(_GRACE_SECONDS)
        raise


def parse_arguments() -> PreflightSettings:
    parser = make_parser(__doc__)
    parser.add_argument("--run-dir", type=Path, metavar="RUN", help="run folder of the training (default: not checked)")
    parser.add_argument(
        "--data", nargs="+", default=[], metavar="DATA", help="data folders or their URLs (default: not checked)"
    )
    parser.add_argument(
        "--verify-data", action="store_true", help="also check the SHA-256 of every file, shared among the processes"
    )
    parser.add_argument("--cache-dir", type=Path, metavar="DIR", help="cache of shards behind URLs (default: ~/.cache)")
    parser.add_argument(
        "--run-gib", type=float, default=20.0, metavar="G", help="GiB that the run folder must have free (default: 20)"
    )
    parser.add_argument(
        "--timeout",
        type=float,
        default=120.0,
        metavar="S",
        help="seconds for all processes to come, and for each check (default: 120)",
    )
    # DeepSpeed's launcher adds this one; the environment says the same.
    parser.add_argument("--local_rank", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    # Not a number is neither.
    if not (arguments.timeout > 0 and arguments.run_gib >= 0):
        parser.error("--timeout must be above 0, and --run-gib 0 or above")
    if arguments.verify_data and not arguments.data:
        parser.error("--verify-data needs --data: name the folders")
    return PreflightSettings(
        run_dir=arguments.run_dir,
        data=tuple(arguments.data),
        cache_dir=arguments.cache_dir,
        verify_data=arguments.verify_data,
        run_gib=arguments.run_gib,
        timeout_seconds=arguments.timeout,
    )
