"""Files of settings in YAML, JSON or TOML, as --config names them."""

import json
import re
import tomllib
from pathlib import Path
from typing import Any, ClassVar

import yaml

from dist_transformer.base.errors import UserError


class _Loader(yaml.SafeLoader):
    """Loader of YAML 1.2's core schema: `1e-3` is a number, and `no`, `on`, `1:30` and dates are text."""

    yaml_implicit_resolvers: ClassVar[dict[str, Any]] = {}


for _tag, _pattern, _first in (
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("bool", r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    ("int", r"[-+]?(0|[1-9][0-9]*)", list("-+0123456789")),
    (
        "float",
        r"[-+]?((\.[0-9]+|[0-9]+\.[0-9]*)([eE][-+]?[0-9]+)?|[0-9]+[eE][-+]?[0-9]+|\.inf)|\.nan",
        list("-+0123456789."),
    ),
):
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(f"(?:{_pattern})$"), _first)


class _Dumper(yaml.SafeDumper):
    """Writer that quotes what `_Loader` would not read as text."""

    yaml_implicit_resolvers = _Loader.yaml_implicit_resolvers


def read_settings(file: Path) -> tuple[dict[str, Any], dict[str, int]]:
    """Read a file of settings.

    Returns:
        its values, and the line of each by its dotted name (those of TOML are unknown).

    Raises:
        UserError: it cannot be read, has a name twice, or is no object of settings.
    """
    lines: dict[str, int] = {}
    try:
        text = file.read_text(encoding="utf-8")
        if file.suffix == ".toml":
            values = tomllib.loads(text)
        else:
            # JSON is YAML, except for tabs between its words and halves of surrogate pairs.
            loader = _Loader(text.expandtabs())
            node = loader.get_single_node()
            _read_lines(node, "", lines, file)
            values = _json(text) or (loader.construct_document(node) if node else {})
    except FileNotFoundError:
        raise UserError(f"{file} does not exist: check the path") from None
    except (OSError, ValueError, yaml.YAMLError) as error:
        form = "TOML" if file.suffix == ".toml" else "YAML or JSON"
        raise UserError(f"{file} cannot be read as {form} ({' '.join(str(error).split())}): correct it") from None
    if not isinstance(values, dict):
        raise UserError(f"{file} must hold an object of settings, not {values!r:.60}: write NAME: VALUE lines")
    return values, lines


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return None


def write_settings(values: dict[str, Any]) -> str:
    """Write plain values as YAML that `read_settings` reads."""
    return yaml.dump(values, Dumper=_Dumper, sort_keys=False, allow_unicode=True, default_flow_style=False, width=100)


def _read_lines(node: yaml.Node | None, place: str, lines: dict[str, int], file: Path) -> None:
    if not isinstance(node, yaml.MappingNode):
        return
    for key, value in node.value:
        name, line = f"{place}{key.value}", key.start_mark.line + 1
        if key.tag != "tag:yaml.org,2002:str":
            raise UserError(f"{file}, line {line}: {key.value!s:.60} is no name of a setting: write NAME: VALUE lines")
        if name in lines:
            raise UserError(f"{file} has {name} in line {lines[name]} and again in line {line}: remove one")
        lines[name] = line
        _read_lines(value, f"{name}.", lines, file)
