"""Pages from templates: self-contained, without scripts, light and dark."""

import base64
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dist_transformer.base.templates import fill
from dist_transformer.config.language_codes import language_tag
from dist_transformer.version import __version__

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_SHARED = Path(__file__).parent / "templates"
# CSS pixels: the width of the page, an inch at full size, and the smallest inch with readable labels.
_PAGE_WIDTH, _INCH, _SMALLEST_INCH = 1054, 96, 68


def render_page(template: Path, **values: Any) -> str:
    """Fill a template, which may use those of all pages, with values."""
    filters: dict[str, Callable[..., Any]] = {
        "anchor": lambda title: title.lower().replace(" ", "-"),
        "data_url": _data_url,
        "language_tag": language_tag,
        "minute": "{:%Y-%m-%d %H:%M} UTC".format,
        "pixels": _pixels,
    }
    return fill(template, _SHARED, filters=filters, version=__version__, **values)


def _data_url(figure: "Figure") -> str:
    from dist_transformer.reporting.figures import as_svg

    # Embedded as an image, because inline styles would affect the page, and their names could clash.
    return f"data:image/svg+xml;base64,{base64.b64encode(as_svg(figure).encode()).decode('ascii')}"


def _pixels(figure: "Figure") -> int:
    """Return the width of a figure on a page; where the page is narrower, it scrolls in a box of its own."""
    inches = figure.get_figwidth()
    return round(max(min(_INCH * inches, _PAGE_WIDTH), _SMALLEST_INCH * inches))
