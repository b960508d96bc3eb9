"""Helpers of the tests of text: files to read, and how a source is refused."""

from pathlib import Path

import pytest

from dist_transformer.base.errors import UserError
from dist_transformer.data.text.pairs import PairSource


def write(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


def refusal(source: PairSource) -> str:
    with pytest.raises(UserError) as caught:
        list(source.pairs())
    return str(caught.value)
