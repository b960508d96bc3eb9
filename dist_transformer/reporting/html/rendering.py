"""Pages from templates, in which every value is escaped: self-contained, without scripts, light and dark."""

import base64
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dist_transformer.config.language_codes import language_tag
from dist_transformer.version import __version__

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_SHARED = Path(__file__).parent / "templates"
# CSS pixels: the width of the page, an inch at full size, and the smallest inch with readable labels.
_PAGE_WIDTH, _INCH, _SMALLEST_INCH = 1054, 96, 68


def fill(template: Path, **values: Any) -> str:
    """Fill a template, which may use those of all pages, with values; only what a template writes is markup."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    folders = FileSystemLoader([template.parent, _SHARED])
    environment = Environment(
        loader=folders, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters |= {
        "anchor": lambda title: title.lower().replace(" ", "-"),
        "count": "{:,}".format,
        "data_url": _data_url,
        "language_tag": language_tag,
        "minute": "{:%Y-%m-%d %H:%M} UTC".format,
        "pixels": _pixels,
    }
    return environment.get_template(template.name).render(version=__version__, **values)


def _data_url(figure: "Figure") -> str:
    from dist_transformer.reporting.figures import as_svg

    # Embedded as an image, because inline styles would affect the page, and their names could clash.
    return f"data:image/svg+xml;base64,{base64.b64encode(as_svg(figure).encode()).decode('ascii')}"


def _pixels(figure: "Figure") -> int:
    """Return the width of a figure on a page; where the page is narrower, it scrolls in a box of its own."""
    inches = figure.get_figwidth()
    return round(max(min(_INCH * inches, _PAGE_WIDTH), _SMALLEST_INCH * inches))
