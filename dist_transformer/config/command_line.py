"""The command line of a dataclass of settings: one flag per field, files of settings, help, and the given values."""

import argparse
import dataclasses
import os
import re
import sys
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field
from pathlib import Path
from types import NoneType
from typing import Any, NoReturn, TypeVar

from dist_transformer.base.errors import UserError
from dist_transformer.base.paths import refuse_secrets, require_usable, usable_path
from dist_transformer.config.plain import to_plain, value_of_json
from dist_transformer.config.schema import FlagRules, Setting, build, choices_of, settings_of, summary_of
from dist_transformer.config.wrong_names import (
    LIST_FLAGS,
    as_setting,
    meant,
    plain_name,
    program,
    refuse_wrong_flags,
    refuse_wrong_settings,
)

T = TypeVar("T")

# A page of help with more flags shows the most used ones first.
_MANY_FLAGS = 25
# Paragraphs with these beginnings are commands or tables; their lines are kept.
_AS_IT_IS = re.compile(r"dist-transformer |srun |deepspeed | ")
# DeepSpeed's launcher adds this flag; the environment has the same value.
_OF_LAUNCHERS = "--local-rank"
_OWN_FLAGS = ("--config", "--print-config", "--help", "--help-all")


@dataclass(frozen=True, kw_only=True, slots=True)
class Page:
    """Contents of a help page besides the flags."""

    text: str | None
    """Description: paragraphs, of which commands and tables keep their lines."""
    common: Sequence[str] = ()
    """Most used settings of a command with many."""
    taken: Sequence[str] = ("--import",)
    """Flags that the program takes out of the command line before."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Given:
    """Settings that a user gave."""

    values: dict[str, Any] = field(default_factory=dict)
    """Values by the names of the settings."""
    written: dict[str, str] = field(default_factory=dict)
    """Name of each as the user wrote it: its flag, or its name and place in a file."""
    passed_over: set[str] = field(default_factory=set)
    """Names that are no settings: those in a file for other programs, and values of Python."""
    prints: bool = False
    """Whether the settings are to be printed, instead of used."""
    function: str = ""
    """Function of Python whose keywords they are; empty for a command."""

    def _check(self, known: Sequence[Setting], rules: FlagRules) -> None:
        """Refuse settings that the others leave without effect; defaults count only as flags.

        Raises:
            UserError: there is one.
        """
        given = set[str]()
        for each in known:
            value = self.values.get(each.name, each.default)
            is_flag = self.written.get(each.name, "").startswith("--")
            if value != each.default or (is_flag and value is not None and value is not False):
                given.add(each.flag)
        try:
            rules.check(given)
        except UserError as error:
            raise UserError(as_setting(str(error)) if self.function else str(error)) from None

    def build(self, kind: type[T], default: T | None = None, *, rules: FlagRules | None = None) -> T:
        """Build the settings of a command; see `schema.build`.

        Raises:
            UserError: a value is out of range or has no effect, or a setting that is required is missing.
        """
        known = settings_of(kind)
        if rules is not None:
            self._check(known, rules)
        for each in known if default is None else ():
            if each.default is MISSING and each.name not in self.values:
                if self.function:
                    raise UserError(f"in {self.function}, {each.name} is missing: pass it")
                raise UserError(f"{each.flag} is missing: pass it; see {program()} --help")
        try:
            built = build(kind, self.values, default=default)
        except UserError as error:
            name, sign, rest = str(error).partition(" ")
            raise UserError(f"{self.written.get(name, name)}{sign}{rest}") from None
        if self.prints:
            from dist_transformer.config.settings_file import write_settings

            print(write_settings(to_plain(built)), end="")
            raise SystemExit
        return built


def parse(kind: type[T], page: Page, *, rules: FlagRules | None = None, words: Sequence[str] | None = None) -> T:
    """Parse the command line of a command whose settings are a dataclass.

    Raises:
        UserError: a wrong flag or value, or settings that do not go together.
    """
    return read_words(settings_of(kind), page, sys.argv[1:] if words is None else words).build(kind, rules=rules)


def read_words(
    known: Sequence[Setting],
    page: Page,
    words: Sequence[str],
    *,
    defaults: Callable[[Mapping[str, Any]], Mapping[str, Any]] = lambda given: {},
    of_others: Iterable[str] = (),
) -> Given:
    """Read the settings that a command line gives, also by a file after --config; flags override it.

    Args:
        defaults: returns the defaults for the help, by the names of settings, for some flags; otherwise those of the
            fields are shown.
        of_others: names that a file may have for others; they are passed over.

    Raises:
        UserError: a wrong flag, name or value, or a flag that is given twice.
        SystemExit: the words asked for help, or for the list of flags.
    """
    flags = {each.flag: each.names for each in known} | {flag: [] for flag in (*_OWN_FLAGS, *page.taken)}
    if LIST_FLAGS in words:
        print("\n".join(" ".join([flag, *names]) for flag, names in flags.items()))
        raise SystemExit(0)
    wants_help, parser = {"-h", "--help", "--help-all"} & set(words), _parser(known)
    plain = [_plain_word(word) for word in words if word not in wants_help]
    if wants_help:
        chosen, _ = parser.parse_known_args(plain)
        print(_help(known, page, defaults(vars(chosen)), whole="--help-all" in wants_help))
        raise SystemExit(0)
    _refuse_repeated(words)
    refuse_wrong_flags(words, {*flags, _OF_LAUNCHERS})
    parsed = vars(parser.parse_args(plain))
    given = Given(prints=parsed.pop("print_config", False))
    if (file := parsed.pop("config", None)) is not None:
        # YAML's library is for files alone.
        from dist_transformer.config.settings_file import read_settings

        values, lines = read_settings(usable_path(file))
        given.passed_over.update(values.keys() & set(of_others))
        _read_values(given, known, values, file, lines)
    for each in known:
        if each.name in parsed and f"{each.name}@" in parsed:
            raise UserError(f"{each.flag} is given twice, once without the flag: pass it once")
        for name in {each.name, f"{each.name}@"} & parsed.keys():
            given.values[each.name] = _value(each, parsed[name])
            given.written[each.name] = each.flag
        how = given.written.get(each.name, each.flag)
        if each.metadata.get("program") and given.values.get(each.name) is not None and how != each.flag:
            # The file may be untrusted.
            remedy = f"pass {each.flag} on the command line, with the same words, others, or None"
            raise UserError(f"{how} is a program, and no file may name one to run: {remedy}")
    return given


def _refuse_repeated(words: Sequence[str]) -> None:
    """Refuse a flag that is given twice, and the secrets of URLs, because errors of the parser repeat words."""
    for word in words:
        refuse_secrets(word)
    flags = [word.partition("=")[0] for word in words if word.startswith("--")]
    names = list(map(plain_name, flags))
    for flag in flags:
        if names.count(plain_name(flag)) > 1:
            raise UserError(f"{flag} appears twice: pass it once, with all its values")


def read_keywords(
    kind: type,
    keywords: Mapping[str, Any],
    function: str,
    *,
    also: Iterable[str] = (),
) -> Given:
    """Read the settings that a function of Python is given. A path may be text, and one value stand for a list.

    Args:
        also: other keywords of the function, which a wrong one may have meant.

    Raises:
        UserError: a wrong name or value.
    """
    # Values of Python that no flag has.
    own = {field.name for field in dataclasses.fields(kind) if field.metadata.get("python_only")} & keywords.keys()
    given = Given(function=function, values={name: keywords[name] for name in own}, passed_over=own)
    _read_values(given, settings_of(kind), keywords, function, also=also)
    return given


def _read_values(
    given: Given,
    known: Sequence[Setting],
    values: Mapping[str, Any],
    where: str,
    lines: Mapping[str, int] | None = None,
    also: Iterable[str] = (),
) -> None:
    """Add the settings of a file with lines, or of the function `where`."""
    by_name = {as_setting(each.flag): each for each in known} | {each.name: each for each in known}
    flat: dict[str, Any] = {}
    for name, value in values.items():
        if name not in given.passed_over:
            is_group = isinstance(value, Mapping) and name not in by_name
            flat |= {f"{name}.{each}": item for each, item in value.items()} if is_group else {name: value}
    if wrong := [name for name in flat if name not in by_name]:
        at = sorted({lines[name] for name in wrong if name in lines}) if lines else []
        place = f"{where}, line {', '.join(map(str, at))}" if at else where
        refuse_wrong_settings(wrong, {*by_name, *also}, place)
    for name, each in ((name, by_name[name]) for name in flat):
        if each.name in given.values:
            raise UserError(f"{where} has {each.name} twice, under two names: remove one")
        place = f"{where} (line {lines[name]})" if lines and name in lines else where
        value = value_of_json(each.hint, _as_plain(each, flat[name]), name, place, metadata=each.metadata)
        given.values[each.name] = value
        given.written[each.name] = name if lines is None else f"{name} in {place}"


def _as_plain(each: Setting, value: Any) -> Any:
    """Write a value of a file or of Python as JSON would have it; one value may stand for a list."""
    if each.is_list and value is not None and not isinstance(value, str | os.PathLike) and isinstance(value, Iterable):
        return [_one_plain(each, item) for item in value]
    return [_one_plain(each, value)] if each.is_list and value is not None else _one_plain(each, value)


def _one_plain(each: Setting, value: Any) -> Any:
    plain = os.fspath(value) if isinstance(value, os.PathLike) else getattr(value, "item", lambda: value)()
    if isinstance(plain, str):
        # As the words of a flag are checked.
        (require_usable if Path in each.kinds else refuse_secrets)(plain)
    return plain


def _plain_word(word: str) -> str:
    """Write a flag in one of its spellings: with hyphens, and with the `no-` that switches it off in front."""
    flag, sign, value = word.partition("=")
    if not flag.startswith("--") or " " in flag:
        return word
    return re.sub(r"^--(.+\.)no-", r"--no-\1", flag.replace("_", "-")) + sign + value


class _Parser(argparse.ArgumentParser):
    known: Sequence[Setting]

    def error(self, message: str) -> NoReturn:
        lacking = re.match("argument (.*): expected ", message)
        names = next((each.names for each in self.known if lacking and each.flag == lacking[1]), ())
        said = f"{lacking[1]} needs a value" if lacking else message
        raise UserError(f"{said}: choose one of {', '.join(names)}" if names else f"{said}; see {program()} --help")


def _parser(known: Sequence[Setting]) -> argparse.ArgumentParser:
    parser = _Parser(add_help=False, allow_abbrev=False, argument_default=argparse.SUPPRESS)
    parser.known = known
    parser.add_argument("--config")
    parser.add_argument("--print-config", action="store_true")
    parser.add_argument(_OF_LAUNCHERS)
    for each in known:
        _add_flag(parser, each)
        if each.metadata.get("position"):
            parser.add_argument(f"{each.name}@", nargs="*" if each.is_list else "?")
    return parser


def _add_flag(parser: argparse.ArgumentParser | argparse._ArgumentGroup, each: Setting, text: str = "") -> None:
    if bool in each.kinds:
        # The help of what is off shows how it is switched on.
        action = "store_true" if text and each.default is False else argparse.BooleanOptionalAction
        parser.add_argument(each.flag, dest=each.name, action=action, help=text)
        return
    numbers = {int: "N", float: "X", Path: "PATH"}
    metavar = next((numbers[kind] for kind in each.kinds if kind in numbers), "NAME" if each.names else "TEXT")
    alone = each.metadata.get("alone")
    nargs = "?" if alone else "+" if each.is_list and not each.metadata.get("commas") else None
    parser.add_argument(each.flag, dest=each.name, nargs=nargs, const=alone, metavar=metavar, help=text)


def _value(each: Setting, given: Any) -> Any:
    """Convert the words after a flag to the value of its setting."""
    if each.metadata.get("commas"):
        given = given.split(",")
    return tuple(_one(each, word) for word in given) if isinstance(given, list) else _one(each, given)


def _one(each: Setting, word: Any) -> Any:
    if isinstance(word, bool) or (word == "None" and NoneType in each.kinds):
        return None if word == "None" else word
    for choice in choices_of(each.hint):
        if word == str(choice):
            return choice
    if Path in each.kinds:
        return usable_path(word)
    for kind, what in ((int, "a whole number"), (float, "a number")):
        if kind in each.kinds:
            try:
                return kind(word)
            except ValueError:
                raise UserError(f"{each.flag} is {word!r:.60}: it must be {' or '.join([what, *each.names])}") from None
    if str not in each.kinds:
        raise UserError(f"{each.flag} {word:.60} is unknown: {meant(word, each.names)}")
    return word


def _help(known: Sequence[Setting], page: Page, defaults: Mapping[str, Any], *, whole: bool) -> str:
    """Write the help of a command: the description, and its flags by group."""
    some = page.common if len(known) > _MANY_FLAGS and not whole else [each.name for each in known]
    required = [each for each in known if each.default is MISSING and each.name not in defaults]
    usage = [f"[{each.flag}] PATH" if each.metadata.get("position") else f"{each.flag} …" for each in required]
    parser = argparse.ArgumentParser(add_help=False, prog=program(), usage=" ".join([program(), *usage, "[flags]"]))
    parser.formatter_class = _Formatter
    parser.description = page.text
    groups: dict[type, argparse._ArgumentGroup] = {}
    for each in known:
        if each.name in some:
            if each.owner not in groups:
                groups[each.owner] = parser.add_argument_group(summary_of(each.owner).rstrip("."))
            _add_flag(groups[each.owner], each, _help_text(each, defaults.get(each.name, each.default)))
    rest = parser.add_argument_group("Every command")
    rest.add_argument("--config", metavar="FILE", help="read settings from YAML, JSON or TOML; flags override them")
    rest.add_argument("--print-config", action="store_true", help="print all settings as YAML, and end")
    if len(some) < len(known):
        text = f"show all {len(known)} flags, of which these are the most used"
        rest.add_argument("--help-all", action="store_true", help=text)
    return parser.format_help().rstrip()


def _help_text(each: Setting, default: Any) -> str:
    # The text of a number names the words that may stand for it.
    choices = f"one of {', '.join(each.names)}" if each.names and not {int, float} & set(each.kinds) else ""
    shown = " ".join(map(str, default)) if isinstance(default, tuple) else str(default)
    if default is MISSING:
        choices = f"required; {choices}".rstrip("; ")
    elif default not in (None, False, "", ()) and "default:" not in each.text:
        choices = f"default: {shown}; {choices}".rstrip("; ")
    text = each.text.rstrip(".")
    # A percent sign would begin a placeholder of argparse.
    return (f"{text} ({choices})" if choices else text).replace("%", "%%")


class _Formatter(argparse.RawDescriptionHelpFormatter):
    """Help formatter that wraps a description's paragraphs at the terminal's width, except commands and tables."""

    def _split_lines(self, text: str, width: int) -> list[str]:
        return textwrap.wrap(text, width, break_on_hyphens=False)

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
