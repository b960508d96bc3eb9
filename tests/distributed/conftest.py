"""Jobs that end with their test."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from dist_transformer.data.folder.reader import DataFolder
from tests.jobs import Job


@pytest.fixture
def job(toy_data: DataFolder, tmp_path: Path) -> Iterator[Callable[..., Job]]:
    """Make a job, which is then to be started, by the name of its run folder, its flags and Job's options."""
    jobs: list[Job] = []

    def make(name: str, *flags: object, **options: Any) -> Job:
        jobs.append(Job(tmp_path, toy_data, tmp_path / name, *flags, **options))
        return jobs[-1]

    yield make
    for each in jobs:
        each.close()
