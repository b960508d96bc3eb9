"""Conversion of settings to JSON values and back. An error names the unknown setting or the value of a wrong type."""

import dataclasses
import json
import types
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from dist_transformer.base.errors import UserError
from dist_transformer.config.schema import choices_of, flat_groups, options_of, settings_of, values_of
from dist_transformer.config.wrong_names import nearest

T = TypeVar("T")

OMIT_DEFAULT = {"omit_default": True}
"""Metadata of a field that is written only if it differs from its default.

For settings that were added after runs had been written: an older run keeps its settings and its identity when it is
resumed.
"""


def to_plain(config: Any) -> dict[str, Any]:
    """Convert a config to JSON values. The settings of a group without a prefix are on the top level."""
    plain: dict[str, Any] = {}
    for field in dataclasses.fields(config):
        omits = field.metadata.get("omit_default") and getattr(config, field.name) == field.default
        if omits or field.metadata.get("python_only"):
            continue
        value = _to_json(getattr(config, field.name))
        if switch := field.metadata.get("written"):
            value = switch.get(value, value)
        plain.update(value if field.name in flat_groups(type(config)) else {field.name: value})
    return plain


def omitted_defaults(kind: type) -> dict[str, Any]:
    """Return the defaults that files leave out, by dotted name, such as `model.attention`."""
    return {each.name: _to_json(each.default) for each in settings_of(kind) if each.metadata.get("omit_default")}


def flat_settings(config: Any) -> dict[str, int | float | str]:
    """Return every setting as a number or a string, by dotted name, such as `model.width`.

    An optional setting is a string in every run, so that runs can be compared by it.
    """
    values = values_of(config)
    numbers = {each.name for each in settings_of(type(config)) if each.default is not None}
    return {
        name: value if type(value) in (int, float) and name in numbers else _as_text(value)
        for name, value in values.items()
    }


def _as_text(value: Any) -> str:
    if value is None:
        return "not given"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return " ".join(map(str, value)) if isinstance(value, tuple) else str(value)


def _to_json(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        return to_plain(value)
    if isinstance(value, tuple):
        return [_to_json(item) for item in value]
    return str(value) if isinstance(value, Path) else value


def from_plain(
    kind: type[T], values: dict[str, Any], where: str, *, inside: str = "", remedy: str = "correct the file"
) -> T:
    """Build a dataclass of type `kind` from JSON values.

    Args:
        where: the file, for messages.
        inside: what precedes the names in messages, such as `model.`; empty for a whole file.
        remedy: how the user can correct a value of a wrong type.

    Raises:
        UserError: an unknown name, a missing one or a wrong value.
    """
    if not isinstance(values, dict):
        place = f"{inside[:-1]} in {where}" if inside else where
        raise UserError(f"{place} must hold an object of settings, not {values!r:.60}: {remedy}")
    hints, flat, arguments = typing.get_type_hints(kind), flat_groups(kind), dict[str, Any]()
    of_groups = {name: {field.name for field in dataclasses.fields(group)} for name, group in flat.items()}
    unknown = sorted(values.keys() - (hints.keys() - flat.keys()).union(*of_groups.values()))
    if unknown:
        raise UserError(
            f"{where} has the unknown setting {inside + unknown[0]!r:.60}: remove it, or use the version that wrote "
            "the file"
        )
    # A group of which something is missing is refused last.
    for field in sorted(dataclasses.fields(typing.cast(Any, kind)), key=lambda field: field.name in flat):
        name, hint = field.name, hints[field.name]
        if name in flat:
            own = {key: values[key] for key in of_groups[name] & values.keys()}
            arguments[name] = from_plain(hint, own, where, inside=inside, remedy=remedy)
        elif name in values:
            arguments[name] = value_of_json(hint, values[name], inside + name, where, remedy, metadata=field.metadata)
    try:
        return kind(**arguments)
    except UserError as error:
        raise UserError(f"in {where}, {inside}{error}") from None
    except TypeError as error:
        raise UserError(f"{where} is incomplete ({error}): write the file again") from None


def value_of_json(
    hint: Any,
    value: Any,
    name: str,
    where: str,
    remedy: str = "correct it",
    *,
    metadata: Mapping[str, Any] = types.MappingProxyType({}),
) -> Any:
    """Convert the JSON value of the setting `name` in the file `where` to the type of its field.

    Args:
        metadata: that of the field.

    Raises:
        UserError: it is of another type.
    """
    if type(value) is bool and "written" in metadata:
        return next(named for named, switch in metadata["written"].items() if switch == value)
    if dataclasses.is_dataclass(hint):
        return from_plain(typing.cast(type, hint), value, where, inside=f"{name}.", remedy=remedy)
    kinds = options_of(hint)
    choices = choices_of(hint)
    inner = {typing.get_origin(kind): typing.get_args(kind) for kind in kinds}
    if tuple in inner and isinstance(value, list):
        kind = inner[tuple][0]
        return tuple(value_of_json(kind, item, f"{name}[{at}]", where, remedy) for at, item in enumerate(value))
    if dict in inner and isinstance(value, dict):
        kind = inner[dict][1]
        return {key: value_of_json(kind, item, f"{name}[{key!r}]", where, remedy) for key, item in value.items()}
    if Path in kinds and isinstance(value, str):
        return Path(value)
    if type(value) is int and float in kinds and int not in kinds:
        value = float(value)
    if value in choices or type(value) in kinds:
        return value
    named = "a list" if tuple in inner else getattr(hint, "__name__", str(hint))
    wanted = " or ".join(map(repr, choices)) or named
    near = nearest(str(value), map(str, choices))
    remedy = f"did you mean {near}?" if near else remedy
    raise UserError(f"{name} in {where} must be {wanted}, not {value!r:.60}: {remedy}")


def parse_json(content: bytes | str) -> Any:
    """Parse JSON in UTF-8 that a person may have written.

    Raises:
        ValueError: the content is something else, or repeats a name in one object.
    """
    return json.loads(content.decode("utf-8") if isinstance(content, bytes) else content, object_pairs_hook=_object)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"an object has the name {twice!r:.60} twice")
    return values


def read_object(path: Path) -> dict[str, Any]:
    """Read a JSON object from a file as `read_json` does; return an empty one if there is none."""
    try:
        return read_json(path)
    except UserError:
        return {}


def read_json(path: Path, *, remedy: str | None = None) -> dict[str, Any]:
    """Read a JSON object from a file.

    Args:
        remedy: end of an error's message; default: to check the path, or to restore the file.

    Raises:
        UserError: the file is missing or is not a JSON object.
    """
    try:
        values = parse_json(path.read_bytes())
    except FileNotFoundError:
        raise UserError(f"{path} does not exist: {remedy or 'check the path'}") from None
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read as JSON ({error}): {remedy or 'restore or rewrite it'}") from None
    if not isinstance(values, dict):
        raise UserError(f"{path} must hold a JSON object, not {type(values).__name__}")
    return values
