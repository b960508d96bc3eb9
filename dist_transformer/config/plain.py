"""Settings to JSON values and back. Unknown names and wrong types fail, by name."""

import dataclasses
import json
import types
import typing
from pathlib import Path
from typing import Any, Literal, TypeVar

from dist_transformer.errors import UserError

T = TypeVar("T")

OMIT_DEFAULT = {"omit_default": True}
"""Metadata of a field that is written only where it differs from its default.

It is for settings that are newer than files: the settings and the identity of an older run stay equal to those that it
is resumed with.
"""


def to_plain(config: Any) -> dict[str, Any]:
    """Return a config as JSON values."""
    fields = [
        field_
        for field_ in dataclasses.fields(config)
        if not (field_.metadata.get("omit_default") and getattr(config, field_.name) == field_.default)
    ]
    return {field_.name: _to_json(getattr(config, field_.name)) for field_ in fields}


def _to_json(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        return to_plain(value)
    if isinstance(value, tuple):
        return [_to_json(item) for item in value]
    return str(value) if isinstance(value, Path) else value


def from_plain(kind: type[T], values: dict[str, Any], where: str) -> T:
    """Build a config of type `kind` from JSON values.

    Raises:
        UserError: an unknown name, a missing one or a wrong value; `where` names the file.
    """
    hints = typing.get_type_hints(kind)
    if not isinstance(values, dict):
        raise UserError(f"{where} must hold an object of settings, not {values!r:.60}")
    unknown = sorted(set(values) - set(hints))
    if unknown:
        raise UserError(f"{where}: unknown setting {unknown[0]!r}: remove it, or use the version that wrote the file")
    arguments = {name: _plain_value(hints[name], value, f"{where}: {name}") for name, value in values.items()}
    try:
        return kind(**arguments)
    except TypeError as error:
        raise UserError(f"{where}: {error}: the file is incomplete, write it anew") from None
    except UserError as error:
        raise UserError(f"{where}: {error}") from None


def _plain_value(hint: Any, value: Any, where: str) -> Any:
    """A setting from its JSON value, of the type that its field states."""
    if dataclasses.is_dataclass(hint):
        return from_plain(typing.cast(type, hint), value, where)
    origin, options = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal and value in options:
        return value
    if origin is tuple and isinstance(value, list):
        return tuple(_plain_value(options[0], item, where) for item in value)
    kinds = options if origin in (types.UnionType, typing.Union) else (hint,)
    if Path in kinds and isinstance(value, str):
        return Path(value)
    if type(value) in kinds or (float in kinds and type(value) is int):
        return value
    wanted = " or ".join(map(repr, options)) if origin is Literal else getattr(hint, "__name__", str(hint))
    raise UserError(f"{where} must be {wanted}, not {value!r:.60}: correct the file")


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object.

    Raises:
        UserError: the file is missing or is not a JSON object.
    """
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{path} does not exist: check the path") from None
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read as JSON ({error}): restore or rewrite it") from None
    if not isinstance(values, dict):
        raise UserError(f"{path} must hold a JSON object, not {type(values).__name__}")
    return values
