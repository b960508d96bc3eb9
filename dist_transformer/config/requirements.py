"""Checks of settings. An error names the field, its value and the remedy."""

from collections.abc import Iterable, Iterator
from typing import Any

from dist_transformer.base.errors import UserError
from dist_transformer.config.registry import Registry


def require(condition: bool, field_name: str, value: object, remedy: str) -> None:
    if not condition:
        raise UserError(f"{field_name} is {value!r:.200}: {remedy}")


def require_fraction(config: object, *names: str) -> None:
    for name, value in _numbers(config, names):
        require(0.0 <= value < 1.0, name, value, "it must be 0 or more, and below 1")


def require_not_negative(config: object, *names: str) -> None:
    for name, value in _numbers(config, names):
        require(value >= 0, name, value, "it must be 0 or more")


def require_positive(config: object, *names: str) -> None:
    for name, value in _numbers(config, names):
        require(value > 0, name, value, "it must be above 0")


def _numbers(config: object, names: Iterable[str]) -> Iterator[tuple[str, int | float]]:
    """Yield the numbers that these settings have: none for None or a word, several for a list."""
    for name in names:
        value = getattr(config, name)
        for each in value if isinstance(value, tuple) else (value,):
            if isinstance(each, int | float):
                yield name, each


def require_known(config: object, name: str, registry: Registry[Any]) -> None:
    value = getattr(config, name)
    require(value in registry, name, value, registry.remedy_for(value))
