"""Is the launcher that started this rank still there? Killed with -9, it leaves its ranks running."""

import os
from pathlib import Path

# DeepSpeed has two processes above a rank, torchrun one. SLURM and MPI end the ranks that they started themselves.
_LAUNCHERS = {"deepspeed", "deepspeed.launcher.launch", "torchrun", "torch.distributed.run"}
# `python -u -m deepspeed.launcher.launch` is the longest way to say it.
_WORDS = 4


class LauncherWatch:
    """The launchers above this process, as they were at its start.

    By parent, not by `PR_SET_PDEATHSIG`: that says nothing of the launcher's own parent, and it would also end a run
    whose shell was closed.
    """

    def __init__(self) -> None:
        self._parents: list[tuple[int, int]] = []
        child = os.getpid()
        while (parent := _parent_of(child)) and _is_launcher(parent):
            self._parents.append((child, parent))
            child = parent

    def gone(self) -> int | None:
        """The process id of a launcher that has ended, if one has."""
        # A process whose parent has ended gets another one at once, also where nobody collects the dead.
        return next((parent for child, parent in self._parents if _parent_of(child) != parent), None)


def _parent_of(process: int) -> int | None:
    try:
        fields = Path(f"/proc/{process}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    except OSError:
        return None
    return int(fields[1])


def _is_launcher(process: int) -> bool:
    try:
        words = Path(f"/proc/{process}/cmdline").read_text(encoding="utf-8", errors="replace").split("\0")
    except OSError:
        return False
    return any(Path(word).name in _LAUNCHERS for word in words[:_WORDS])
