"""The settings of a dataclass, from which flags, files, keywords of Python and help are made, and checks of values.

An error of a check names the field, its value and the remedy.
"""

import ast
import dataclasses
import functools
import inspect
import itertools
import operator
import types
import typing
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

from dist_transformer.base.errors import UserError
from dist_transformer.config.registry import Registry

T = TypeVar("T")

FLAT = "flat"
"""Mark of a group whose settings have no prefix in flags and files: `Annotated[Group, FLAT]`."""


def setting(default: Any = dataclasses.MISSING, **special: Any) -> Any:
    """Declare a field of settings whose flag has something of its own.

    Args:
        special: `flag`, its name if it is not that of the field; `position=True` if it may be given without its flag;
            `alone`, its value if the flag has none; `commas=True` if its values are one word, separated by commas;
            `python_only=True` if neither a flag nor a file can set it; `program=True` if it is a program to run,
            which no file may name, because the file may be untrusted; `written`, values that are written as true or
            false, because the field was a switch once; `omit_default=True` as in `plain.OMIT_DEFAULT`.
    """
    return dataclasses.field(default=default, metadata=special)


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """A field of settings."""

    name: str
    """Name with its groups, such as `model.width`."""
    path: str
    """Names of the attributes that lead to it, such as `checkpoints.save_every`."""
    hint: Any
    marks: tuple[Any, ...]
    default: Any
    """Default, or `dataclasses.MISSING`."""
    metadata: Mapping[str, Any]
    owner: type
    """Dataclass of the field."""

    @property
    def flag(self) -> str:
        return f"--{self.metadata.get('flag', self.name)}".replace("_", "-")

    @property
    def is_list(self) -> bool:
        return any(typing.get_origin(kind) is tuple for kind in options_of(self.hint))

    @property
    def kinds(self) -> tuple[Any, ...]:
        """Types of its value; for a list, those of each value."""
        lists = [kind for kind in options_of(self.hint) if typing.get_origin(kind) is tuple]
        return options_of(typing.get_args(lists[0])[0]) if lists else options_of(self.hint)

    @property
    def names(self) -> list[str]:
        """Values that its type or its registry names."""
        registered = (name for mark in self.marks for name in getattr(mark, "names", ()))
        return [*map(str, choices_of(self.hint)), *registered]

    @property
    def text(self) -> str:
        """Docstring of the field."""
        name = self.name.rpartition(".")[2]
        texts = (_texts_in(inspect.getfile(kind)).get(kind.__name__, {}) for kind in self.owner.__mro__[:-1])
        found = (each.get(name) for each in texts)
        return next(filter(None, found), "")


def settings_of(kind: type, *, place: str = "", path: str = "") -> list[Setting]:
    """List the settings of a dataclass and of its groups, in order.

    Args:
        place: what precedes the names; likewise `path`.
    """
    marks, found = typing.get_type_hints(kind, include_extras=True), list[Setting]()
    for field in dataclasses.fields(kind):
        mark, own = marks[field.name], f"{path}{field.name}"
        marked = getattr(mark, "__metadata__", ())
        hint = mark.__origin__ if marked else mark
        if dataclasses.is_dataclass(hint):
            inner = place if FLAT in marked else f"{place}{field.name}."
            found += settings_of(typing.cast(type, hint), place=inner, path=f"{own}.")
        elif not field.metadata.get("python_only"):
            found.append(
                Setting(
                    name=place + field.name,
                    path=own,
                    hint=hint,
                    marks=marked,
                    default=field.default if field.default_factory is dataclasses.MISSING else field.default_factory(),
                    metadata=field.metadata,
                    owner=kind,
                )
            )
    return found


def flat_groups(kind: type) -> dict[str, type]:
    """Find the fields of a dataclass that are groups without a prefix in flags and files."""
    hints = typing.get_type_hints(kind, include_extras=True)
    return {name: hint.__origin__ for name, hint in hints.items() if FLAT in getattr(hint, "__metadata__", ())}


def values_of(config: Any) -> dict[str, Any]:
    """Return the value of every setting of a config by its name, such as `model.width`."""
    return {each.name: operator.attrgetter(each.path)(config) for each in settings_of(type(config))}


def build(kind: type[T], values: Mapping[str, Any], *, default: T | None = None, place: str = "") -> T:
    """Build a dataclass from values by the names of its settings.

    Args:
        values: those of a group may also be a whole group; names of no setting are passed over.
        default: the values of all other settings; otherwise they have their own defaults.
        place: what precedes the names.

    Raises:
        UserError: a value is out of range. The message begins with the name of its setting.
    """
    hints, flat, arguments = typing.get_type_hints(kind), flat_groups(kind), dict[str, Any]()
    for field in dataclasses.fields(typing.cast(Any, kind)):
        name, group = place + field.name, typing.cast(type, hints[field.name])
        before = getattr(default, field.name, dataclasses.MISSING)
        if dataclasses.is_dataclass(group) and name not in values:
            inner = place if field.name in flat else f"{name}."
            arguments[field.name] = build(group, values, default=None if default is None else before, place=inner)
        elif name in values or before is not dataclasses.MISSING:
            arguments[field.name] = values.get(name, before)
    try:
        return kind(**arguments)
    except UserError as error:
        named = str(error).partition(" ")[0] in arguments
        raise UserError(f"{place if named else ''}{error}") from None


def options_of(hint: Any) -> tuple[Any, ...]:
    """List the types of a union, or the type alone."""
    return typing.get_args(hint) if typing.get_origin(hint) in (types.UnionType, typing.Union) else (hint,)


def choices_of(hint: Any) -> list[Any]:
    """List the values that a type hint names: those of Literal, also next to others."""
    return [
        choice for kind in options_of(hint) if typing.get_origin(kind) is Literal for choice in typing.get_args(kind)
    ]


def summary_of(kind: type) -> str:
    """Return the first paragraph of a dataclass's docstring."""
    return " ".join((inspect.getdoc(kind) or "").partition("\n\n")[0].split())


@functools.cache
def _texts_in(file: str) -> dict[str, dict[str, str]]:
    """Read the docstrings of the fields of each class in a file of Python; Python itself does not keep them."""
    tree = ast.parse(Path(file).read_text(encoding="utf-8"))
    return {
        node.name: {
            field.target.id: " ".join(text.value.value.split())
            for field, text in itertools.pairwise(node.body)
            if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
            if isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant) and isinstance(text.value.value, str)
        }
        for node in tree.body
        if isinstance(node, ast.ClassDef)
    }


def require(condition: bool, field_name: str, value: object, remedy: str) -> None:
    if not condition:
        raise UserError(f"{field_name} is {value!r:.200}: {remedy}")


def require_fraction(config: object, *names: str) -> None:
    for name, value in _numbers(config, names):
        require(0.0 <= value < 1.0, name, value, "it must be 0 or more, and below 1")


def require_not_negative(config: object, *names: str) -> None:
    for name, value in _numbers(config, names):
        require(value >= 0, name, value, "it must be 0 or more")


def require_positive(config: object, *names: str) -> None:
    for name, value in _numbers(config, names):
        require(value > 0, name, value, "it must be above 0")


def _numbers(config: object, names: Iterable[str]) -> Iterator[tuple[str, int | float]]:
    """Yield the numbers that these settings have: none for None or a word, several for a list."""
    for name in names:
        value = getattr(config, name)
        for each in value if isinstance(value, tuple) else (value,):
            if isinstance(each, int | float):
                yield name, each


def require_known(config: object, name: str, registry: Registry[Any]) -> None:
    value = getattr(config, name)
    require(value in registry, name, value, registry.remedy_for(value))


@dataclass(frozen=True, kw_only=True, slots=True)
class FlagRules:
    """When the flags of a command have an effect. Several flags are separated by spaces."""

    needs: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Flags, maybe with another flag ("--a with --b"), and those of which they need one."""
    conflicts: Mapping[tuple[str, str], str] = dataclasses.field(default_factory=dict)
    """Flags, those of which each leaves them without effect, and why."""

    def check(self, given: Collection[str]) -> None:
        """Refuse a flag that is given although the others leave it without effect, also if it has its default.

        Raises:
            UserError: there is one; the error names both flags and the remedy.
        """
        for rule, others in self.needs.items():
            flags, _, mode = rule.partition(" with ")
            known = others.split()
            if (mode and mode not in given) or not set(known).isdisjoint(given):
                continue
            for flag in flags.split():
                if flag in given:
                    what = f"{flag} with {mode}" if mode else flag
                    add = known[0] if len(known) == 1 else "one of them"
                    raise UserError(f"{what} needs {' or '.join(known)}: add {add}, or leave {flag} out")
        for (some, others), why in self.conflicts.items():
            for flag, other in itertools.product(some.split(), others.split()):
                if flag in given and other in given:
                    raise UserError(f"{flag} has no effect with {other}, {why}: leave {flag} or {other} out")
