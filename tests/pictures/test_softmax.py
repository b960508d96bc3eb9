"""Largest weight, entropy and gradient of softmax at their limits."""

import math

import numpy as np
import pytest
import torch

from dist_transformer.pictures.softmax import KEYS, measures, saturation, saturation_picture


def test_equal_scores_have_the_largest_entropy() -> None:
    """p = 1/4: entropy ln 4; the squared norm of diag(p) - p p^T is 1/4 - 1/16."""
    found = measures(np.full((1, 4), 7.0))
    assert found.largest == pytest.approx([0.25])
    assert found.entropy == pytest.approx([math.log(4)])
    assert found.gradient == pytest.approx([math.sqrt(3 / 16)])


def test_one_large_score_has_no_entropy_and_no_gradient() -> None:
    found = measures(np.array([[0.0, 1000.0, 0.0]]))
    assert (found.largest.tolist(), found.entropy.tolist(), found.gradient.tolist()) == ([1.0], [0.0], [0.0])


def test_the_gradient_is_the_norm_of_the_jacobian() -> None:
    scores_QS = np.random.default_rng(0).normal(size=(3, 5))
    jacobians = [
        torch.autograd.functional.jacobian(lambda s: torch.softmax(s, -1), torch.from_numpy(scores_S))
        for scores_S in scores_QS
    ]
    expected = [float(torch.linalg.matrix_norm(jacobian)) for jacobian in jacobians]
    assert measures(scores_QS).gradient == pytest.approx(expected)


def test_only_scores_without_the_factor_saturate() -> None:
    scaled, plain = (saturation(1024, scaled=is_scaled) for is_scaled in (True, False))
    assert np.median(plain.largest) > 0.99
    assert np.median(plain.gradient) < 0.01
    narrow = saturation(64, scaled=True)
    assert np.median(scaled.gradient) == pytest.approx(np.median(narrow.gradient), rel=0.1)
    assert np.median(scaled.entropy) == pytest.approx(np.median(narrow.entropy), rel=0.1)
    assert (scaled.entropy <= math.log(KEYS)).all()


def test_the_picture_has_both_curves_in_three_panels() -> None:
    picture = saturation_picture()
    assert [axes.get_title() for axes in picture.figure.axes] == ["Largest weight", "Entropy", "Gradient"]
    for axes, measure in zip(picture.figure.axes, ("largest", "entropy", "gradient"), strict=True):
        lines = {line.get_label(): line for line in axes.lines}
        for label, is_scaled in (("scaled by 1/√d_k", True), ("not scaled", False)):
            expected = [np.median(getattr(saturation(width, scaled=is_scaled), measure)) for width in (1, 1024)]
            assert lines[label].get_ydata()[[0, -1]] == pytest.approx(expected)
    at_64 = [np.median(saturation(64, scaled=is_scaled).gradient) for is_scaled in (True, False)]
    assert f"is {at_64[0]:.2g} with the factor and {at_64[1]:.2g} without; at 1,024" in picture.caption
