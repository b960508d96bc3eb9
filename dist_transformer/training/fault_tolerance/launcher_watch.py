"""Notice when the launcher that started this rank has ended; if it is killed with -9, its ranks keep running."""

import os
from pathlib import Path

from dist_transformer.runtime.launch import CALLER_VARIABLE, LAUNCH_VARIABLE, NODE_LAUNCHER, command_of, parent_of

# DeepSpeed has two processes above a rank, torchrun one. SLURM and MPI end the ranks that they started themselves.
# `dist-transformer train --processes N` runs above `deepspeed`.
_LAUNCHERS = {"deepspeed", NODE_LAUNCHER, "torchrun", "torch.distributed.run", "dist-transformer", "dist_transformer"}
# `python -u -m deepspeed.launcher.launch` has the most words.
_WORDS = 4
_INIT = 1


class LauncherWatch:
    """The launchers above this process. Create it first of all, because a launcher may end soon.

    It watches parents instead of using `PR_SET_PDEATHSIG`, which does not cover the launcher's own parent, and would
    also end a run whose shell was closed.
    """

    def __init__(self) -> None:
        self._parents: list[tuple[int, int]] = []
        child = os.getpid()
        # A program that called `dist_transformer.api.train` may have any name.
        caller = os.environ.get(CALLER_VARIABLE)
        while (parent := parent_of(child)) and (_is_launcher(parent) or str(parent) == caller):
            self._parents.append((child, parent))
            child = parent
        self._orphan = child if _is_orphan(child, parent) or _lost_its_launch() else None

    def gone(self) -> str | None:
        """Return which launcher has ended; None if all are running."""
        if self._orphan is not None:
            return f"the launcher of process {self._orphan}"
        # A process whose parent has ended gets another parent at once, even if no process collects the dead one.
        ended = next((parent for child, parent in self._parents if parent_of(child) != parent), None)
        return None if ended is None else f"its launcher, process {ended},"


def _is_launcher(process: int) -> bool:
    return any(Path(word).name in _LAUNCHERS for word in command_of(process)[:_WORDS])


def _lost_its_launch() -> bool:
    """Recognize a rank of `--processes` whose parent ended before it began to watch."""
    _, _, process = os.environ.get(LAUNCH_VARIABLE, "").rpartition(" ")
    return process not in ("", str(os.getppid()))


def _is_orphan(process: int, parent: int | None) -> bool:
    """Recognize a node's launcher whose `deepspeed` ended before this process began."""
    words = command_of(process)
    is_node_launcher = NODE_LAUNCHER in {Path(word).name for word in words[:_WORDS]}
    # A launcher with --node_rank has no `deepspeed` above it: ssh or SLURM started it.
    return parent == _INIT and is_node_launcher and not any(word.startswith("--node_rank") for word in words)
