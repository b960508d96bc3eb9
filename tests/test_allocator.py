import subprocess
import sys

import pytest

_FAULTS = """
import resource, sys, threading, torch
if sys.argv[1] == "kept":
    from dist_transformer.allocator import keep_freed_memory
    keep_freed_memory()

def use():
    for _ in range(10):
        torch.ones(2**24)  # 64 MiB
        torch.ones(2**21)

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for run in (use, lambda: [t.start() or t.join() for t in [threading.Thread(target=use)]]):
        run()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

use()
print(faults())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's allocator")
def test_freed_blocks_are_not_zeroed_again() -> None:
    """20 blocks of 2^14 pages of 4 KiB each, in two threads; a kernel may give larger pages."""
    found = {
        manner: int(subprocess.run([sys.executable, "-c", _FAULTS, manner], capture_output=True, check=True).stdout)
        for manner in ("returned", "kept")
    }
    assert found["kept"] < found["returned"] / 4
