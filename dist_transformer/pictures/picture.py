"""A picture of the page, and the colours that all of them share."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
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
