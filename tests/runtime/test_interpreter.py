"""Programs that are started with the wrong Python: one without the packages, one that is too old."""

import ast
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from dist_transformer.runtime.interpreter import typed_path
from tests.conftest import ROOT
from tests.test_architecture import TOOLS

# What these programs run before they import a package.
FIRST = [
    ROOT / name
    for name in (
        "tools/_start.py",
        "dist_transformer/runtime/search_path.py",
        "dist_transformer/__init__.py",
        "dist_transformer/version.py",
        "dist_transformer/runtime/interpreter.py",
    )
]
TRAIN = ROOT / "dist_transformer" / "train.py"


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An interpreter of an environment that has no packages."""
    environment = tmp_path_factory.mktemp("environments") / "bare"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", environment], check=True)
    return environment / "bin" / "python"


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    clone = tmp_path / "a clone"
    for name in ("tools", "dist_transformer"):
        shutil.copytree(ROOT / name, clone / name, ignore=shutil.ignore_patterns("__pycache__"))
    return clone


def refused(*command: object, folder: Path) -> str:
    """The one line that a program writes which cannot run."""
    done = subprocess.run(
        [str(word) for word in command], cwd=folder, capture_output=True, text=True, check=False, timeout=60
    )
    assert (done.returncode, done.stdout) == (1, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: ")
    return line


@pytest.mark.parametrize("program", [["tools/prepare_data.py", "--help"], ["-m", "dist_transformer.train", "--help"]])
def test_a_python_without_the_packages(program: list[str], bare: Path, clone: Path) -> None:
    activate = clone / ".venv" / "bin" / "activate"
    line = refused(bare, *program, folder=clone)
    assert f"{bare} has no " in line
    assert line.endswith(f": make -C '{clone}' .venv/.installed")
    activate.parent.mkdir(parents=True)
    activate.touch()
    assert refused(bare, *program, folder=clone).endswith(": source .venv/bin/activate")


def test_a_package_that_the_environment_of_the_clone_lacks(bare: Path, clone: Path) -> None:
    """An extra that was not asked for, or what came with a newer version; from another folder."""
    shutil.copytree(bare.parents[1], clone / ".venv", symlinks=True)
    python = clone / ".venv" / "bin" / "python"
    line = refused(python, clone / "tools" / "prepare_data.py", folder=clone.parent)
    assert line.endswith(f": 'a clone/.venv/bin/python' -m pip install -e '{clone}[bench]'")


def test_an_old_python(clone: Path) -> None:
    program = "import runpy, sys; sys.version_info = (3, 9, 2, 'final', 0); sys.path.insert(0, 'tools'); {}"
    started = (
        "runpy.run_path('tools/translate.py', run_name='__main__')",
        "runpy.run_module('dist_transformer.train', run_name='__main__')",
    )
    for start in started:
        line = refused(sys.executable, "-c", program.format(start), folder=clone)
        assert f"{Path(sys.executable).name} is Python 3.9.2, but 3.11 or newer is needed: " in line


@pytest.mark.parametrize("path", [*FIRST, TRAIN, *TOOLS], ids=lambda path: path.name)
def test_an_old_python_can_read_it(path: Path) -> None:
    """A file is read whole before its first line runs, so newer syntax would hide the sentence."""
    ast.parse(path.read_text(encoding="utf-8"), feature_version=(3, 8))


@pytest.mark.parametrize("path", [TRAIN, *TOOLS], ids=lambda path: path.name)
def test_the_interpreter_is_checked_first(path: Path) -> None:
    first = ast.unparse(ast.parse(path.read_text(encoding="utf-8")).body[1])
    # Before that, only the folder that a stranger may have filled leaves the path.
    calls = (
        ("search_path", "leave_current_folder"),
        ("interpreter", "check_interpreter", "end_at_ctrl_c", "share_cores"),
    )
    check = "".join(
        f"\n    from dist_transformer.runtime.{module} import {', '.join(names)}"
        + "".join(f"\n    {name}()" for name in names)
        for module, *names in calls
    )
    start = check if path == TRAIN else "\n    import _start"
    assert first == f"if __name__ == '__main__':{start}"


def test_ctrl_c_is_not_lost_where_exceptions_are() -> None:
    """In a callback of a weak reference, as while torch is imported."""
    program = """
import signal, weakref
from dist_transformer.runtime.interpreter import end_at_ctrl_c
{}
class Thing: pass
thing = Thing()
reference = weakref.ref(thing, lambda _: signal.raise_signal(signal.SIGINT))
del thing
print("continues")
"""
    statuses = []
    # This process may ignore Ctrl-C, and then those that it starts do.
    default, ignored = (f"signal.signal(signal.SIGINT, signal.{name})" for name in ("default_int_handler", "SIG_IGN"))
    for start in (default, f"{default}; end_at_ctrl_c()", f"{ignored}; end_at_ctrl_c()"):
        done = subprocess.run(
            [sys.executable, "-c", program.format(start)], cwd=ROOT, capture_output=True, text=True, check=False
        )
        statuses.append((done.returncode, done.stdout, done.stderr.endswith("interrupted\n")))
    assert statuses == [(0, "continues\n", False), (130, "", True), (0, "continues\n", False)]


def test_other_errors_keep_their_traceback(clone: Path) -> None:
    """A module of the project that is missing is a mistake in the project."""
    (clone / "dist_transformer" / "base" / "errors.py").unlink()
    done = subprocess.run(
        [sys.executable, "tools/results_table.py"],
        cwd=clone,
        env={"PYTHONPATH": str(clone)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert "Traceback" in done.stderr
    assert "No module named 'dist_transformer.base.errors'" in done.stderr


def test_a_path_as_it_is_typed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "here" / "below").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "here")
    assert typed_path(tmp_path / "here" / "below" / "file") == "below/file"
    assert typed_path("below/file") == "below/file"
    # Without a slash the shell would look for a program elsewhere.
    assert typed_path(tmp_path / "here" / "file") == str(tmp_path / "here" / "file")
    assert typed_path(tmp_path / "there") == str(tmp_path / "there")
    assert typed_path(tmp_path / "here") == str(tmp_path / "here")
