import json
from pathlib import Path

import pytest

from dist_transformer.run import layout
from dist_transformer.run.layout import read_records, scan_records

LINES = [json.dumps({"kind": kind, "step": step}) for step in (1, 2) for kind in ("train", "valid")]


@pytest.mark.parametrize("torn", ["", '{"kind": "train", "st', "\0" * 40, '{"kind": "train", "step": 3}'])
def test_the_last_line_may_be_torn(torn: str, tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text("\n".join([*LINES, torn]))
    steps = [record["step"] for record in read_records(tmp_path, "train")]
    assert steps == ([1, 2, 3] if torn.endswith("}") else [1, 2])


def test_another_line_may_not(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text("\n".join([LINES[0], '{"kind": "tr', *LINES[1:]]) + "\n")
    with pytest.raises(ValueError, match="line 2 is not a record"):
        read_records(tmp_path, "train")


def test_a_record_holds_numbers_and_texts(tmp_path: Path) -> None:
    """A nested value may take 26 times the memory of its text."""
    (tmp_path / "metrics.jsonl").write_text("\n".join([LINES[0], '{"kind": "train", "step": 2, "a": [[]]}', LINES[1]]))
    records, damaged = scan_records(tmp_path / "metrics.jsonl")
    assert records == {"train": [{"kind": "train", "step": 1}], "valid": [{"kind": "valid", "step": 1}]}
    assert damaged == (2,)


def test_records_that_are_kept_have_a_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "metrics.jsonl").write_text("\n".join(LINES))
    monkeypatch.setattr(layout, "_KEPT_BYTES", 2 * len(LINES[0] + "\n"))
    assert len(read_records(tmp_path, "train")) == 2
    assert list(scan_records(tmp_path / "metrics.jsonl", only="valid")[0]) == ["valid"]
    with pytest.raises(OSError, match="its records have more than"):
        scan_records(tmp_path / "metrics.jsonl")
