"""Decoding is one set of settings: for flags, files and Python."""

import json
from pathlib import Path
from typing import Any

import pytest

from dist_transformer.base.errors import UserError
from dist_transformer.cli import evaluate, translate
from dist_transformer.cli.score import ScoreSettings
from dist_transformer.cli.translate import TranslateSettings
from dist_transformer.config.command_line import read_keywords
from dist_transformer.config.plain import to_plain
from dist_transformer.config.schema import settings_of
from dist_transformer.config.settings_file import write_settings
from dist_transformer.evaluation.settings import EvaluateSettings
from dist_transformer.inference import decoding, scoring

CASES: list[tuple[Any, type, dict[str, Any]]] = [
    (
        translate,
        TranslateSettings,
        {
            "model": ["a", "b"],
            "direction": "en-de",
            "tags": ["<bt>", "<2de>"],
            "precision": "bf16",
            "sample": True,
            "nbest": 3,
            "distinct": True,
            "top_p": 0.75,
            "temperature": 2.0,
            "seed": 0,
            "format": "jsonl",
            "split_over": "no",
        },
    ),
    (
        evaluate,
        EvaluateSettings,
        {
            "model": ["a"],
            "src": "s",
            "ref": ["r", "r2"],
            "lowercase": True,
            "mbr": 8,
            "utility": "bleu",
            "max_extra_tokens": 9,
            "split_over": 20,
            "device": "cpu",
        },
    ),
]
Screen = pytest.CaptureFixture[str]


def printed(command: Any, monkeypatch: pytest.MonkeyPatch, capsys: Screen, *words: object) -> str:
    monkeypatch.setattr("sys.argv", ["x", *map(str, words), "--print-config"])
    with pytest.raises(SystemExit):
        command.parse_arguments()
    return capsys.readouterr().out


def as_flags(kind: type, values: dict[str, Any]) -> list[str]:
    words: list[str] = []
    for each in settings_of(kind):
        value = values.get(each.name)
        if value is not None:
            words += [each.flag, *([] if value is True else map(str, value if isinstance(value, list) else [value]))]
    return words


@pytest.mark.parametrize(("command", "kind", "values"), CASES, ids=["translate", "evaluate"])
def test_flags_files_and_keywords_give_the_same_settings(
    command: Any,
    kind: type,
    values: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: Screen,
) -> None:
    from_flags = printed(command, monkeypatch, capsys, *as_flags(kind, values))
    for name, text in (("a.json", json.dumps(values)), ("a.yaml", write_settings(values)), ("b.yaml", from_flags)):
        (tmp_path / name).write_text(text, encoding="utf-8")
        assert printed(command, monkeypatch, capsys, "--config", tmp_path / name) == from_flags
    in_python: Any = read_keywords(kind, values, "f").build(kind)
    assert write_settings(to_plain(in_python)) == from_flags
    assert all(f"\n{name}: " in f"\n{from_flags}" for name in values if name not in ("model", "tags", "ref"))


def test_a_setting_without_effect_is_refused_in_a_file_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that has its default is no setting, because a printed file has them all."""
    monkeypatch.setattr("sys.argv", ["x", "--model", "m", "--config", str(tmp_path / "a.yaml")])
    (tmp_path / "a.yaml").write_text("mbr: 8\nbeam: 4\nsample: false\ntop_k: null")
    assert translate.parse_arguments().decoding.samples == 8
    (tmp_path / "a.yaml").write_text("mbr: 8\nbeam: 3")
    with pytest.raises(UserError, match=r"^--beam has no effect with --mbr, which draws samples without a search: "):
        translate.parse_arguments()


@pytest.mark.parametrize(
    ("kind", "name", "numbers"),
    [
        (TranslateSettings, "batch_tokens", decoding.BATCH_TOKENS),
        (TranslateSettings, "chunk_lines", translate._CHUNK_LINES),
        (ScoreSettings, "batch_tokens", scoring._BATCH_TOKENS),
    ],
)
def test_help_has_the_defaults_of_each_device(kind: type, name: str, numbers: dict[str, int]) -> None:
    (text,) = (each.text for each in settings_of(kind) if each.name == name)
    assert f"default: {numbers['cpu']} on a CPU, {numbers['cuda']} on a GPU" in text
