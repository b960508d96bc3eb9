"""Rules about the code itself; import-linter and ruff check others, which pyproject.toml lists."""

import ast
import importlib.util
import json
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


# Run in a process of its own: each module is imported where network, command line and child processes are refused, and
# what changed is printed.
IMPORT_ALL = """
import importlib, json, os, socket, subprocess, sys

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
failures = {}
for module in modules:
    try:
        importlib.import_module(module)
    except BaseException as error:
        failures[module] = repr(error)
import torch
print(json.dumps({
    "failures": failures,
    "environment": sorted(set(environment.items()) ^ set(os.environ.items())),
    "files": sorted(os.listdir(".")) != files,
    "threads": torch.get_num_threads() != threads,
    "group": torch.distributed.is_initialized(),
    "late": sorted({"deepspeed", "mpi4py", "transformers", "matplotlib", "jinja2"} & set(sys.modules)),
}))
"""


def test_importing_does_nothing_else(tmp_path: Path) -> None:
    libraries = [
        "torch",
        "datasets",
        "tokenizers",
        "safetensors.torch",
        "sacrebleu",
        "tqdm",
        "pyarrow",
        "numpy",
    ]
    # The kernels are imported where Triton is, which comes with torch for CUDA.
    modules = [name for name in MODULES if importlib.util.find_spec("triton") or not name.endswith(".gpu_kernels")]
    # This process has imported the package: what that may have set must not be there already.
    inherited = {name: os.environ[name] for name in ("PATH", "HOME", "PYTHONPATH", "LANG") if name in os.environ}
    done = subprocess.run(
        [sys.executable, "-c", IMPORT_ALL, ",".join(libraries), ",".join(modules)],
        cwd=tmp_path,
        env=inherited,
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert json.loads(done.stdout) == {
        "failures": {},
        "environment": [],
        "files": False,
        "threads": False,
        "group": False,
        # They cost seconds, so they are imported where they are used.
        "late": [],
    }


def beside_main(path: Path) -> list[str]:
    """Give what a tool does before `main`: it would run when the file is imported, or before the first line's check."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    allowed = ast.Import | ast.ImportFrom | ast.FunctionDef | ast.ClassDef | ast.Assign | ast.AnnAssign
    last, others = tree.body[-1], [node for node in tree.body[2:-1] if not isinstance(node, allowed)]
    values = [node for node in tree.body if isinstance(node, ast.Assign | ast.AnnAssign)]
    others += [node for node in values if re.search(r"sys\.argv|parse_args", ast.unparse(node))]
    others += [] if ast.unparse(last).startswith("if __name__ == '__main__':") else [last]
    return [*map(ast.unparse, others), *([] if ast.get_docstring(tree) else ["it has no docstring"])]


def test_a_tool_is_its_main_alone() -> None:
    assert offenders(TOOLS, beside_main) == {}
