"""Rotations and similarities of positions, by hand."""

import math

import numpy as np

from dist_transformer.model.positions import sinusoidal_positions
from dist_transformer.pictures.positions import (
    learned_picture,
    mean_by_offset,
    rotation,
    rotation_error,
    rotation_picture,
    similarity,
    sinusoid_picture,
)


def test_a_rotation_has_a_block_per_pair() -> None:
    """Width 4: rates 1 and 1 / 100, so an offset of 2 turns by 2 and by 0.02."""
    expected = [
        [math.cos(2), math.sin(2), 0, 0],
        [-math.sin(2), math.cos(2), 0, 0],
        [0, 0, math.cos(0.02), math.sin(0.02)],
        [0, 0, -math.sin(0.02), math.cos(0.02)],
    ]
    np.testing.assert_allclose(rotation(2, 4), expected)


def test_the_error_is_that_of_rounding_for_sinusoids_and_large_for_other_tables() -> None:
    table_PD = sinusoidal_positions(100, 16).numpy()
    assert 0 < rotation_error(table_PD, 7) < 2 * np.finfo(np.float32).eps
    table_PD[50, 3] += 0.5
    assert rotation_error(table_PD, 7) > 0.4


def test_the_caption_states_the_largest_error() -> None:
    picture = rotation_picture()
    table_PD = sinusoidal_positions(1024, 128).numpy()
    errors = [rotation_error(table_PD, offset) for offset in range(1, 129)]
    assert f"For k = 1 to 128 it is at most {max(errors):.1e};" in picture.caption
    (error,) = (axes for axes in picture.figure.axes if axes.get_title() == "Error of the rotation")
    np.testing.assert_allclose(error.lines[0].get_ydata(), np.array(errors) * 1e7)


def test_sinusoids_are_drawn_from_the_models_table() -> None:
    image = sinusoid_picture().figure.axes[0].images[0]
    np.testing.assert_array_equal(image.get_array(), sinusoidal_positions(128, 128).numpy())


def test_similarity_is_the_cosine() -> None:
    table_PD = np.array([[1.0, 0.0], [0.0, 2.0], [-3.0, 0.0]])
    found = similarity(table_PD)
    np.testing.assert_allclose(found, [[1, 0, -1], [0, 1, 0], [-1, 0, 1]])
    np.testing.assert_allclose(mean_by_offset(found), [1, 0, -1])


def test_learned_vectors_are_next_to_sinusoids_of_their_width() -> None:
    learned_PD = np.random.default_rng(0).normal(size=(100, 6)).astype(np.float32)
    picture = learned_picture(learned_PD)
    panels = {axes.get_title(): axes for axes in picture.figure.axes}
    np.testing.assert_allclose(panels["Learned"].images[0].get_array(), similarity(learned_PD[:64]), atol=1e-5)
    sinusoids = similarity(sinusoidal_positions(64, 6).numpy())
    np.testing.assert_allclose(panels["Sinusoids"].images[0].get_array(), sinusoids, atol=1e-5)
    assert f"{mean_by_offset(sinusoids)[1]:.2f} for sinusoids" in picture.caption
    assert "positions 0 to 63" in picture.caption
    assert "positions 0 to 9." in learned_picture(np.eye(10, dtype=np.float32)).caption
