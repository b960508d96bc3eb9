import gc
import subprocess
import sys
import weakref

import pytest

from dist_transformer.runtime.allocator import existing_objects_spared

_FAULTS = """
import resource, sys, threading, torch
if sys.argv[1] == "kept":
    from dist_transformer.runtime.allocator import keep_freed_memory
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


def test_objects_from_before_the_loop_are_collected_after_it() -> None:
    """Inside the loop only what it made itself is collected; an error ends the loop, too."""

    class Cycle:
        def __init__(self) -> None:
            self.itself = self

    def is_collected(cycle: "weakref.ref[Cycle]") -> bool:
        gc.collect()
        return cycle() is None

    held = Cycle()
    old = weakref.ref(held)

    def loop() -> None:
        nonlocal held
        with existing_objects_spared():
            del held
            assert not is_collected(old)
            new = weakref.ref(Cycle())
            assert is_collected(new)
            raise InterruptedError

    with pytest.raises(InterruptedError):
        loop()
    assert is_collected(old)
