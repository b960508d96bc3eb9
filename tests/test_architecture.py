"""Rules about the code itself, read from its syntax trees."""

import ast
import functools
import graphlib
import importlib.util
import json
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "dist_transformer"
MODULES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for path in sorted(PACKAGE.rglob("*.py"))
}
TOOLS = sorted((ROOT / "tools").glob("[a-z]*.py"))
BENCHMARKS = sorted((ROOT / "benchmarks").rglob("*.py"))

# A room imports only from rooms above its own line; within a line, rooms do not import one another. A room that is not
# listed belongs to its parent. `model_folder` is the format between training and inference.
LAYERS = [
    {"checks", "errors", "packed"},
    {"directions", "links"},
    {"locks"},
    {"files"},
    {"native", "verified"},
    {"config", "runtime", "tensor_file"},
    {"data.tokenizer_file"},
    {"data.tokenizer", "model"},
    {"data.text", "data.folder"},
    {"data.prepare", "data.loading"},
    {"model_folder"},
    {"run", "inference"},
    {"evaluation"},
    {"reporting", "averaging", "serving"},
    {"training.engine", "training.fault_tolerance"},
    {"training"},
    {"planning", "preflight", "export"},
    {"pictures"},
    {"train"},
    {"api"},
    {"cli"},
    {"__main__"},
]
LEVEL = {room: level for level, rooms in enumerate(LAYERS) for room in rooms}


def part_of(module: str) -> str:
    """`dist_transformer.data.loading.plan` → `data`; the package itself, which holds the version only → ``."""
    return module.removeprefix("dist_transformer").removeprefix(".").partition(".")[0]


def room_of(module: str) -> str | None:
    """The longest of the listed rooms that a module lies in; None for the package itself and for empty folders."""
    name = module.removeprefix("dist_transformer").removeprefix(".")
    while name and name not in LEVEL:
        name = name.rpartition(".")[0]
    return name or None


@functools.cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def imports(path: Path) -> Iterator[str]:
    """Modules that a file imports anywhere, late imports included; `from a import b` gives `a` and `a.b`."""
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield node.module or ""
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def own_imports(path: Path) -> set[str]:
    """Modules of the package, by their whole names."""
    return {name for name in imports(path) if name in MODULES and part_of(name)}


def foreign_imports(path: Path) -> set[str]:
    return {name.partition(".")[0] for name in imports(path)} - {"dist_transformer"}


def calls_and_attributes(path: Path) -> Iterator[str]:
    """Dotted names as they are written: `torch.load`, `open`, `Path.read_text`."""
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Attribute | ast.Name):
            yield ast.unparse(node)


def test_every_module_has_a_place() -> None:
    homeless = [name for name, path in MODULES.items() if room_of(name) is None and path.read_text().strip()]
    assert homeless == ["dist_transformer"]
    assert {room_of(module) for module in MODULES} - {None} == set(LEVEL)


@pytest.mark.parametrize("module", [module for module in MODULES if room_of(module)])
def test_imports_go_one_way(module: str) -> None:
    room = room_of(module)
    assert room is not None
    for imported in own_imports(MODULES[module]):
        other = room_of(imported)
        if other is not None and other != room:
            assert LEVEL[other] < LEVEL[room], f"{module} imports {imported}"


def test_no_modules_import_each_other_in_a_circle() -> None:
    graph = {module: own_imports(path) for module, path in MODULES.items()}
    # graphlib raises on a circle, and names it.
    graphlib.TopologicalSorter(graph).prepare()


# A folder with more modules is two rooms; but cli/ has one for each command.
MOST_MODULES = 14


def test_no_folder_holds_many_modules() -> None:
    modules = Counter(path.parent for path in MODULES.values() if path.name != "__init__.py")
    del modules[PACKAGE / "cli"]
    assert {str(folder): count for folder, count in modules.items() if count > MOST_MODULES} == {}


# Modules that only their own folder imports: what a folder keeps to itself may change without a look at the others.
INSIDES = {
    "averaging": {"sources"},
    "data.prepare": {"encode", "ingest", "shuffle", "tasks", "work_dir", "worker_pool"},
    "data.text": {"toy_grammar", "toy_lexicon"},
    "inference": {"batches", "candidates", "splitting"},
    "model": {"decoding", "dropout", "layers", "residual"},
    "preflight": {"checks", "facts", "groups", "nccl", "network", "probes", "rendezvous"},
    "reporting": {"board"},
    "reporting.html": {"curves", "overview", "run", "style", "summary", "tables", "texts"},
    "run": {"replay"},
    "runtime": {"allocator"},
    "serving": {"messages"},
    "training": {"interval", "logbook", "saver", "validation"},
    "training.engine": {"internals", "kernel_lock", "plain_adam"},
    "training.fault_tolerance": {"heartbeats"},
}
# attention_maps hooks into the layers.
LOOKS_INSIDE = {("dist_transformer.inference.attention_maps", "dist_transformer.model.layers")}


def test_no_module_imports_the_inside_of_another_folder() -> None:
    inside = {f"dist_transformer.{folder}.{name}" for folder, names in INSIDES.items() for name in names}
    assert inside <= MODULES.keys()
    every = {**MODULES, **{".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in BENCHMARKS}}
    found = {
        (module, imported)
        for module, path in every.items()
        for imported in inside & set(imports(path))
        if not module.startswith(imported.rpartition(".")[0] + ".")
    }
    assert found == LOOKS_INSIDE


def test_the_package_imports_nothing_that_lies_beside_it() -> None:
    for module, path in MODULES.items():
        assert not {"tools", "benchmarks", "tests"} & foreign_imports(path), module


def test_only_the_engine_imports_deepspeed() -> None:
    """Its public names in `engine`, what lies inside it in `internals`."""
    importing = {module for module, path in MODULES.items() if "deepspeed" in foreign_imports(path)}
    engine = "dist_transformer.training.engine"
    assert importing == {f"{engine}.engine", f"{engine}.internals"}
    named = {name for name in imports(MODULES[f"{engine}.engine"]) if name.startswith("deepspeed.")}
    assert {".".join(name.split(".")[:2]) for name in named} <= {"deepspeed.zero", "deepspeed.utils", "deepspeed.ops"}
    for path in (*BENCHMARKS, *TOOLS):
        assert "deepspeed" not in foreign_imports(path), path


def private_names_of_others(tree: ast.AST) -> set[str]:
    """Private attributes that the module itself does not define."""
    own = {
        node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "self"
    }
    own |= {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    private = re.compile(r"_[^_]")
    attributes = (node for node in ast.walk(tree) if isinstance(node, ast.Attribute))
    return {ast.unparse(node) for node in attributes if private.match(node.attr) and node.attr not in own}


# Each has a test that the installed versions still have what it uses.
USING_INSIDES = ("dist_transformer.training.engine.internals", "dist_transformer.model.products")


@pytest.mark.parametrize("module", [module for module in MODULES if module not in USING_INSIDES])
def test_insides_of_other_packages_are_used_in_two_modules(module: str) -> None:
    found = private_names_of_others(tree_of(MODULES[module]))
    documented = re.compile(r"os\._exit|sys\._current_frames|argparse\._ArgumentGroup|.*\._replace")
    assert {name for name in found if not documented.fullmatch(name)} == set()


# Words that would mean a rank, a file or an optimizer.
FORBIDDEN_IN_MODEL = {"os", "io", "pathlib", "shutil", "tempfile", "json", "socket", "subprocess", "safetensors"}


@pytest.mark.parametrize("module", [module for module in MODULES if part_of(module) == "model"])
def test_the_model_is_pure_torch(module: str) -> None:
    path = MODULES[module]
    assert {part_of(name) for name in own_imports(path)} <= {"config", "errors", "native", "packed", "model"}
    assert not foreign_imports(path) & FORBIDDEN_IN_MODEL
    names = [*imports(path), *calls_and_attributes(path)]
    for forbidden in ("torch.distributed", "torch.optim", "torch.load", "torch.save"):
        assert not [name for name in names if name == forbidden or name.startswith(forbidden + ".")], forbidden
    assert not {"open", "print", "input"} & set(calls_and_attributes(path))


@pytest.mark.parametrize("path", [*MODULES.values(), *BENCHMARKS, *TOOLS], ids=lambda path: str(path.relative_to(ROOT)))
def test_nothing_is_pickled(path: Path) -> None:
    assert not foreign_imports(path) & {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"}
    forbidden = {"torch.load", "torch.save", "np.save", "np.savez", "eval", "exec", "__import__"}
    assert not forbidden & set(calls_and_attributes(path))
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("np.load", "numpy.load"):
            settings = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
            assert settings.get("allow_pickle") == "False"


# They try what a folder lets them do, open /dev/null, or make links for processes in a folder of their own.
WRITERS = {"files", "links", "locks", "preflight.probes", "runtime.processes", "runtime.streams", "cli.prepare"}
# Methods and functions that write, and the place of the argument that is the file; -1 is what stands before the dot.
WRITES = {
    "write_text": -1,
    "write_bytes": -1,
    "touch": -1,
    "rename": -1,
    "symlink_to": -1,
    "hardlink_to": -1,
    "copyfile": 1,
    "copy": 1,
    "copytree": 1,
    "save_file": 1,
    "open_memmap": 0,
}


def written_by(call: ast.Call) -> ast.expr | None:
    """The expression of the file that a call writes; None if it writes none."""
    function = call.func
    name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
    before = function.value if isinstance(function, ast.Attribute) else None
    if name == "open":
        is_method = before is not None and ast.unparse(before) not in ("os", "io")
        modes = [*call.args[0 if is_method else 1 :], *(each.value for each in call.keywords if each.arg == "mode")]
        writes = any(isinstance(mode, ast.Constant) and set("wax+") & set(str(mode.value)) for mode in modes)
        is_system = before is not None and ast.unparse(before) == "os"
        return (before if is_method else call.args[0]) if writes or is_system else None
    if name == "replace" and before is not None:
        return before if len(call.args) == 1 and not call.keywords and ast.unparse(before) != "dataclasses" else None
    if name not in WRITES or (name == "copy" and ast.unparse(before or call) != "shutil"):
        return None
    place = WRITES[name]
    return before if place < 0 else call.args[place] if len(call.args) > place else None


def whole_names(tree: ast.AST) -> set[str]:
    """Names that `with whole_path(…) as NAME` binds: what is written there is whole or absent."""
    return {
        ast.unparse(item.optional_vars)
        for node in ast.walk(tree)
        if isinstance(node, ast.With)
        for item in node.items
        if item.optional_vars is not None
        and isinstance(item.context_expr, ast.Call)
        and ast.unparse(item.context_expr.func) == "whole_path"
    }


def other_writes(tree: ast.AST) -> list[str]:
    whole = whole_names(tree)
    calls = ((node, written_by(node)) for node in ast.walk(tree) if isinstance(node, ast.Call))
    return [ast.unparse(call) for call, file in calls if file is not None and ast.unparse(file) not in whole]


@pytest.mark.parametrize("module", sorted(set(MODULES) - {f"dist_transformer.{name}" for name in WRITERS}))
def test_files_are_written_in_one_way(module: str) -> None:
    """A file that is written by hand is torn after a crash, or 0 bytes after a loss of power."""
    assert other_writes(tree_of(MODULES[module])) == []


@pytest.mark.parametrize(
    ("code", "found"),
    [
        ('path.write_text("x")', 1),
        ('path.open("w")', 1),
        ('open(path, mode="ab")', 1),
        ("os.open(path, flags)", 1),
        ("temporary.replace(path)", 1),
        ("temporary.rename(path)", 1),
        ("save_file(tensors, path)", 1),
        ('with whole_path(path) as file:\n    save_file(tensors, file)\n    file.open("wb")', 0),
        ('text.replace("a", "b")', 0),
        ("dataclasses.replace(config, seed=2)", 0),
        ("path.open()", 0),
        ('path.open("rb")', 0),
        ("DataFolder.open(place)", 0),
    ],
)
def test_writes_are_recognised(code: str, found: int) -> None:
    assert len(other_writes(ast.parse(code))) == found


REMOVES = {"unlink", "rmtree", "rmdir", "removedirs", "mkdir", "makedirs"}
# They try what a folder lets them do, remove folders that are empty, or make one whose name was free.
REMOVERS = {"files", "preflight.probes", "data.prepare.work_dir", "export.ctranslate2"}


@pytest.mark.parametrize("module", sorted(set(MODULES) - {f"dist_transformer.{name}" for name in REMOVERS}))
def test_files_are_removed_and_folders_made_in_one_way(module: str) -> None:
    """`files` passes no link on its way."""
    assert not {name for name in calls_and_attributes(MODULES[module]) if name.rpartition(".")[2] in REMOVES}


# Text that a user names may come from a pipe; these read it, their own files, or those of the system.
READERS = {
    "cli.demo",
    "cli.prepare",
    "data.text.files",
    "files",
    "links",
    "locks",
    "preflight.facts",
    "preflight.nccl",
    "preflight.probes",
    "run.environment",
    "runtime.affinity",
    "runtime.launch",
    "runtime.processes",
    "runtime.streams",
    "serving.server",
    "training.dry_run",
}


def unguarded_reads(tree: ast.AST) -> list[str]:
    """List the calls that would wait for a pipe, or read a device without end."""
    found = []
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        before = ast.unparse(node.func.value) if isinstance(node.func, ast.Attribute) else None
        first = ast.unparse(node.args[0]) if node.args else ""
        library = name in ("safe_open", "load_file") or (before, name) in (("np", "load"), ("pa", "memory_map"))
        opens = name == "open" and before not in ("cls", "DataFolder", "Image", "fsspec") and "w" not in first
        reads = name in ("read_bytes", "read_text") and before is not None
        if (library and "regular(" not in first) or reads or opens:
            found.append(ast.unparse(node))
    return found


@pytest.mark.parametrize("module", sorted(set(MODULES) - {f"dist_transformer.{name}" for name in READERS}))
def test_only_regular_files_are_read(module: str) -> None:
    whole = whole_names(tree_of(MODULES[module]))
    assert [read for read in unguarded_reads(tree_of(MODULES[module])) if read.partition(".")[0] not in whole] == []


@pytest.mark.parametrize(
    ("code", "found"),
    [
        ("path.open()", 1),
        ("open(path)", 1),
        ("path.read_text()", 1),
        ("safe_open(path)", 1),
        ("np.load(path)", 1),
        ("safe_open(regular(path))", 0),
        ("read_small(path)", 0),
        ("DataFolder.open(place)", 0),
    ],
)
def test_reads_are_recognised(code: str, found: int) -> None:
    assert len(unguarded_reads(ast.parse(code))) == found


# Modules are split by stage; 400 lines is the aim, and this is the bound.
LONGEST = 435


@pytest.mark.parametrize("path", [*MODULES.values(), *BENCHMARKS, *TOOLS], ids=lambda path: str(path.relative_to(ROOT)))
def test_no_module_is_long(path: Path) -> None:
    assert len(path.read_text(encoding="utf-8").splitlines()) <= LONGEST


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
    "late": sorted({"deepspeed", "mpi4py", "transformers", "matplotlib"} & set(sys.modules)),
}))
"""


def test_importing_does_nothing_else(tmp_path: Path) -> None:
    libraries = [
        "torch",
        "datasets",
        "tokenizers",
        "safetensors.torch",
        "sacrebleu",
        "tyro",
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
        timeout=120,
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


@pytest.mark.parametrize("path", TOOLS, ids=lambda path: path.name)
def test_a_tool_is_its_main_alone(path: Path) -> None:
    """Arguments are parsed in `main`, which runs only when the file is the program; the first line finds it sound."""
    tree = tree_of(path)
    assert ast.get_docstring(tree)
    allowed = ast.Import | ast.ImportFrom | ast.FunctionDef | ast.ClassDef | ast.Assign | ast.AnnAssign
    for node in tree.body[2:-1]:
        assert isinstance(node, allowed), ast.unparse(node)
        if isinstance(node, ast.Assign | ast.AnnAssign):
            assert "sys.argv" not in ast.unparse(node)
            assert "parse_args" not in ast.unparse(node)
    assert ast.unparse(tree.body[-1]).startswith("if __name__ == '__main__':")
