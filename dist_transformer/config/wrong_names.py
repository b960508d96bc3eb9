"""Names that a command, a file of settings or a function does not have: those of other toolkits, and near misses."""

import difflib
import functools
import re
import sys
import tomllib
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path

from dist_transformer.base.errors import UserError

LIST_FLAGS = "--list-flags"
"""Word that makes a command print its flags and their choices, one flag per line, for completion in a shell."""

_FLAG = re.compile(r"--([a-z][\w.-]*)")
# Of a name; shorter ones resemble too many. Choices are few, so less is enough for them.
_NEAR, _NEAR_CHOICE = 0.7, 0.55


def plain_name(flag: str) -> str:
    """Give the name that all spellings of a flag share: with hyphens, without the `no-` that switches it off."""
    return re.sub(r"(^|\.)no-", r"\1", flag.lstrip("-").replace("_", "-"))


def nearest(word: str, known: Iterable[str], *, cutoff: float = _NEAR_CHOICE) -> str | None:
    """Find the choice that a user meant by a word; None if nothing is near."""
    lowered = {each.lower(): each for each in known}
    found = difflib.get_close_matches(word.lower(), lowered, n=1, cutoff=cutoff)
    return lowered[found[0]] if found else None


def meant(word: str, known: Collection[str]) -> str:
    """Write the remedy for a word that is no choice: the nearest choice, or all."""
    near = nearest(word, known)
    return f"did you mean {near}?" if near else f"choose one of {', '.join(known)}"


def command_meant(name: str, commands: Iterable[str]) -> str | None:
    """Find the command that a user meant, also by its name in another toolkit."""
    return _foreign_names("commands").get(plain_name(name)) or nearest(name, commands, cutoff=_NEAR)


def program() -> str:
    """Return the command as the user calls it."""
    return Path(sys.argv[0]).name


def refuse_wrong_flags(words: Sequence[str], known: Collection[str]) -> None:
    """Refuse the flags that a command does not have, all at once.

    Args:
        words: command line; after `--` there are no flags.
        known: flags of the command.

    Raises:
        UserError: there are such flags; the message has the counterpart or the nearest flag of each.
    """
    ends = words.index("--") if "--" in words else len(words)
    flags = [word.partition("=")[0] for word in words[:ends] if re.match(r"--?[A-Za-z]", word) and " " not in word]
    names = {plain_name(flag) for flag in known}
    wrong = [flag for flag in dict.fromkeys(flags) if not flag.startswith("--") or plain_name(flag) not in names]
    if wrong:
        remedies = {flag: _remedy(flag, names) or f"see {program()} --help" for flag in wrong}
        raise UserError(_refusal(remedies, "flag"))


def refuse_wrong_settings(names: Iterable[str], known: Collection[str], where: str) -> None:
    """Refuse the settings that a file or a function does not have, all at once.

    Args:
        where: file or function, for the message.

    Raises:
        UserError: there are such settings; the message has the counterpart or the nearest setting of each.
    """
    plain = {plain_name(name) for name in known}
    wrong = [name for name in names if plain_name(name) not in plain]
    written = {name: as_setting(_remedy(name, plain) or "leave it out") for name in wrong}
    if written:
        raise UserError(f"in {where}, {_refusal(written, 'setting')}")


@functools.cache
def _foreign_names(*tables: str) -> dict[str, str]:
    """Read what other toolkits' names are here, from tables of foreign_flags.toml."""
    file = tomllib.loads(Path(__file__).with_name("foreign_flags.toml").read_text("utf-8"))
    rows = [row for table in tables for row in file[table].items()]
    return {name.rpartition(":")[2]: ours.format(**file["phrases"]) for ours, names in rows for name in names.split()}


def _remedy(name: str, known: Collection[str]) -> str | None:
    """Write what to use in place of a name, with flags as on the command line; None if nothing is known."""
    plain, as_given = plain_name(name), name.lstrip("-").replace("_", "-")
    ours = {} if plain in known else _foreign_names("flags", "missing")
    remedies = next((ours[each] for each in (as_given, plain, plain.rpartition(".")[2]) if each in ours), None)
    for remedy in remedies.split(" | ") if remedies else ():
        flag = _FLAG.match(remedy)
        if flag is None or plain_name(flag[0]) in known:
            return remedy if remedy.startswith("there ") else f"use {remedy}"
    # Groups have prefixes: `--width` is meant to be `--model.width`.
    spelled = {each.rpartition(".")[2]: each for each in known} | {each: each for each in known}
    near = nearest(plain, spelled, cutoff=_NEAR)
    return f"did you mean --{spelled[near]}?" if near else None


def _refusal(remedies: Mapping[str, str], noun: str) -> str:
    if len(remedies) == 1:
        ((name, remedy),) = remedies.items()
        return f"{name} is not a {noun} here: {remedy}"
    groups: dict[str, list[str]] = {}
    for name, remedy in remedies.items():
        groups.setdefault(remedy.replace("did you mean ", "use ").rstrip("?"), []).append(name)
    uses = "; ".join(f"for {' and '.join(names)} {remedy}" for remedy, names in groups.items())
    return f"{', '.join(remedies)} are not {noun}s here: {uses}"


def as_setting(text: str) -> str:
    """Write the flags in a text as settings are written in files and in Python."""
    return _FLAG.sub(lambda flag: flag[1].replace("-", "_"), text)
