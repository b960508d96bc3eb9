import logging

import pytest
from aiohttp.http import HttpProcessingError

from dist_transformer.serving.faults import make_log


def report(log: logging.Logger, error: Exception) -> None:
    try:
        raise error
    except Exception:
        log.exception("a request failed")


def test_a_mistake_has_one_traceback_however_often_it_happens(capsys: pytest.CaptureFixture[str]) -> None:
    log = make_log()
    for i in range(3):
        report(log, ZeroDivisionError(f"mistake {i}"))
    lines = capsys.readouterr().err.splitlines()
    starts = [line for line in lines if line.startswith("error: a request failed: ZeroDivisionError('mistake ")]
    assert len(starts) == 3
    assert sum(line.startswith("Traceback") for line in lines) == 1


@pytest.mark.parametrize("error", [HttpProcessingError(message="bad"), ConnectionResetError("gone")])
def test_what_only_a_client_can_cause_is_not_printed(error: Exception, capsys: pytest.CaptureFixture[str]) -> None:
    report(make_log(), error)
    assert capsys.readouterr().err == ""
