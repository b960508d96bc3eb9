"""Values of records and settings: numbers that are safe to compute with, and texts for a page."""

import math
from pathlib import PurePosixPath
from typing import Any

from dist_transformer.base.urls import without_secrets


def number(record: dict[str, Any], name: str) -> float | None:
    """Read a finite number of a record; None if it is missing or not finite."""
    value = record.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return float(value)


def shown(value: Any) -> str:
    """Format a setting: `/home/me/data/wmt` → `…/wmt`; no secrets of a URL, and no folders of the machine."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, list):
        return ", ".join(map(shown, value)) or "none"
    if not isinstance(value, str):
        return str(value)
    return f"…/{PurePosixPath(value).name}" if PurePosixPath(value).is_absolute() else without_secrets(value)


def scientific(value: float) -> str:
    """Format a number as `2.45·10¹⁴`, without trailing zeros."""
    mantissa, exponent = f"{value:.2e}".split("e")
    return f"{float(mantissa):g}·10{superscript(int(exponent))}"


def superscript(number: int) -> str:
    return str(number).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))
