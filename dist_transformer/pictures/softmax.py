"""Saturation of softmax with and without the factor 1 / sqrt(d_k) (section 3.2.1)."""

from typing import NamedTuple

import numpy as np

from dist_transformer.pictures.picture import COLORS, Picture, draw_curves
from dist_transformer.reporting.figures import new_figure, picture_style

KEYS = 32
_HEAD_WIDTHS = tuple(2**power for power in range(11))
_QUERIES, _SEED = 200, 1


class Saturation(NamedTuple):
    """Three measures of softmax over the scores of random queries, each of shape (queries,)."""

    largest: np.ndarray
    """Largest weight."""
    entropy: np.ndarray
    """Entropy in nats; at most the logarithm of the number of keys."""
    gradient: np.ndarray
    """Frobenius norm of the Jacobian of softmax."""


def measures(scores_QS: np.ndarray) -> Saturation:
    """Measure softmax over the last axis.

    The Jacobian of p = softmax(s) is diag(p) - p p^T. The square of its norm is Σ p² - 2 Σ p³ + (Σ p²)².
    """
    weights_QS = np.exp(scores_QS - scores_QS.max(axis=-1, keepdims=True))
    weights_QS /= weights_QS.sum(axis=-1, keepdims=True)
    # A weight may be 0 after rounding; 0 · log 0 is 0.
    logarithms_QS = np.log(weights_QS, out=np.zeros_like(weights_QS), where=weights_QS > 0)
    squares = (weights_QS**2).sum(axis=-1)
    squared_norm = squares - 2 * (weights_QS**3).sum(axis=-1) + squares**2
    return Saturation(
        largest=weights_QS.max(axis=-1),
        entropy=-(weights_QS * logarithms_QS).sum(axis=-1),
        # Rounding can leave a small negative number.
        gradient=np.sqrt(np.maximum(squared_norm, 0.0)),
    )


def saturation(head_width: int, *, scaled: bool) -> Saturation:
    """Measure softmax(q k / sqrt(d_k)), or without the root, for q and k from N(0, 1); the seed is fixed."""
    generator = np.random.default_rng([_SEED, head_width])
    q_QK = generator.standard_normal((_QUERIES, head_width))
    k_QSK = generator.standard_normal((_QUERIES, KEYS, head_width))
    scores_QS = (k_QSK @ q_QK[:, :, None])[:, :, 0]
    return measures(scores_QS * head_width**-0.5 if scaled else scores_QS)


def saturation_picture() -> Picture:
    """Draw the measures against d_k, as medians with the range of 80% of the queries."""
    kinds = (("scaled by 1/√d_k", True), ("not scaled", False))
    found = {label: [saturation(width, scaled=scaled) for width in _HEAD_WIDTHS] for label, scaled in kinds}
    panels = (("Largest weight", "weight"), ("Entropy", "nats"), ("Gradient", "norm of the Jacobian"))
    with picture_style():
        figure = new_figure(10.0, 3.8)
        grid = figure.subplots(1, 3)
        for number, (axes, (title, unit)) in enumerate(zip(grid, panels, strict=True)):
            curves = {}
            for (label, results), color in zip(found.items(), COLORS, strict=False):
                values = np.array([result[number] for result in results])
                low, middle, high = np.quantile(values, (0.1, 0.5, 0.9), axis=1)
                axes.fill_between(_HEAD_WIDTHS, low, high, color=color, alpha=0.15, linewidth=0)
                curves[label] = (_HEAD_WIDTHS, middle)
            draw_curves(axes, curves, title, "d_k, width of a head", unit)
            axes.set_xscale("log", base=2)
            axes.set_xticks(_HEAD_WIDTHS[::2], [f"{width:,}" for width in _HEAD_WIDTHS[::2]])
            axes.set_ylim(bottom=0.0)
        grid[0].set_ylim(0.0, 1.05)
        grid[1].axhline(np.log(KEYS), color="0.4", linewidth=1)
        grid[1].annotate(
            f"all weights equal: ln {KEYS}",
            (_HEAD_WIDTHS[-1], np.log(KEYS)),
            xytext=(0, 3),
            textcoords="offset points",
            ha="right",
            fontsize=9,
        )
        grid[1].set_ylim(0.0, 1.15 * np.log(KEYS))
        lines, labels = grid[0].get_legend_handles_labels()
        figure.legend(lines, labels, loc="outside lower center", ncols=2, frameon=False)
    gradients = {
        width: [float(np.median(found[label][_HEAD_WIDTHS.index(width)].gradient)) for label, _ in kinds]
        for width in (64, _HEAD_WIDTHS[-1])
    }
    base, widest = (f"{scaled:.2g} with the factor and {plain:.2g} without" for scaled, plain in gradients.values())
    return Picture(
        name="softmax",
        title="Why scores are scaled",
        section="3.2.1",
        caption=(
            f"Softmax over the scores of one random query and {KEYS} random keys, whose components have mean 0 and "
            "variance 1. Without the factor 1/√d_k, the largest weight approaches 1 and the gradient vanishes as d_k "
            "grows. With it, all three hardly change. The median norm of the Jacobian at d_k = 64, as in the base "
            f"model, is {base}; at {_HEAD_WIDTHS[-1]:,} it is {widest}. Lines: medians "
            f"of {_QUERIES} queries; shaded: the middle 80%."
        ),
        alt=(
            "Three curves against the width of a head: largest weight, entropy and gradient norm of softmax. Scaled "
            "scores yield flat curves; the others saturate."
        ),
        figure=figure,
    )
