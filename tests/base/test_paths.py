"""Paths that no file can have are refused before any work."""

from pathlib import Path

import pytest

from dist_transformer.base.errors import UserError
from dist_transformer.base.paths import require_usable, usable_path
from dist_transformer.data.text.pairs import expand


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("", "a path is empty"),
        ("caf\udce9/text.de", r"the path caf\udce9/text.de is not UTF-8: rename"),
    ],
)
def test_a_path_that_cannot_be_is_refused(path: str, message: str) -> None:
    with pytest.raises(UserError) as caught:
        usable_path(path)
    assert message in str(caught.value)


def test_other_paths_and_urls_are_left_alone() -> None:
    assert usable_path(f"{'ü' * 127}/x y\n") == Path(f"{'ü' * 127}/x y\n")
    require_usable("s3://bucket/data")


def test_a_pattern_that_finds_a_name_that_is_not_utf8(tmp_path: Path) -> None:
    (tmp_path / "caf\udce9.de").write_text("x\n")
    with pytest.raises(UserError, match="is not UTF-8: rename the file"):
        expand([tmp_path / "*.de"], "--input")
