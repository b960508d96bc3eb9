"""Builds of DeepSpeed's kernels that a killed job does not block.

Before 2.15, PyTorch lets one process build an extension at a time by creating a file named `lock`, and removes it
afterwards. A process that is killed in between leaves it, and every later run on that machine, of any job, waits for it
forever. Later versions take a lock of the kernel's themselves.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from dist_transformer.locks import exclusive
from dist_transformer.training.engine.internals import build_lock


class KernelLock:
    """Stands in for `torch.utils.file_baton.FileBaton`: a lock of the kernel's, which ends with its process.

    All processes build one after another; those that come later find nothing left to do.
    """

    def __init__(self, lock_file_path: str, **_: object) -> None:
        self.path, self.held = Path(f"{lock_file_path}.flock"), ExitStack()

    def try_acquire(self) -> bool:
        self.held.enter_context(exclusive(self.path))
        return True

    def release(self) -> None:
        self.held.close()

    def wait(self) -> None:
        """Never needed: `try_acquire` waits."""


@contextmanager
def builds_survive_kills() -> Iterator[None]:
    """PyTorch's extension builds inside it use `KernelLock`, where they would leave a file."""
    with build_lock(KernelLock):
        yield
