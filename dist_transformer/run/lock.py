"""The lock of a run folder: one training at a time writes to it."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

from dist_transformer.base.sole_writer import PATIENCE_SECONDS, Fence, Words, sole_writer


def sole_training(
    run_dir: Path, note: Callable[[str], None], *, patience: float = PATIENCE_SECONDS
) -> AbstractContextManager[Fence]:
    """Lock a run folder as `sole_writer` does, and yield the fence of its holder.

    Raises:
        UserError: another process holds the folder; the error gives host, process and time.
    """
    words = Words(
        in_use=lambda holder: (
            f"{run_dir} is in use by {holder}: wait until that run ends, or end it (ranks may outlive the launcher "
            "that started them), or choose another --run-dir"
        ),
        lost=(
            f"lost the lock on {run_dir}, whose lock file was removed or replaced; another training may use the "
            "folder, so nothing more is written: rerun this command when the folder is free, and never remove the lock "
            "file of a running training"
        ),
        unlocked=(
            "make sure that no other run writes to this folder; if two do, the one that started first stops at its "
            "next save"
        ),
    )
    return sole_writer(run_dir, words, note, patience=patience)
