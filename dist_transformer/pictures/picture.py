"""A picture of the page, and the curves, with colours that all of them share."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Blue, vermilion, green, black: told apart with every common kind of colour blindness (Okabe and Ito 2008).
COLORS = ("#0072B2", "#D55E00", "#009E73", "#000000")
# Lines also differ in their dashes, for print in grey.
DASHES = ("-", "--", ":", "-.")


@dataclass(frozen=True, kw_only=True, slots=True)
class Picture:
    """A figure and its words."""

    name: str
    """Name of its file, without a suffix."""
    title: str
    """Heading of its section."""
    section: str
    """Section of the paper that it shows."""
    caption: str
    """Text on what to see, with the figures that were computed for it."""
    alt: str
    """Description for readers who do not see it."""
    figure: "Figure"


def draw_curves(
    axes: "Axes", curves: Mapping[str, "tuple[Sequence[float], np.ndarray]"], title: str, x: str, y: str
) -> None:
    """Draw curves, by their labels, with names of the axes."""
    for (label, points), color, dashes in zip(curves.items(), COLORS, DASHES, strict=False):
        axes.plot(*points, dashes, color=color, label=label)
    axes.set_title(title, fontsize=10, parse_math=False)
    axes.set_xlabel(x, parse_math=False)
    axes.set_ylabel(y)
    axes.grid(alpha=0.3)
