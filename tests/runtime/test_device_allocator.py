import subprocess
import sys

import pytest

_FAULTS = """
import resource, sys, threading, torch
if sys.argv[1] == "kept":
    from dist_transformer.runtime.device import keep_freed_memory
    keep_freed_memory()

def use():
    for _ in range(10):
        torch.ones(2**24)  # 64 MiB
        torch.ones(2**21)

def count():
    use()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    use()
    faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)

faults = []
count()
thread = threading.Thread(target=count)
thread.start()
thread.join()
print(*faults)
"""


def faults(manner: str) -> list[int]:
    found = subprocess.run([sys.executable, "-c", _FAULTS, manner], capture_output=True, check=True)
    return [int(number) for number in found.stdout.split()]


@pytest.mark.system
@pytest.mark.skipif(sys.platform != "linux", reason="glibc's allocator")
def test_freed_blocks_are_not_zeroed_again() -> None:
    """10 blocks of 2^14 pages of 4 KiB each, in the first thread and in another; a kernel may give larger pages."""
    for kept, returned in zip(faults("kept"), faults("returned"), strict=True):
        assert kept < returned / 10
