"""Builds of extensions after a build that was killed."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from torch.utils import cpp_extension

from dist_transformer.training.engine.internals import KernelLock, builds_survive_kills

BUILD = """
import sys
from pathlib import Path
from torch.utils import cpp_extension
from dist_transformer.training.engine.internals import builds_survive_kills

folder = Path(sys.argv[1])
(folder / "one.cpp").write_text('extern "C" int one() { return 1; }')
(folder / "lock").touch()  # as a killed build leaves it
usual = getattr(cpp_extension, "FileBaton", None)  # newer versions of PyTorch have none
with builds_survive_kills():
    cpp_extension.load("one", [str(folder / "one.cpp")], build_directory=str(folder), is_python_module=False)
assert getattr(cpp_extension, "FileBaton", None) is usual
"""


@pytest.mark.system
@pytest.mark.skipif(shutil.which("c++") is None, reason="needs a C++ compiler")
def test_the_lock_file_of_a_killed_build_stops_no_other(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", BUILD, str(tmp_path)], timeout=300, check=False, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "one.so").exists()


@pytest.mark.system
def test_a_lock_ends_with_its_process(tmp_path: Path) -> None:
    hold = f"""
import time
from dist_transformer.training.engine.internals import KernelLock
lock = KernelLock({str(tmp_path / "lock")!r})
lock.try_acquire()
print("held", flush=True)
time.sleep(600)
"""
    holder = subprocess.Popen([sys.executable, "-c", hold], stdout=subprocess.PIPE, text=True)
    assert holder.stdout is not None
    assert holder.stdout.readline() == "held\n"
    wait = f"""
from dist_transformer.training.engine.internals import KernelLock
assert KernelLock({str(tmp_path / "lock")!r}).try_acquire()
"""
    waiter = subprocess.Popen([sys.executable, "-c", wait])
    with pytest.raises(subprocess.TimeoutExpired):
        waiter.wait(timeout=5)
    holder.kill()
    assert waiter.wait(timeout=60) == 0
    holder.wait()
    lock = KernelLock(str(tmp_path / "lock"))
    assert lock.try_acquire()
    lock.release()


def test_a_pytorch_that_leaves_no_file_is_left_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch 2.15 and later have no such file."""
    monkeypatch.delattr(cpp_extension, "FileBaton", raising=False)
    with builds_survive_kills():
        assert not hasattr(cpp_extension, "FileBaton")
    assert not hasattr(cpp_extension, "FileBaton")
