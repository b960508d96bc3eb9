"""Files of scores: a report as JSON, and the hypotheses beside it."""

import json
from pathlib import Path
from typing import Any

from dist_transformer.base.files import make_folder, write_file


def hypotheses_file(report: Path) -> Path:
    """Return the file of the hypotheses beside a report."""
    return report.with_name(f"{report.stem}.hypotheses.txt")


def write_report(report: dict[str, Any], file: Path, *, beside: dict[Path, str] | None = None) -> None:
    """Write a report as JSON.

    Args:
        beside: text files in the same folder, which are written first.

    Raises:
        UserError: the files cannot be written.
    """
    make_folder(file.parent)
    for path, text in (beside or {}).items():
        write_file(path, text)
    write_file(file, json.dumps(report, indent=2, ensure_ascii=False) + "\n")
