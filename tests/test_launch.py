import os
import socket
import sys
from pathlib import Path

import pytest

from dist_transformer.errors import UserError
from dist_transformer.launch import deepspeed_command, run_printed


def test_the_port_is_free() -> None:
    *words, port = deepspeed_command(3)
    assert words[1:] == ["--quiet", "--num_gpus", 3, "--master_port"]
    assert os.access(str(words[0]), os.X_OK)
    with socket.socket() as probe:
        probe.bind(("", int(str(port))))


def test_a_command_is_printed_as_one_would_type_it(tmp_path: Path) -> None:
    with (tmp_path / "log").open("w+", encoding="utf-8") as log:
        typed = run_printed([sys.executable, "-c", "print('two words')"], output=log)
        log.seek(0)
        lines = log.read().splitlines()
    assert typed == f"{Path(sys.executable).name} -c 'print('\"'\"'two words'\"'\"')'"
    assert lines == [f"$ {typed}", "two words"]


def test_a_command_that_fails_is_an_error(tmp_path: Path) -> None:
    with (tmp_path / "log").open("w", encoding="utf-8") as log, pytest.raises(UserError, match="ended with status 3"):
        run_printed([sys.executable, "-c", "raise SystemExit(3)"], output=log)


def test_a_command_that_is_killed_names_the_signal(tmp_path: Path) -> None:
    program = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
    with (tmp_path / "log").open("w", encoding="utf-8") as log, pytest.raises(UserError, match="ended by SIGKILL: "):
        run_printed([sys.executable, "-c", program], output=log)


def test_a_command_that_takes_too_long_is_ended(tmp_path: Path) -> None:
    with (tmp_path / "log").open("w", encoding="utf-8") as log, pytest.raises(UserError, match="took more than 1 s"):
        run_printed([sys.executable, "-c", "import time; time.sleep(60)"], output=log, seconds=1)
