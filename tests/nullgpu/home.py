"""The home of the null GPU: an environment with torch's build for CUDA, and the stub that poses as the driver."""

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

from dist_transformer.base.errors import UserError

ROOT = Path(__file__).resolve().parents[2]
_STUB = Path(__file__).with_name("null.cpp")
# The first that has all that is used; 5 GB with CUDA's libraries.
_TORCH = "torch==2.11.0"
_ROOM = 9 * 2**30
# Triton's interpreter cannot use a later numpy.
_PACKAGES = ("coverage>=7", "numpy<2.4")


class Home:
    """A folder, made at first use and used again."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.python = folder / "venv" / "bin" / "python"

    def prepare(self) -> None:
        """
        Raises:
            UserError: a compiler, room on the disk or the packages are missing.
        """
        if shutil.which("g++") is None:
            raise UserError("the null GPU needs a C++ compiler: install g++ (Debian and Ubuntu: apt-get install g++)")
        self.folder.mkdir(parents=True, exist_ok=True)
        done = self.folder / "installed"
        wanted = "\n".join([_TORCH, *_PACKAGES, (ROOT / "pyproject.toml").read_text()])
        if not done.exists() or done.read_text() != wanted:
            if shutil.disk_usage(self.folder).free < _ROOM:
                raise UserError(f"{self.folder} has less than 9 GB of room, which torch for CUDA needs: free some")
            self._install()
            done.write_text(wanted)
        self._build()

    def environment(self, *, devices: int = 1) -> dict[str, str]:
        """Return the environment of a process that sees so many GPUs."""
        folder = str(self.folder)
        return {
            **os.environ,
            "PATH": f"{self.python.parent}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
            "LD_PRELOAD": f"{folder}/libcuda.so.1",
            "LD_LIBRARY_PATH": folder,
            "TRITON_LIBCUDA_PATH": folder,
            "NULL_CUDA_DEVICES": str(devices),
            "CUDA_MODULE_LOADING": "EAGER",
            "TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor",
            "TRITON_CACHE_DIR": f"{folder}/triton",
            "TORCHINDUCTOR_COMPILE_THREADS": "1",
            "OMP_NUM_THREADS": "1",
        }

    def _install(self) -> None:
        if not self.python.exists():
            _run([sys.executable, "-m", "venv", self.folder / "venv"], "a virtual environment cannot be made")
        pip = [self.python, "-m", "pip", "install", "--quiet"]
        _run([*pip, _TORCH], f"{_TORCH} cannot be installed from PyPI")
        _run([*pip, *_PACKAGES, "--editable", ROOT], "the project's packages cannot be installed")
        check = "import torch; assert torch.version.cuda"
        _run([self.python, "-c", check], f"{_TORCH} is no build for CUDA here: PyPI's for x86-64 Linux is")

    def _build(self) -> None:
        library = self.folder / "libcuda.so.1"
        if library.exists() and library.stat().st_mtime > _STUB.stat().st_mtime:
            return
        version = sysconfig.get_python_version()
        packages = self.folder / "venv" / "lib" / f"python{version}" / "site-packages"
        headers = [packages / "nvidia/cu13/include", packages / "triton/backends/nvidia/include"]
        options = ["-std=c++17", "-O1", "-fPIC", "-shared", "-fvisibility=default", "-D__dv(x)="]
        command = ["g++", *options, "-Wl,-soname,libcuda.so.1", *(f"-I{path}" for path in headers), _STUB]
        _run([*command, "-o", library], "the stub of the driver cannot be compiled")
        link = self.folder / "libcuda.so"
        link.unlink(missing_ok=True)
        link.symlink_to(library.name)


def _run(command: list[object], failure: str) -> None:
    done = subprocess.run(list(map(str, command)), check=False, capture_output=True, text=True)
    if done.returncode != 0:
        last = (done.stderr.strip() or done.stdout.strip() or "it said nothing").splitlines()[-1]
        raise UserError(f"{failure} ({last:.300})")
