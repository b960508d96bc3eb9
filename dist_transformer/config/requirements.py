"""Checks of settings. An error names the field, its value and the remedy."""

from typing import Any

from dist_transformer.base.errors import UserError
from dist_transformer.config.registry import Registry


def require(condition: bool, field_name: str, value: object, remedy: str) -> None:
    if not condition:
        raise UserError(f"{field_name} is {value!r:.200}: {remedy}")


def require_fraction(config: object, *names: str) -> None:
    for name in names:
        value = getattr(config, name)
        require(0.0 <= value < 1.0, name, value, "it must be 0 or more, and below 1")


def require_not_negative(config: object, *names: str) -> None:
    for name in names:
        require(getattr(config, name) >= 0, name, getattr(config, name), "it must be 0 or more")


def require_positive(config: object, *names: str) -> None:
    for name in names:
        require(getattr(config, name) > 0, name, getattr(config, name), "it must be above 0")


def require_known(config: object, name: str, registry: Registry[Any]) -> None:
    value = getattr(config, name)
    require(value in registry, name, value, registry.remedy_for(value))
