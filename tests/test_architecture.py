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
from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "dist_transformer"
MODULES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for path in sorted(PACKAGE.rglob("*.py"))
}
TOOLS = sorted((ROOT / "tools").glob("[a-z]*.py"))
BENCHMARKS = sorted((ROOT / "benchmarks").rglob("*.py"))
SOURCES = [*MODULES.values(), *BENCHMARKS, *TOOLS]
Name = TypeVar("Name", str, Path)

# A room imports only from rooms above its own line; within a line, rooms do not import one another. A room that is not
# listed belongs to its parent. `model_folder` is the format between training and inference.
LAYERS = [
    {"base", "version"},
    {"config", "runtime"},
    {"data.vocabulary", "model"},
    {"cost", "data.text", "data.folder"},
    {"data.prepare", "data.loading"},
    {"model_paths"},
    {"model_folder"},
    {"run", "inference", "model_tags"},
    {"evaluation"},
    {"reporting", "averaging", "serving"},
    {"training.engine", "training.fault_tolerance"},
    {"training"},
    {"preflight", "export"},
    {"importing"},
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


def offenders(names: Iterable[Name], rule: Callable[[Name], Collection[Any]]) -> dict[Name, Collection[Any]]:
    """Give what breaks a rule, by the module or file that breaks it: one test shows all of them."""
    return {name: found for name in names if (found := rule(name))}


def all_but(*modules: str) -> list[str]:
    """Give the modules of the package without these, which are named without the package."""
    return sorted(set(MODULES) - {f"dist_transformer.{module}" for module in modules})


def test_every_module_has_a_place() -> None:
    homeless = [name for name in MODULES if room_of(name) is None]
    assert homeless == ["dist_transformer", "dist_transformer.data"]
    assert {room_of(module) for module in MODULES} - {None} == set(LEVEL)


def upward_imports(module: str) -> list[str]:
    room = room_of(module)
    rooms = {imported: room_of(imported) for imported in own_imports(MODULES[module])} if room else {}
    return [
        imported for imported, other in rooms.items() if other and other != room and LEVEL[other] >= LEVEL[room or ""]
    ]


def test_imports_go_one_way() -> None:
    assert offenders(MODULES, upward_imports) == {}


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
    "data.text": {"toy_lexicon"},
    "inference": {"batches", "candidates", "splitting"},
    "model": {"dropout", "layers", "residual"},
    "preflight": {"checks", "facts", "nccl", "network", "probes", "watch"},
    "reporting": {"board"},
    "reporting.html": {"curves", "overview", "run", "style", "summary", "tables", "texts"},
    "run": {"replay"},
    "serving": {"connections", "faults", "libretranslate", "messages", "receiving"},
    "training": {"logbook", "validation"},
    "training.engine": {"internals", "plain_adam"},
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
    assert offenders(MODULES.values(), lambda path: {"tools", "benchmarks", "tests"} & foreign_imports(path)) == {}


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
USING_INSIDES = ("training.engine.internals", "model.products", "runtime.process_group")
DOCUMENTED = re.compile(r"os\._exit|sys\._current_frames|argparse\._ArgumentGroup|.*\._(replace|fields)")


def test_insides_of_other_packages_are_used_in_few_modules() -> None:
    def insides(module: str) -> set[str]:
        return {name for name in private_names_of_others(tree_of(MODULES[module])) if not DOCUMENTED.fullmatch(name)}

    assert offenders(all_but(*USING_INSIDES), insides) == {}


# Words that would mean a rank, a file or an optimizer.
FORBIDDEN_IN_MODEL = {"os", "io", "pathlib", "shutil", "tempfile", "json", "socket", "subprocess", "safetensors"}


def impurities(module: str) -> set[str]:
    path = MODULES[module]
    parts = {part_of(name) for name in own_imports(path)} - {"base", "config", "model"}
    calls = set(calls_and_attributes(path))
    distant = re.compile(r"torch\.(distributed|optim|load|save)(\..*)?")
    named = {name for name in {*imports(path), *calls} if distant.fullmatch(name)}
    return parts | named | foreign_imports(path) & FORBIDDEN_IN_MODEL | calls & {"open", "print", "input"}


def test_the_model_is_pure_torch() -> None:
    assert offenders((module for module in MODULES if part_of(module) == "model"), impurities) == {}


PICKLERS = {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"}
RUNNING_CODE = {"torch.load", "torch.save", "np.save", "np.savez", "eval", "exec", "__import__"}
# Methods of torch.distributed and mpi4py that send pickles to other ranks.
SENDING_PICKLES = {
    *("broadcast_object_list", "all_gather_object", "gather_object", "scatter_object_list"),
    *("send_object_list", "recv_object_list", "bcast", "allgather", "alltoall"),
}


def pickles(path: Path) -> set[str]:
    """Give what would read or write a pickle, or run code from a text."""
    loads = {
        ast.unparse(node)
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.Call)
        and ast.unparse(node.func) in ("np.load", "numpy.load")
        and ("allow_pickle", "False") not in {(each.arg, ast.unparse(each.value)) for each in node.keywords}
    }
    named = set(calls_and_attributes(path))
    sends = {name for name in named if name.rpartition(".")[2] in SENDING_PICKLES}
    return loads | sends | foreign_imports(path) & PICKLERS | named & RUNNING_CODE


def test_nothing_is_pickled() -> None:
    assert offenders(SOURCES, pickles) == {}


def test_pickles_are_recognised(tmp_path: Path) -> None:
    code = tmp_path / "code.py"
    code.write_text("import pickle\ndist.all_gather_object(a, b)\nworld.bcast(1)\nworld.Bcast(a)\ntorch.load(f)\n")
    assert pickles(code) == {"pickle", "dist.all_gather_object", "world.bcast", "torch.load"}


# They try what a folder lets them do, open /dev/null, or make links for processes in a folder of their own.
WRITERS = {
    "base.files",
    "base.locks",
    "base.streams",
    "preflight.probes",
    "runtime.processes",
}
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


def test_files_are_written_in_one_way() -> None:
    """A file that is written by hand is torn after a crash, or 0 bytes after a loss of power."""
    assert offenders(all_but(*WRITERS), lambda module: other_writes(tree_of(MODULES[module]))) == {}


WRITING = [
    'path.write_text("x")',
    'path.open("w")',
    'open(path, mode="ab")',
    "os.open(path, flags)",
    "temporary.replace(path)",
    "temporary.rename(path)",
    "save_file(tensors, path)",
]
NOT_WRITING = [
    'with whole_path(path) as file:\n    save_file(tensors, file)\n    file.open("wb")',
    'text.replace("a", "b")',
    "dataclasses.replace(config, seed=2)",
    "path.open()",
    'path.open("rb")',
    "DataFolder.open(place)",
]


def test_writes_are_recognised() -> None:
    found = {code: len(other_writes(ast.parse(code))) for code in (*WRITING, *NOT_WRITING)}
    assert found == dict.fromkeys(WRITING, 1) | dict.fromkeys(NOT_WRITING, 0)


REMOVES = {"unlink", "rmtree", "rmdir", "removedirs", "mkdir", "makedirs"}
# They try what a folder lets them do, remove folders that are empty, or make one whose name was free.
REMOVERS = {"base.files", "preflight.probes", "data.prepare.work_dir", "export.ctranslate2"}


def removals(module: str) -> set[str]:
    return {name for name in calls_and_attributes(MODULES[module]) if name.rpartition(".")[2] in REMOVES}


def test_files_are_removed_and_folders_made_in_one_way() -> None:
    assert offenders(all_but(*REMOVERS), removals) == {}


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


def beside_main(path: Path) -> list[str]:
    """Give what a tool does before `main`: it would run when the file is imported, or before the first line's check."""
    tree = tree_of(path)
    allowed = ast.Import | ast.ImportFrom | ast.FunctionDef | ast.ClassDef | ast.Assign | ast.AnnAssign
    last, others = tree.body[-1], [node for node in tree.body[2:-1] if not isinstance(node, allowed)]
    values = [node for node in tree.body if isinstance(node, ast.Assign | ast.AnnAssign)]
    others += [node for node in values if re.search(r"sys\.argv|parse_args", ast.unparse(node))]
    others += [] if ast.unparse(last).startswith("if __name__ == '__main__':") else [last]
    return [*map(ast.unparse, others), *([] if ast.get_docstring(tree) else ["it has no docstring"])]


def test_a_tool_is_its_main_alone() -> None:
    assert offenders(TOOLS, beside_main) == {}


def test_what_a_tool_does_at_import_is_recognised(tmp_path: Path) -> None:
    tool = tmp_path / "tool.py"
    tool.write_text("import a\nimport b\nrun()\nwords = sys.argv[1:]\nmain()\n", encoding="utf-8")
    assert beside_main(tool) == ["run()", "words = sys.argv[1:]", "main()", "it has no docstring"]
