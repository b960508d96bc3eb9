"""Commands in this process, where a launch would cost seconds, and run folders with weights."""

import signal
import sys
from collections.abc import Callable

import pytest

from dist_transformer.base.errors import exit_on_user_error
from dist_transformer.cli.command import run as run_command
from tests.averaging.conftest import mixed, run

__all__ = ["mixed", "run"]

Screen = tuple[str, str]
Call = Callable[..., Screen]
Lines = tuple[list[str], list[str]]


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Call:
    """Run `dist-transformer` with these words, as at a terminal; gives both outputs."""

    def run_here(*words: object, status: int = 0) -> Screen:
        typed, ended = [str(word) for word in words], 0
        # A command may decide how its errors are shown, and what signals do.
        monkeypatch.setattr(sys, "argv", ["dist-transformer", *typed])
        monkeypatch.setattr(sys, "excepthook", sys.excepthook)
        handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
        signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            exit_on_user_error(lambda: run_command(typed))
        except SystemExit as end:
            ended = int(end.code or 0)
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)
        screen = capsys.readouterr()
        assert ended == status, screen
        return screen

    return run_here
