"""Training as one rank of a job. Older scripts start this module itself: `python -m dist_transformer.train`."""

if __name__ == "__main__":
    from dist_transformer.runtime.search_path import leave_current_folder

    leave_current_folder()

    from dist_transformer.runtime.interpreter import end_at_ctrl_c, share_cores

    end_at_ctrl_c()
    share_cores()

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dist_transformer.base.errors import UserError, exit_on_user_error, say
from dist_transformer.base.streams import outlive_streams
from dist_transformer.base.urls import is_url
from dist_transformer.config.flags import parse_training
from dist_transformer.config.plain import to_plain
from dist_transformer.config.settings import EMBEDDED_CORPUS, TrainConfig
from dist_transformer.runtime.world import World, read_world
from dist_transformer.training.fault_tolerance.launcher_watch import LauncherWatch
from dist_transformer.training.fault_tolerance.signals import INTERRUPTED

if TYPE_CHECKING:
    import torch

    from dist_transformer.training.fault_tolerance.watchdog import Watchdog

_GRACE_SECONDS = 10


def main() -> None:
    launchers = LauncherWatch()
    config, dry_run = parse_arguments()
    if not dry_run:
        from dist_transformer.run.outputs import claim_folder

        inputs = (*config.corpora.data, config.deepspeed_config, config.checkpoints.init_from)
        claim_folder(config.run_dir, "--run-dir", inputs)
        claim_folder(config.corpora.cache_dir, "--cache-dir", (*inputs, config.run_dir))
    outlive_streams(remedy="training continues without these lines; metrics.jsonl in the run folder has the figures")
    world = read_world()
    if world.size == 1:
        # Early, because the imports below take seconds.
        check_data(config, world)
    # DeepSpeed looks for an accelerator at import; without a GPU, tell it not to.
    import torch

    from dist_transformer.runtime.process_group import process_group
    from dist_transformer.training.fault_tolerance.watchdog import Watchdog

    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    if dry_run:
        from dist_transformer.preflight.dry_run import require_one_process, run_dry_run

        def check() -> None:
            require_one_process(world)
            check_files(config, world)

        group = process_group(world, single=True, ready=check)
        with group as device, _failing(Watchdog(world, {}), world):
            run_dry_run(with_precision(config, device), world, device)
    elif not train(config, world, launchers):
        raise SystemExit(INTERRUPTED)


def parse_arguments() -> tuple[TrainConfig, bool]:
    return parse_training(sys.argv[1:])


def check_files(config: TrainConfig, world: World) -> None:
    """Check what one rank can check alone: DeepSpeed's settings, and that the data folders are some."""
    from dist_transformer.training.engine.ds_config import load_ds_config

    load_ds_config(config.deepspeed_config)
    check_data(config, world)


def check_data(config: TrainConfig, world: World) -> None:
    from dist_transformer.data.folder.reader import read_index

    # The others of a node get the data from its first rank.
    if world.local_rank == 0 and config.corpora.data != EMBEDDED_CORPUS:
        for place in config.corpora.data:
            if not is_url(place):
                read_index(Path(place))


def train(config: TrainConfig, world: World, launchers: LauncherWatch) -> bool:
    """Train as one rank of a job, under a watchdog and with handlers for signals and time limits.

    Returns:
        whether the run is finished; otherwise it was stopped and has saved.
    """
    import torch

    from dist_transformer.averaging.choice import next_command
    from dist_transformer.reporting.reporter import format_seconds
    from dist_transformer.runtime.agreement import require_agreement
    from dist_transformer.runtime.process_group import process_group
    from dist_transformer.training.assembly import assemble
    from dist_transformer.training.fault_tolerance.preemption import seconds_left
    from dist_transformer.training.fault_tolerance.watchdog import Phase, Watchdog, record_collectives

    limits = {
        Phase.SET_UP: 60 * config.timeouts.setup_timeout_minutes,
        Phase.STEP: 60 * config.timeouts.timeout_minutes,
        Phase.EVALUATION: 60 * config.timeouts.evaluation_timeout_minutes,
        Phase.CHECKPOINT: 60 * config.timeouts.checkpoint_timeout_minutes,
    }
    watchdog = Watchdog(world, limits).start(launchers)
    if torch.cuda.is_available():
        record_collectives(config.run_dir)
    group = process_group(
        world,
        join_minutes=config.timeouts.setup_timeout_minutes,
        timeout_minutes=config.timeouts.collective_timeout_minutes,
        single=True,
        ready=lambda: check_files(config, world),
    )
    with group as device, _failing(watchdog, world):
        watchdog.enter(Phase.SET_UP)
        require_agreement(_of_all_ranks(config))
        config = with_precision(config, device)
        trainer = assemble(config, world, device, watchdog)
        left = seconds_left(config.timeouts.walltime_minutes, age=watchdog.age) if world.is_main else None
        if left is not None:
            trainer.preemption.stop_within(left)
            trainer.reporter.say(f"time limit in {format_seconds(left)}: training saves and ends before it")
        watchdog.signals.listen()
        finished = trainer.train()
    watchdog.close()
    if finished and world.is_main:
        say(next_command(config.run_dir))
    return finished


def _of_all_ranks(config: TrainConfig) -> dict[str, Any]:
    """Return the settings that must be equal on all ranks: all but those of a node's own disk and memory."""
    from dist_transformer.training.engine.ds_config import load_ds_config

    settings = {**to_plain(config), "deepspeed": load_ds_config(config.deepspeed_config)}
    return {name: value for name, value in settings.items() if name not in ("cache_dir", "cache_gib", "memory_gib")}


def with_precision(config: TrainConfig, device: "torch.device") -> TrainConfig:
    """Choose the arithmetic if it was not given; a run in fp32 keeps it. Collective: every rank must call it."""
    from dist_transformer.run.folder import is_in_fp32
    from dist_transformer.runtime import distributed
    from dist_transformer.runtime.device import choose_precision

    choice = choose_precision(device, config.precision)
    if config.precision is None and choice == "bf16" and is_in_fp32(config.run_dir):
        choice = "fp32"
        if distributed.rank() == 0:
            say("the run is in fp32 and stays so; --precision bf16 is faster on this device")
    chosen = distributed.gather_objects(choice)
    return config.changed(precision="fp32" if "fp32" in chosen else "bf16")


@contextmanager
def _failing(watchdog: "Watchdog", world: World) -> Iterator[None]:
    """Report an error to the other ranks, and only the first one to the user."""
    from dist_transformer.training.fault_tolerance.watchdog import Phase

    try:
        yield
    except UserError as error:
        watchdog.fail(error)
        if not world.is_main:
            # Rank 0 reports an error of all ranks. The launcher ends the other ranks when rank 0 exits.
            time.sleep(_GRACE_SECONDS)
        raise
    except Exception as error:
        first = watchdog.fail(error)
        if first is not None:
            raise UserError(f"rank {world.rank} ends: {first}") from None
        raise
    except KeyboardInterrupt:
        watchdog.enter(Phase.LEAVING)
        raise


if __name__ == "__main__":
    exit_on_user_error(main, prints=False)
