"""Tensors without values that claim to lie on a GPU, on a machine that has none.

torch works out shapes, types and devices of fake tensors and computes nothing. So the very code that a GPU runs can be
run here as far as this: an operation raises that mixes devices, or that needs a value on the host, where a GPU would
make it wait and a CUDA graph could not be recorded. Gradients cannot be followed: autograd wants a real stream.
"""

import ctypes
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import pytest
import torch
from torch._subclasses import FakeTensorMode

# As little as torch asks of a device before it looks whether a tensor is fake.
_GUARD = """
#include <c10/core/impl/DeviceGuardImplInterface.h>
using Guard = c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::CUDA>;
C10_REGISTER_GUARD_IMPL(CUDA, Guard);
"""


@cache
def register_guard(folder: Path) -> None:
    compiler, torch_path = shutil.which("g++"), Path(torch.__file__).parent
    if compiler is None or torch.version.cuda is not None:
        pytest.skip("needs a C++ compiler and a torch without CUDA")
    source, library = folder / "guard.cpp", folder / "guard.so"
    source.write_text(_GUARD)
    options = ["-std=c++20", "-fPIC", "-shared", f"-I{torch_path / 'include'}", f"-L{torch_path / 'lib'}"]
    subprocess.run([compiler, *options, str(source), "-o", str(library), "-lc10"], check=True)
    ctypes.CDLL(str(library))


@contextmanager
def fake_cuda(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[torch.device]:
    """Within, tensors that are made on this device are fake, of a GPU that has bf16 and fused attention.

    Args:
        folder: for a library of a few lines, which is made once in a process.
    """
    register_guard(folder)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    with FakeTensorMode():
        # With its number: torch would ask CUDA for the current one.
        yield torch.device("cuda:0")
