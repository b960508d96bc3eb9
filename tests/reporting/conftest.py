"""A reporter in a folder of its own."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from dist_transformer.reporting.reporter import Reporter


@pytest.fixture
def reporter(tmp_path: Path) -> Iterator[Reporter]:
    reporter = Reporter(tmp_path, is_main=True, max_steps=100, first_step=0)
    yield reporter
    reporter.close()
