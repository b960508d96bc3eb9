"""Positions: the sinusoids, their rotations, and learned vectors next to them (section 3.5)."""

import math
from typing import TYPE_CHECKING

import numpy as np

from dist_transformer.model.positions import sinusoidal_positions
from dist_transformer.pictures.picture import COLORS, DASHES, Picture, draw_curves
from dist_transformer.reporting.figures import new_figure, picture_style, position_picture

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_POSITIONS, _WIDTH = 1024, 128
# The drawn rotation: few dimensions, so that the blocks of its matrix are visible, and the pair that the circle shows.
_SMALL_WIDTH, _OFFSET, _PAIR = 16, 5, 1
_ON_THE_CIRCLE = 9
_OFFSETS = tuple(range(1, 129))
# Positions of the similarities; few sentences are longer.
_COMPARED = 64


def rotation(offset: int, width: int) -> np.ndarray:
    """Return R with PE(pos + offset) = R · PE(pos) for every pos; float64, shape (width, width).

    Dimensions 2i and 2i + 1 hold sin(pos · w) and cos(pos · w) with w = 10000^(-2i / width). By the sums of angles,
    sin(a + b) = cos b · sin a + sin b · cos a, and cos(a + b) = -sin b · sin a + cos b · cos a.
    """
    matrix_DD = np.zeros((width, width))
    for first in range(0, width, 2):
        angle = offset * _rate(first // 2, width)
        matrix_DD[first : first + 2, first : first + 2] = [
            [math.cos(angle), math.sin(angle)],
            [-math.sin(angle), math.cos(angle)],
        ]
    return matrix_DD


def rotation_error(table_PD: np.ndarray, offset: int) -> float:
    """Return the largest |R · PE(pos) - PE(pos + offset)| over all dimensions and all pos of the table."""
    turned_PD = table_PD[:-offset].astype(np.float64) @ rotation(offset, table_PD.shape[1]).T
    return float(np.abs(turned_PD - table_PD[offset:]).max())


def similarity(table_PD: np.ndarray) -> np.ndarray:
    """Return the cosine similarity of every two positions, shape (P, P)."""
    unit_PD = table_PD / np.linalg.norm(table_PD, axis=1, keepdims=True)
    return unit_PD @ unit_PD.T


def mean_by_offset(similarity_PP: np.ndarray) -> np.ndarray:
    """Return the mean similarity of positions that are 0, 1, 2, … apart, shape (P,)."""
    return np.array([np.diagonal(similarity_PP, offset).mean() for offset in range(len(similarity_PP))])


def _rate(pair: int, width: int) -> float:
    """Return the angle by which a step of one position turns a pair of dimensions."""
    return float(10000.0 ** (-2 * pair / width))


def sinusoid_picture() -> Picture:
    """Draw a table as a heat map."""
    return Picture(
        name="positions",
        title="Sinusoids",
        section="3.5",
        caption=(
            f"Position encodings for d_model = {_WIDTH}. Each row is added to the embedding of "
            "the token at that position. Even dimensions are sines, odd ones cosines. The wavelength grows from 2π "
            "positions at the left to nearly 10000 · 2π at the right, so the right half hardly changes within a "
            "sentence."
        ),
        alt="Heat map of positions and dimensions: fast stripes at the left, slow ones in the middle, constant columns "
        "at the right.",
        figure=position_picture(sinusoidal_positions(_POSITIONS, _WIDTH).numpy()),
    )


def rotation_picture() -> Picture:
    """Draw a rotation matrix, one of its pairs on the circle, and its error for many offsets."""
    table_PD = sinusoidal_positions(_POSITIONS, _WIDTH).numpy()
    errors = [rotation_error(table_PD, offset) for offset in _OFFSETS]
    epsilon = float(np.finfo(np.float32).eps)
    with picture_style():
        figure = new_figure(10.0, 3.7)
        matrix, circle, error = figure.subplots(1, 3)
        image = matrix.imshow(rotation(_OFFSET, _SMALL_WIDTH), cmap="RdBu_r", vmin=-1, vmax=1)
        matrix.set_title(f"Rotation by {_OFFSET} positions, d_model = {_SMALL_WIDTH}", fontsize=10, parse_math=False)
        matrix.set_xlabel("dimension of PE(pos)")
        matrix.set_ylabel(f"dimension of PE(pos + {_OFFSET})")
        figure.colorbar(image, ax=matrix, shrink=0.6, ticks=(-1, 0, 1))
        _draw_circle(circle)
        largest = {"largest error": (_OFFSETS, np.array(errors) * 1e7)}
        draw_curves(error, largest, "Error of the rotation", "offset, positions", "error, 10⁻⁷")
        error.axhline(epsilon * 1e7, color=COLORS[1], linestyle=DASHES[1], label="epsilon of fp32")
        error.set_ylim(0.0, 1.35 * max(epsilon, *errors) * 1e7)
        error.legend(frameon=False, fontsize=9)
        error.set_box_aspect(1)
    return Picture(
        name="rotation",
        title="A step in position is a rotation",
        section="3.5",
        caption=(
            "For a fixed offset k, PE(pos + k) is one linear function of PE(pos) for all positions: a rotation of "
            "each pair of dimensions (left) by k times its rate. Middle: the pair of dimensions "
            f"{2 * _PAIR} and {2 * _PAIR + 1}; every arrow turns by the same angle. Right: the largest difference "
            f"between the rotated and the stored fp32 vectors over {_POSITIONS:,} positions and {_WIDTH} dimensions. "
            f"For k = 1 to {_OFFSETS[-1]} it is at most {max(errors):.1e}; the spacing of fp32 numbers at 1 is "
            f"{epsilon:.1e}."
        ),
        alt="A block-diagonal rotation matrix, arrows of equal angle on a circle, and an error curve at the level of "
        "rounding.",
        figure=figure,
    )


def _draw_circle(axes: "Axes") -> None:
    """Draw one pair of dimensions at the first positions, and arrows from some of them to pos + `_OFFSET`."""
    table_PD = sinusoidal_positions(_ON_THE_CIRCLE + _OFFSET, _SMALL_WIDTH).numpy()
    sines, cosines = table_PD[:, 2 * _PAIR], table_PD[:, 2 * _PAIR + 1]
    turn = np.linspace(0, 2 * np.pi, 200)
    axes.plot(np.cos(turn), np.sin(turn), color="0.8", linewidth=1)
    axes.plot(cosines, sines, "o", color="black", markersize=3)
    for pos in range(len(table_PD)):
        axes.text(1.15 * cosines[pos], 1.15 * sines[pos], str(pos), ha="center", va="center", fontsize=8)
    for number, pos in enumerate((0, 4, 8)):
        axes.annotate(
            "",
            (cosines[pos + _OFFSET], sines[pos + _OFFSET]),
            xytext=(cosines[pos], sines[pos]),
            arrowprops={"arrowstyle": "->", "color": COLORS[number], "linewidth": 1.5},
        )
    axes.set_title(f"Positions 0 to {len(table_PD) - 1}, arrows: + {_OFFSET}", fontsize=10)
    axes.set_xlabel(f"cosine, dimension {2 * _PAIR + 1}")
    axes.set_ylabel(f"sine, dimension {2 * _PAIR}")
    axes.set_xlim(-1.35, 1.35)
    axes.set_ylim(-1.35, 1.35)
    axes.set_aspect("equal")


def learned_picture(learned_PD: np.ndarray) -> Picture:
    """Draw how similar positions are to each other in a learned table and in sinusoids of the same width."""
    count = min(_COMPARED, len(learned_PD))
    tables = {
        "learned": learned_PD[:count].astype(np.float64),
        "sinusoids": sinusoidal_positions(count, learned_PD.shape[1]).numpy().astype(np.float64),
    }
    maps = {name: similarity(table_PD) for name, table_PD in tables.items()}
    means = {name: mean_by_offset(map_PP) for name, map_PP in maps.items()}
    with picture_style():
        figure = new_figure(10.0, 3.5)
        *panels, curves = figure.subplots(1, 3)
        for axes, (name, map_PP) in zip(panels, maps.items(), strict=True):
            image = axes.imshow(map_PP, cmap="RdBu_r", vmin=-1, vmax=1, interpolation="nearest")
            axes.set_title(name.capitalize(), fontsize=10)
            axes.set_xlabel("position")
        panels[0].set_ylabel("position")
        figure.colorbar(image, ax=panels, shrink=0.7, label="cosine similarity")
        # The longest offsets have few pairs.
        near = range(count // 2 + 1)
        drawn = {name: (near, mean[: len(near)]) for name, mean in means.items()}
        draw_curves(curves, drawn, "Mean by distance", "distance, positions", "cosine similarity")
        curves.legend(frameon=False, fontsize=9)
        curves.set_box_aspect(1)
    neighbours = ", ".join(f"{mean[1]:.2f} for {name}" for name, mean in means.items())
    return Picture(
        name="learned-positions",
        title="Learned positions",
        section="3.5 and row (E) of Table 3",
        caption=(
            f"Cosine similarity of the vectors of positions 0 to {count - 1}. Sinusoids are similar to their "
            "neighbours, by a function of the distance alone. Learned vectors start at random, and training shapes "
            "only those of positions that its sentences reach, mostly the first ones. Mean similarity of neighbours: "
            f"{neighbours}."
        ),
        alt="Heat maps of the similarity of positions, learned and sinusoidal, and their means by distance.",
        figure=figure,
    )
