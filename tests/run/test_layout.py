import json
from pathlib import Path

import pytest

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


def test_damaged_lines_are_counted(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text("\n".join([LINES[0], '{"kind": "train", "st', "[]", LINES[1]]))
    records, damaged = scan_records(tmp_path / "metrics.jsonl")
    assert records == {"train": [{"kind": "train", "step": 1}], "valid": [{"kind": "valid", "step": 1}]}
    assert damaged == (2, 3)
