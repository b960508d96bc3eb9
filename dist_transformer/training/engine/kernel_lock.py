"""Keep a killed job from blocking later builds of DeepSpeed's kernels.

Before 2.15, PyTorch lets one process build an extension at a time by creating a file named `lock`, and removes it
afterwards. A process that is killed in between leaves the file, and every later run on that machine, of any job, waits
for it forever. Later versions use a kernel lock themselves.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from dist_transformer.base.locks import exclusive
from dist_transformer.training.engine.internals import build_lock


class KernelLock:
    """Replace `torch.utils.file_baton.FileBaton` by a kernel lock, which ends with its process.

    All processes build one after another; later ones find nothing left to do.
    """

    def __init__(self, lock_file_path: str, **_: object) -> None:
        self.path, self.held = Path(f"{lock_file_path}.flock"), ExitStack()

    def try_acquire(self) -> bool:
        self.held.enter_context(exclusive(self.path))
        return True

    def release(self) -> None:
        self.held.close()

    def wait(self) -> None:
        """Do nothing, because `try_acquire` waits."""


@contextmanager
def builds_survive_kills() -> Iterator[None]:
    """Let PyTorch's extension builds in the block use `KernelLock` instead of a lock file."""
    with build_lock(KernelLock):
        yield
