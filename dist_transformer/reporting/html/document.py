"""The parts that all pages share: the head, sections, figures embedded as images, the time of writing."""

import base64
from datetime import datetime
from typing import TYPE_CHECKING

from dist_transformer.reporting.html.markup import Html, element
from dist_transformer.reporting.html.style import CSS

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# With this policy the browser refuses scripts and anything from other sources.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
# Figures of this width or more take the whole width of the page, because half of it would make their labels too small.
_WIDE_INCHES = 10.0
# CSS pixels: the width of the page, an inch at full size, and the smallest inch with readable labels.
_PAGE_WIDTH, _INCH, _SMALLEST_INCH = 1054, 96, 68


def document(title: str, *content: Html) -> str:
    """Render a self-contained page: no network access, no scripts, light and dark."""
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", http_equiv="Content-Security-Policy", content=_POLICY),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("meta", name="color-scheme", content="light dark"),
        element("title", title),
        element("style", Html(CSS)),
    )
    return "<!DOCTYPE html>\n" + element("html", head, element("body", element("main", *content)), lang="en") + "\n"


def section(title: str, *content: Html) -> Html:
    return element("section", element("h2", title), *content, id=anchor(title))


def anchor(title: str) -> str:
    """Return the id of a section, for links to it."""
    return title.lower().replace(" ", "-")


def framed(figure: "Figure", caption: Html, *, alt: str) -> Html:
    """Embed a matplotlib figure, which scrolls in a box of its own where the page is narrower.

    Args:
        caption: the `figcaption` element above it.
        alt: the text for readers who do not see the figure.
    """
    from dist_transformer.reporting.figures import as_svg

    # Embedded as an image, because inline styles would affect the page, and their names could clash.
    picture = base64.b64encode(as_svg(figure).encode()).decode("ascii")
    inches = figure.get_figwidth()
    width = round(max(min(_INCH * inches, _PAGE_WIDTH), _SMALLEST_INCH * inches))
    image = element("img", src=f"data:image/svg+xml;base64,{picture}", width=width, alt=alt)
    return element(
        "figure",
        caption,
        element("div", image, class_="scroll"),
        class_="map wide" if inches >= _WIDE_INCHES else "map",
    )


def minute(when: datetime) -> str:
    return f"{when:%Y-%m-%d %H:%M} UTC"
