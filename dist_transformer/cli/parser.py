"""Shared parts of the commands' parsers: help that fits the terminal, a folder by position or by flag."""

import argparse
import re
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from dist_transformer.base.paths import usable_path
from dist_transformer.base.urls import without_secrets
from dist_transformer.config.stated import FlagRules
from dist_transformer.config.wrong_names import LIST_FLAGS, list_flags, nearest, refuse_wrong_flags

# Paragraphs with these beginnings are commands or tables; their lines are kept.
_AS_IT_IS = re.compile(r"dist-transformer |srun |deepspeed | ")


class _Help(argparse.RawDescriptionHelpFormatter):
    """Help formatter that wraps a description's paragraphs at the terminal's width, except commands and tables."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        paragraphs = re.split(r"\n\s*\n", text.strip("\n"))
        return "\n\n".join(_fill(paragraph, width) for paragraph in paragraphs)


def _fill(paragraph: str, width: int) -> str:
    if not _AS_IT_IS.match(paragraph):
        return textwrap.fill(" ".join(paragraph.split()), width)
    lines = []
    for line in paragraph.splitlines():
        # Continue the line as a shell accepts it.
        parts = textwrap.wrap(line, width - 2, subsequent_indent="    ", break_long_words=False, break_on_hyphens=False)
        lines.append(line if len(line) <= width else " \\\n".join(parts))
    return "\n".join(lines)


class _Parser(argparse.ArgumentParser):
    """Parser that refuses wrong flags, flags without effect or given twice, and impossible paths.

    Args:
        taken: flags that the program takes out of the command line before.
        rules: when the flags have an effect.
    """

    def __init__(
        self, *arguments: Any, taken: Sequence[str] = (), rules: FlagRules | None = None, **settings: Any
    ) -> None:
        super().__init__(*arguments, **settings)
        self.taken, self.rules = taken, rules or FlagRules()
        self.given: set[str] = set()
        for kind in (None, "store"):
            self.register("action", kind, _StoreOnce)
        self.register("type", Path, usable_path)

    def error(self, message: str) -> NoReturn:
        super().error(without_secrets(message))

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        words = sys.argv[1:] if args is None else args
        if LIST_FLAGS in words:
            print(list_flags(self._flags() | dict.fromkeys(self.taken, ())))
            raise SystemExit
        refuse_wrong_flags(words, self._option_string_actions, program=self.prog, also=self.taken)
        self.given.clear()
        parsed = super().parse_known_args(words, namespace)
        self.rules.check({word.partition("=")[0] for word in words})
        return parsed

    def _flags(self) -> dict[str, Sequence[str]]:
        """Return the flags that --help shows, each with its choices."""
        shown = [action for action in self._actions if action.help is not argparse.SUPPRESS]
        flags = {flag: action.choices or () for action in shown for flag in action.option_strings}
        return {flag: list(map(str, choices)) for flag, choices in flags.items() if flag.startswith("--")}

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        try:
            super()._check_value(action, value)
        except argparse.ArgumentError as error:
            near = nearest(str(value), map(str, action.choices or ()))
            raise argparse.ArgumentError(action, f"{error.message}: did you mean {near}?") if near else error from None


class _StoreOnce(argparse.Action):
    """The action `store`, once per flag."""

    def __call__(self, parser: Any, namespace: argparse.Namespace, values: Any, flag: str | None = None) -> None:
        if flag in parser.given:
            parser.error(f"{flag} appears twice: pass it once, with all its values")
        if flag is not None:
            parser.given.update(self.option_strings)
        setattr(namespace, self.dest, values)


def make_parser(
    description: str | None, *, shares_work: bool = False, rules: FlagRules | None = None
) -> argparse.ArgumentParser:
    """Make the parser of a command.

    Args:
        description: docstring of its module.
        shares_work: whether several processes can share its work.
        rules: when its flags have an effect.
    """
    taken = ("--processes", "--import") if shares_work else ("--import",)
    return _Parser(description=description, formatter_class=_Help, allow_abbrev=False, taken=taken, rules=rules)


def add_folder(parser: argparse.ArgumentParser, flag: str, metavar: str, text: str) -> None:
    """Add a folder that is given by position or by `flag`."""
    name = flag.removeprefix("--").replace("-", "_")
    parser.add_argument("folder", nargs="?", type=Path, metavar=metavar, help=f"{text}; the same as {flag}")
    parser.add_argument(flag, type=Path, metavar=metavar, dest=name, help=argparse.SUPPRESS)


def folder_of(parser: argparse.ArgumentParser, arguments: Any, flag: str) -> Path:
    """Return the folder of `add_folder`. End the program with a usage error if there is none, or two."""
    name = flag.removeprefix("--").replace("-", "_")
    given: Sequence[Path] = [path for path in (arguments.folder, getattr(arguments, name)) if path is not None]
    if len(given) != 1:
        parser.error(f"pass one {name.split('_')[0]} folder, by position or by {flag}")
    return given[0]
