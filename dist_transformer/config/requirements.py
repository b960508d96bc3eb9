"""Checks of settings. An error names the field, its value and the remedy."""

import math
from typing import Any

from dist_transformer.base.errors import UserError
from dist_transformer.config.registry import Registry

# torch's generators and numpy's integers take 64 signed bits.
_TOO_LARGE = 2**63
# Far above every rate, share, time and size in GiB. Products of such numbers stay far below the largest float.
LARGEST_FLOAT = 2.0**40


def require(condition: bool, field_name: str, value: object, remedy: str) -> None:
    if not condition:
        raise UserError(f"{field_name} is {value!r:.200}: {remedy}")


def require_fraction(config: object, *names: str) -> None:
    for name in names:
        value = getattr(config, name)
        require(0.0 <= value < 1.0, name, value, "it must be 0 or more, and below 1")


def require_not_negative(config: object, *names: str) -> None:
    for name in names:
        require_number(name, getattr(config, name), getattr(config, name) >= 0, "it must be 0 or more")


def require_positive(config: object, *names: str) -> None:
    for name in names:
        require_number(name, getattr(config, name), getattr(config, name) > 0, "it must be above 0")


def require_number(name: str, value: float, fits: bool, remedy: str) -> None:
    require(fits and value < math.inf, name, value, remedy)
    most = LARGEST_FLOAT if isinstance(value, float) else _TOO_LARGE
    require(value < most, name, value, "use a smaller number")


def require_known(config: object, name: str, registry: Registry[Any]) -> None:
    value = getattr(config, name)
    require(value in registry, name, value, registry.remedy_for(value))
