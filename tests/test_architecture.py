"""Rules about the code itself; import-linter and ruff check others, which pyproject.toml lists."""

import importlib.util
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "dist_transformer"
MODULES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for path in sorted(PACKAGE.rglob("*.py"))
}
TOOLS = sorted((ROOT / "tools").glob("[a-z]*.py"))
BENCHMARKS = sorted((ROOT / "benchmarks").rglob("*.py"))
SOURCES = [*MODULES.values(), *BENCHMARKS, *TOOLS]


def offenders(files: Iterable[Path], rule: Callable[[Path], list[str]]) -> dict[Path, list[str]]:
    """Give what breaks a rule, by the file that breaks it: one test shows all of them."""
    return {path: found for path in files if (found := rule(path))}


# A folder with more modules is two rooms; but cli/ has one for each command.
MOST_MODULES = 14


def test_no_folder_holds_many_modules() -> None:
    modules = Counter(path.parent for path in MODULES.values() if path.name != "__init__.py")
    del modules[PACKAGE / "cli"]
    assert {str(folder): count for folder, count in modules.items() if count > MOST_MODULES} == {}


def lines_with(pattern: re.Pattern[str], path: Path) -> list[str]:
    return [line.strip() for line in path.read_text(encoding="utf-8").splitlines() if pattern.search(line)]


# That nothing else is imported there is a contract of import-linter.
IMPURE = re.compile(r"\btorch\.(distributed|optim|load|save)\b|(?<![.\w])(open|print|input)\(")


def test_the_model_is_pure_torch() -> None:
    assert offenders((PACKAGE / "model").rglob("*.py"), lambda path: lines_with(IMPURE, path)) == {}


# Ruff forbids what reads or writes pickles, where a name shows it. Methods of mpi4py and np.load show it not.
PICKLING = re.compile(r"\.(bcast|allgather|alltoall)\(|\bnp\.load\((?!.*allow_pickle=False)")


def test_nothing_is_pickled() -> None:
    assert offenders(SOURCES, lambda path: lines_with(PICKLING, path)) == {}


# They try what a folder lets them do, open /dev/null, or make links for processes in a folder of their own.
WRITERS = {f"dist_transformer.{name}" for name in ("base.files", "base.locks", "base.streams")}
WRITERS |= {"dist_transformer.preflight.job", "dist_transformer.runtime.processes"}
WRITING = re.compile(
    r"\.(write_text|write_bytes|touch|rename|symlink_to|hardlink_to)\(|\bopen\(.*[\"'][wax]b?[\"']"
    r"|\bos\.open\(|shutil\.(copy|move)|\b(save_file|open_memmap)\("
)


def test_files_are_written_in_one_way() -> None:
    """A file that is written by hand is torn after a crash, or 0 bytes after a loss of power."""
    by_hand = [path for name, path in MODULES.items() if name not in WRITERS and "whole_path(" not in path.read_text()]
    assert offenders(by_hand, lambda path: lines_with(WRITING, path)) == {}


# Modules are split by stage; 400 lines is the aim, and this is the bound.
LONGEST = 435


def test_no_module_is_long() -> None:
    lengths = {str(path): len(path.read_text(encoding="utf-8").splitlines()) for path in SOURCES}
    assert {path: lines for path, lines in lengths.items() if lines > LONGEST} == {}


# Run in a process of its own: each module is imported where network, command line and child processes are refused.
IMPORT_ALL = """
import importlib, os, socket, subprocess, sys

class Refused(list):
    def refuse(self, *_):
        raise RuntimeError("reads the command line at import")
    __getitem__ = __iter__ = __len__ = refuse

def refuse(*_, **__):
    raise RuntimeError("uses network or processes at import")

# Libraries may do as they like at their import; the project's modules come after.
for library in sys.argv[1].split(","):
    importlib.import_module(library)
modules = sys.argv[2].split(",")
environment, threads = dict(os.environ), __import__("torch").get_num_threads()
files = sorted(os.listdir("."))
sys.argv = Refused()
socket.socket.connect = socket.create_connection = socket.getaddrinfo = refuse
subprocess.Popen.__init__ = os.system = os.fork = refuse
for module in modules:
    importlib.import_module(module)
import torch
assert dict(os.environ) == environment
assert sorted(os.listdir(".")) == files
assert torch.get_num_threads() == threads and not torch.distributed.is_initialized()
# They cost seconds, so they are imported where they are used.
late = {"deepspeed", "mpi4py", "transformers", "matplotlib", "jinja2"} & set(sys.modules)
assert not late, late
"""


def test_importing_does_nothing_else(tmp_path: Path) -> None:
    libraries = ["torch", "datasets", "tokenizers", "safetensors.torch", "sacrebleu", "tqdm", "pyarrow", "numpy"]
    # The kernels are imported where Triton is, which comes with torch for CUDA.
    modules = [name for name in MODULES if importlib.util.find_spec("triton") or not name.endswith(".gpu_kernels")]
    # This process has imported the package: what that may have set must not be there already.
    inherited = {name: os.environ[name] for name in ("PATH", "HOME", "PYTHONPATH", "LANG") if name in os.environ}
    words = [sys.executable, "-c", IMPORT_ALL, ",".join(libraries), ",".join(modules)]
    subprocess.run(words, cwd=tmp_path, env=inherited, check=True, timeout=600)


SCRIPT = r'"""`\S+` as a script."""\n\nif __name__ == "__main__":\n    from _start import run\n\n    run.".*".\n'


def test_a_tool_is_its_main_alone() -> None:
    """More would run when it is imported."""
    assert [path for path in TOOLS if not re.fullmatch(SCRIPT, path.read_text("utf-8"))] == []
