"""Cases of the campaigns: a sample, or with FAULTS=FILE all that the file does not hold, whose outcomes it gets."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dist_transformer.data.folder.reader import DataFolder
from tests.faults.campaign import Lab, add, cases_of

TABLE = Path(os.environ["FAULTS"]) if "FAULTS" in os.environ else None


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if mark := metafunc.definition.get_closest_marker("campaign"):
        cases = cases_of(metafunc.function.__name__.removeprefix("test_"), mark.kwargs, TABLE)
        metafunc.parametrize("case", cases, ids=str)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the kinds that had fewer cases."""
    if TABLE is not None:
        items.sort(key=lambda item: item.callspec.params["case"].number if hasattr(item, "callspec") else 0)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[Any]:
    report = yield
    mark = item.get_closest_marker("campaign")
    if TABLE is not None and mark and call.when == "call" and not report.skipped:
        case = item.callspec.params["case"]  # type: ignore[attr-defined]
        add(TABLE, case, mark.kwargs, report.longreprtext if report.failed else "", call.duration)
    return report


@pytest.fixture(scope="session")
def shared_lab(toy_data: DataFolder, tmp_path_factory: pytest.TempPathFactory) -> Lab:
    return Lab(tmp_path_factory.mktemp("faults"), toy_data)


@pytest.fixture
def lab(shared_lab: Lab) -> Iterator[Lab]:
    shared_lab.clear()
    yield shared_lab
    shared_lab.clear()
