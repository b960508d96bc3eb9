"""Checks with a finding and a remedy, and the table of them that all commands print."""

import shutil
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

_COLUMNS = 100


@dataclass(frozen=True, kw_only=True, slots=True)
class Check:
    """A row of the table."""

    name: str
    found: str
    """Finding, or the problem."""
    state: Literal["ok", "warn", "fail"] = "ok"
    remedy: str = ""
    """Remedy, unless `found` ends with it."""

    @classmethod
    def that(cls, holds: bool, *, name: str, found: str) -> "Check":
        """Make a check that passes or fails."""
        return cls(name=name, found=found, state="ok" if holds else "fail")

    @property
    def passed(self) -> bool:
        return self.state != "fail"


def failed(checks: Sequence[Check]) -> list[str]:
    """List the names of the checks that failed."""
    return [check.name for check in checks if not check.passed]


def check_table(checks: Sequence[Check]) -> str:
    """Lay out checks as lines of at most 100 characters; paths and flags stay whole."""
    width = max(len(check.name) for check in checks)
    indent = " " * (width + 8)
    columns = min(_COLUMNS, shutil.get_terminal_size((_COLUMNS, 24)).columns)
    wrap = partial(
        textwrap.wrap, width=columns, subsequent_indent=indent, break_on_hyphens=False, break_long_words=False
    )
    lines = []
    for check in checks:
        state = "ok" if check.state == "ok" else check.state.upper()
        lines += wrap(check.found, initial_indent=f"{check.name:{width}}  {state:4}  ")
        if check.state != "ok" and check.remedy:
            lines += wrap(f"remedy: {check.remedy}", initial_indent=indent)
    return "\n".join(lines)
