"""Templates of pages and cards, in which every value is escaped unless a filter has made it safe."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any


def fill(template: Path, *shared: Path, filters: Mapping[str, Callable[..., Any]], **values: Any) -> str:
    """Fill a template.

    Args:
        shared: folders with templates that it uses, besides its own folder.
        filters: functions for values, by the names that the templates use.
    """
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader([template.parent, *shared]),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"count": "{:,}".format, **filters}
    return environment.get_template(template.name).render(values)
