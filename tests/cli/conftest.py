"""Run folders with weights, as the tests of averaging have them, and the settings of each command."""

from collections.abc import Callable, Sequence
from typing import NoReturn

import pytest

from dist_transformer.base.errors import UserError
from dist_transformer.cli.command import module_of
from dist_transformer.config import command_line, flags
from dist_transformer.config.schema import Setting
from tests.averaging.conftest import mixed, run

__all__ = ["known_settings", "mixed", "run"]


class ReadError(Exception):
    """Holds the settings that a command was about to read."""


@pytest.fixture
def known_settings(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Sequence[Setting]]:
    """Find the settings of a command, without reading a command line."""

    def read_words(known: Sequence[Setting], *_: object, **__: object) -> NoReturn:
        raise ReadError(known)

    def find(name: str) -> Sequence[Setting]:
        module = module_of(name)
        for place in (command_line, flags):
            monkeypatch.setattr(place, "read_words", read_words)
        monkeypatch.setattr("sys.argv", [name])
        try:
            getattr(module, "parse_arguments", module.main)()
        except ReadError as read:
            found: Sequence[Setting] = read.args[0]
            return found
        except (UserError, SystemExit):
            pytest.skip(f"{name} has a parser of its own still")
        finally:
            monkeypatch.undo()
        raise AssertionError(f"{name} reads no settings")

    return find
