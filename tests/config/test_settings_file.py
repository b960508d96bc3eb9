"""Files of settings: YAML as people write it, JSON, and what is said about a wrong one."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from dist_transformer.base.errors import UserError
from dist_transformer.config.settings_file import read_settings, write_settings


def read(folder: Path, text: str, name: str = "mine.yaml") -> dict[str, Any]:
    (folder / name).write_text(text, encoding="utf-8")
    return read_settings(folder / name)[0]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-3", 0.001),
        ("1.5E+2", 150.0),
        (".5", 0.5),
        ("-3", -3),
        ("true", True),
        ("~", None),
        ("", None),
        # YAML 1.1 has other ideas of these.
        *((word, word) for word in ("no", "on", "1:30", "100:3", "2026-11-29", "010", "0x10", "1_000", "None")),
        ('"1e-3"', "1e-3"),
        ("[a, 2]", ["a", 2]),
    ],
)
def test_a_word_is_what_it_looks_like(tmp_path: Path, text: str, value: Any) -> None:
    found = read(tmp_path, f"# Mine.\nname: {text}\n")["name"]
    assert (found, type(found)) == (value, type(value))
    assert read(tmp_path, write_settings({"name": value})) == {"name": value}


def test_lines_and_groups(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("max_steps: 3\n\nmodel:\n  # Small.\n  width: 8\n")
    assert read_settings(tmp_path / "a.yaml") == (
        {"max_steps": 3, "model": {"width": 8}},
        {"max_steps": 1, "model": 3, "model.width": 5},
    )


def test_json_stays_json(tmp_path: Path) -> None:
    values = {"corpus": "a\tb 😀 no", "n": [1e-9, None, True], "model": {"width": 1}}
    text = json.dumps(values, indent="\t")
    for name in ("a.json", "a.yaml"):
        assert read(tmp_path, text, name) == values
        assert read_settings(tmp_path / name)[1]["model.width"] == text.count("\n") - 1


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("a.yaml", "width: 1\nheads: 2\nwidth: 3\n", "a.yaml has width in line 1 and again in line 3: remove one"),
        ("a.json", '{"model": {"width": 1,\n"width": 1}}', "has model.width in line 1 and again in line 2: remove one"),
        ("a.yaml", "width: 1\n2: 3\n", "a.yaml, line 2: 2 is no name of a setting"),
        ("a.yaml", "width: [1\n", "a.yaml cannot be read as YAML or JSON ("),
        ("a.yaml", "run: !!python/object/apply:os.system [ls]\n", "a.yaml cannot be read as YAML or JSON ("),
        ("a.yaml", "- a\n", "a.yaml must hold an object of settings, not ['a']: "),
        ("a.toml", "model = {", "a.toml cannot be read as TOML ("),
    ],
)
def test_a_wrong_file_is_named(tmp_path: Path, name: str, text: str, said: str) -> None:
    with pytest.raises(UserError, match=re.escape(said)):
        read(tmp_path, text, name)


def test_an_empty_file_states_nothing(tmp_path: Path) -> None:
    assert read(tmp_path, "# Nothing yet.\n") == {}
