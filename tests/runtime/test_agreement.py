"""Statements of ranks about their start, and the difference that is named."""

from pathlib import Path

import pytest

from dist_transformer.runtime import agreement, extensions
from dist_transformer.runtime.agreement import first_difference, statement_of
from dist_transformer.runtime.extensions import import_extension


def test_a_rank_states_its_settings_code_and_libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agreement, "IMPORTED", {})
    stated = statement_of({"model": {"width": 8}, "data": ["a"], "run_dir": Path("r"), "local_rank": 3})
    settings = {"model.width": "8", "data": '["a"]', "run_dir": '"r"'}
    assert {name: stated.pop(name) for name in settings} == settings
    assert stated.keys() == {"dist_transformer", "torch", "deepspeed", "code"}


def test_the_code_of_extensions_is_stated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stated = []
    for folder, content in (("a", "A = 1\n"), ("b", "A = 2\n")):
        file = tmp_path / folder / "linear.py"
        file.parent.mkdir()
        file.write_text(content)
        monkeypatch.setattr(extensions, "IMPORTED", {})
        import_extension(str(file))
        monkeypatch.setattr(agreement, "IMPORTED", extensions.IMPORTED)
        stated.append(statement_of({})["--import linear.py"])
    assert stated[0] != stated[1]


def test_the_first_difference_is_named_with_its_ranks() -> None:
    same = ("a", {"seed": "1", "data": "x"})
    assert first_difference([same, same]) is None
    assert first_difference([same, same, ("b", {"seed": "2", "data": "y"})]) == (
        "seed is 1 on rank 0 (a) and 2 on rank 2 (b)"
    )
    assert first_difference([same, ("b", {"seed": "1", "data": "x", "more": "3"})]) == (
        "more is not given on rank 0 (a) and 3 on rank 1 (b)"
    )
    assert first_difference([same, ("a", {"seed": "1"})]) == "data is x on rank 0 (a) and not given on rank 1 (a)"
