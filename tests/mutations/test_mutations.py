"""The faults that are drawn, of code by hand."""

from pathlib import Path

from tests.mutations import __main__ as module

CODE = '''"""Limit 3."""


def limited(values: list[int], most: int = 9) -> int:
    """At most 4."""
    if len(values) > most and values:
        values.clear()
    return values[0] + 2
'''


def test_every_kind_of_fault_is_found_in_code_and_nowhere_else(tmp_path: Path, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setattr(module, "ROOT", tmp_path)
    (tmp_path / "m.py").write_text(CODE, encoding="utf-8")
    found = {(fault["line"], fault["kind"]): fault["after"].strip() for fault in module.candidates(tmp_path / "m.py")}
    assert found == {
        (6, "comparison"): "if len(values) >= most and values:",
        (6, "operator"): "if len(values) > most or values:",
        (7, "dropped call"): "pass",
        (8, "operator"): "return values[0] - 2",
        # Two constants are in this line; the dictionary keeps one.
        (8, "constant"): "return values[1] + 2",
        (8, "return"): "return None",
    }
