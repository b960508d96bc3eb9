"""Conversion of settings to JSON values and back. An error names the unknown setting or the value of a wrong type."""

import dataclasses
import json
import re
import shlex
import types
import typing
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from tyro.conf import OmitArgPrefixes

from dist_transformer.base.errors import UserError
from dist_transformer.config.wrong_names import nearest

T = TypeVar("T")
# OmitArgPrefixes[Group] is Annotated[Group, this].
_FLAT = typing.get_args(OmitArgPrefixes[int])[1]

OMIT_DEFAULT = {"omit_default": True}
"""Metadata of a field that is written only if it differs from its default.

For settings that were added after runs had been written: an older run keeps its settings and its identity when it is
resumed.
"""

_WRITTEN = "written"


def written(values: dict[str, bool]) -> dict[str, dict[str, bool]]:
    """Return the metadata of a field that was a switch: these of its values are still written as true and false."""
    return {_WRITTEN: values}


def to_plain(config: Any) -> dict[str, Any]:
    """Convert a config to JSON values. The settings of a group without a prefix are on the top level."""
    plain: dict[str, Any] = {}
    for field in dataclasses.fields(config):
        if field.metadata.get("omit_default") and getattr(config, field.name) == field.default:
            continue
        value = _to_json(getattr(config, field.name))
        if _WRITTEN in field.metadata:
            value = field.metadata[_WRITTEN].get(value, value)
        plain.update(value if field.name in _flat_groups(type(config)) else {field.name: value})
    return plain


def omitted_defaults(kind: type) -> dict[str, Any]:
    """Return the defaults that files leave out, by dotted name, such as `model.attention`."""
    hints, found = typing.get_type_hints(kind), dict[str, Any]()
    for field in dataclasses.fields(kind):
        if field.metadata.get("omit_default"):
            found[field.name] = _to_json(field.default)
        elif dataclasses.is_dataclass(hints[field.name]):
            place = "" if field.name in _flat_groups(kind) else f"{field.name}."
            inner = omitted_defaults(typing.cast(type, hints[field.name]))
            found.update({f"{place}{name}": value for name, value in inner.items()})
    return found


def flat_settings(config: Any) -> dict[str, int | float | str]:
    """Return every setting as a number or a string, by dotted name, such as `model.width`.

    An optional setting is a string in every run, so that runs can be compared by it.
    """
    found: dict[str, int | float | str] = {}
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            place = "" if field.name in _flat_groups(type(config)) else f"{field.name}."
            found.update({f"{place}{name}": inner for name, inner in flat_settings(value).items()})
        elif isinstance(value, int | float) and not isinstance(value, bool) and field.default is not None:
            found[field.name] = value
        else:
            found[field.name] = _as_text(value)
    return found


def _as_text(value: Any) -> str:
    if value is None:
        return "not given"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return " ".join(map(str, value)) if isinstance(value, tuple) else str(value)


def hints_of_settings(kind: type) -> dict[str, Any]:
    """Return the type hint of every setting of a dataclass, by dotted name, such as `model.width`."""
    hints, flat = typing.get_type_hints(kind), _flat_groups(kind)
    found: dict[str, Any] = {}
    for name, hint in hints.items():
        if dataclasses.is_dataclass(hint):
            place = "" if name in flat else f"{name}."
            found |= {f"{place}{inner}": each for inner, each in hints_of_settings(typing.cast(type, hint)).items()}
        else:
            found[name] = hint
    return found


def choices_of(hint: Any) -> list[Any]:
    """List the values that a type hint names: those of Literal, also next to None."""
    kinds = typing.get_args(hint) if typing.get_origin(hint) in (types.UnionType, typing.Union) else (hint,)
    return [choice for kind in kinds if typing.get_origin(kind) is Literal for choice in typing.get_args(kind)]


def _flat_groups(kind: type) -> dict[str, type]:
    """Find the fields of a dataclass that are groups without a prefix in flags and files."""
    hints = typing.get_type_hints(kind, include_extras=True)
    marked = {name: typing.get_args(hint) for name, hint in hints.items() if typing.get_origin(hint) is Annotated}
    return {name: group for name, (group, *marks) in marked.items() if _FLAT in marks}


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
    hints, groups = typing.get_type_hints(kind), _flat_groups(kind)
    of_groups = {name: {field.name for field in dataclasses.fields(group)} for name, group in groups.items()}
    unknown = sorted(set(values).difference(hints.keys() - groups.keys(), *of_groups.values()))
    if unknown:
        raise UserError(
            f"{where} has the unknown setting {inside + unknown[0]!r:.60}: remove it, or use the version that wrote "
            "the file"
        )
    own = {name: value for name, value in values.items() if name in hints}
    for field in dataclasses.fields(typing.cast(Any, kind)):
        if type(own.get(field.name)) is bool and _WRITTEN in field.metadata:
            own[field.name] = next(
                name for name, switch in field.metadata[_WRITTEN].items() if switch == own[field.name]
            )
    arguments = {name: _plain_value(hints[name], value, inside + name, where, remedy) for name, value in own.items()}
    for name, group in groups.items():
        arguments[name] = from_plain(
            group, {key: values[key] for key in of_groups[name] & values.keys()}, where, inside=inside, remedy=remedy
        )
    try:
        return kind(**arguments)
    except UserError as error:
        raise UserError(f"in {where}, {inside}{error}") from None
    except TypeError as error:
        raise UserError(f"{where} is incomplete ({error}): write the file again") from None


def _plain_value(hint: Any, value: Any, name: str, where: str, remedy: str) -> Any:
    """Convert the JSON value of the setting `name` in the file `where` to the type of its field."""
    if dataclasses.is_dataclass(hint):
        return from_plain(typing.cast(type, hint), value, where, inside=f"{name}.", remedy=remedy)
    origin, options = typing.get_origin(hint), typing.get_args(hint)
    kinds = options if origin in (types.UnionType, typing.Union) else (hint,)
    choices = choices_of(hint)
    if value in choices:
        return value
    if origin is tuple and isinstance(value, list):
        return tuple(_plain_value(options[0], item, f"{name}[{at}]", where, remedy) for at, item in enumerate(value))
    if origin is dict and isinstance(value, dict):
        return {key: _plain_value(options[1], item, f"{name}[{key!r}]", where, remedy) for key, item in value.items()}
    if Path in kinds and isinstance(value, str):
        return Path(value)
    if type(value) in kinds or (float in kinds and type(value) is int):
        return value
    wanted = " or ".join(map(repr, choices)) if choices else getattr(hint, "__name__", str(hint))
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


def _instead_of_json(path: Path, content: bytes, error: ValueError) -> str:
    """Describe a file that is not JSON, and the remedy: people keep settings in YAML and TOML, too."""
    lines = (line.strip() for line in content.decode("utf-8", "replace").splitlines())
    first = next((line for line in lines if line and not line.startswith(("#", "---", "%"))), "")
    if path.suffix in (".yaml", ".yml") or re.match(r"[\w.-]+\s*:(\s|$)", first):
        form, module, load = "YAML", "yaml", "yaml.safe_load(sys.stdin)"
    elif path.suffix == ".toml" or re.match(r"\[+[\w.\"-]+\]+$|[\w.-]+\s*=\s*\S", first):
        form, module, load = "TOML", "tomllib", "tomllib.loads(sys.stdin.read())"
    else:
        return f"cannot be read as JSON ({error}): restore or rewrite it"
    code = f"import json, sys, {module}; print(json.dumps({load}, indent=1))"
    words = shlex.join(["python", "-c", code])
    return f"is {form}, not JSON: convert it with {words} < {shlex.quote(str(path))} > {shlex.quote(path.stem)}.json"


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object from a file.

    Raises:
        UserError: the file is missing or is not a JSON object.
    """
    content = b""
    try:
        content = path.read_bytes()
        values = parse_json(content)
    except FileNotFoundError:
        raise UserError(f"{path} does not exist: check the path") from None
    except OSError as error:
        raise UserError(f"{path} cannot be read as JSON ({error}): restore or rewrite it") from None
    except ValueError as error:
        raise UserError(f"{path} {_instead_of_json(path, content, error)}") from None
    if not isinstance(values, dict):
        raise UserError(f"{path} must hold a JSON object, not {type(values).__name__}")
    return values
