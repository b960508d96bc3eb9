"""First steps of every program: the search path, Ctrl-C, and paths as a user types them."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

from dist_transformer.runtime.interpreter import typed_path
from tests.conftest import ROOT
from tests.test_architecture import TOOLS

TRAIN = ROOT / "dist_transformer" / "train.py"


@pytest.mark.parametrize("path", [TRAIN, *TOOLS], ids=lambda path: path.name)
def test_the_first_steps_come_before_other_imports(path: Path) -> None:
    first = ast.unparse(ast.parse(path.read_text(encoding="utf-8")).body[1])
    # Before that, only the current folder leaves the path, because it may hold modules of others.
    calls = (("search_path", "leave_current_folder"), ("interpreter", "end_at_ctrl_c", "share_cores"))
    steps = "".join(
        f"\n    from dist_transformer.runtime.{module} import {', '.join(names)}"
        + "".join(f"\n    {name}()" for name in names)
        for module, *names in calls
    )
    if path == TRAIN:
        assert first == f"if __name__ == '__main__':{steps}"
    else:
        # `run` takes the first steps of a tool, and then imports its module.
        assert re.fullmatch(r"if __name__ == '__main__':\n    from _start import run\n    run\('[a-z_.0-9]+'\)", first)


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


def test_a_path_as_it_is_typed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "here" / "below").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "here")
    assert typed_path(tmp_path / "here" / "below" / "file") == "below/file"
    assert typed_path("below/file") == "below/file"
    # Without a slash the shell would look for a program elsewhere.
    assert typed_path(tmp_path / "here" / "file") == str(tmp_path / "here" / "file")
    assert typed_path(tmp_path / "there") == str(tmp_path / "there")
    assert typed_path(tmp_path / "here") == str(tmp_path / "here")
