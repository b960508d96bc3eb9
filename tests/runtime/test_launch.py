import ctypes
import os
import shlex
import socket
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.launching import deepspeed_command, overridden
from dist_transformer.base.errors import UserError
from dist_transformer.runtime.launch import as_typed, has_gpu, own_command, run_printed


def test_the_port_is_free() -> None:
    *words, port = deepspeed_command(3)
    assert words[1:] == ["--quiet", "--num_gpus", 3, "--master_port"]
    assert os.access(str(words[0]), os.X_OK)
    with socket.socket() as probe:
        probe.bind(("", int(str(port))))


def test_a_command_is_printed_as_one_would_type_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The record of it names no path of this machine."""
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    monkeypatch.chdir(tmp_path)
    with (tmp_path / "log").open("w+", encoding="utf-8") as log:
        record = run_printed([sys.executable, "-c", "print('two words')"], output=log)
        log.seek(0)
        typed, output = log.read().splitlines()
    program = """-c 'print('"'"'two words'"'"')'"""
    assert typed == f"$ {shlex.quote(os.path.abspath(sys.executable))} {program}"
    assert record == f"{Path(sys.executable).name} {program}"
    assert output == "two words"


def environment(folder: Path) -> Path:
    """An interpreter as environments have it: a link. All of them lead to the same file."""
    python = folder / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.symlink_to(sys.executable)
    return python


def test_a_program_is_named_as_a_new_shell_finds_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ours, other = environment(tmp_path / "a clone" / ".venv"), environment(tmp_path / "other")
    monkeypatch.chdir(tmp_path / "a clone")
    monkeypatch.setenv("PATH", "/nowhere")
    assert as_typed([ours, "-m", "it's", 3]) == """.venv/bin/python -m 'it'"'"'s' 3"""
    assert as_typed([other]) == str(other)
    monkeypatch.chdir(tmp_path)
    assert as_typed([ours]) == "'a clone/.venv/bin/python'"
    monkeypatch.chdir(tmp_path / "other")
    assert as_typed([ours]) == f"'{ours}'"
    monkeypatch.setenv("PATH", str(other.parent))
    assert as_typed([ours]) == f"'{ours}'"
    assert as_typed([other]) == "python"


def test_a_command_is_the_program_beside_the_interpreter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "bin" / "dist-transformer"
    python = str(program.with_name("python"))
    monkeypatch.setattr(sys, "executable", python)
    assert own_command("report", "run", 3) == [python, "-m", "dist_transformer", "report", "run", 3]
    program.parent.mkdir()
    program.touch()
    assert own_command("report", "run", 3) == [program, "report", "run", 3]


@pytest.mark.system
@pytest.mark.parametrize(
    ("program", "seconds", "said"),
    [
        ("raise SystemExit(3)", 600, "ended with status 3"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", 600, "ended by SIGKILL: "),
        ("import time; time.sleep(600)", 1, "took more than 1 s"),
    ],
)
def test_a_command_that_fails_or_takes_too_long_is_an_error(
    program: str, seconds: int, said: str, tmp_path: Path
) -> None:
    with (tmp_path / "log").open("w", encoding="utf-8") as log, pytest.raises(UserError, match=said):
        run_printed([sys.executable, "-c", program], output=log, seconds=seconds)


def test_the_last_of_each_flag_is_kept_with_its_values() -> None:
    words = ["train", "--data", "a", "b", "--seed", 1, "--max_steps=3", "--x", "--data", "c", "--max-steps", -4]
    assert overridden(words) == ["train", "--seed", "1", "--x", "--data", "c", "--max-steps", "-4"]


@pytest.mark.parametrize(("init", "counted", "count", "has"), [(0, 0, 2, True), (0, 0, 0, False), (100, 0, 2, False)])
def test_the_driver_is_asked_for_a_gpu(
    init: int, counted: int, count: int, has: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write(place: Any) -> int:
        place._obj.value = count
        return counted

    driver = SimpleNamespace(cuInit=lambda flags: init, cuDeviceGetCount=write)
    monkeypatch.setattr(ctypes, "CDLL", lambda name: driver)
    assert has_gpu() == has


def test_without_a_driver_there_is_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise OSError(name)

    monkeypatch.setattr(ctypes, "CDLL", missing)
    assert not has_gpu()
