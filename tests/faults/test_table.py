"""The table that campaigns add to: what is done is not done again, and what failed stays visible."""

import argparse
from pathlib import Path

import pytest

from benchmarks.results_table import make_lines, read_result
from dist_transformer.data.folder.reader import DataFolder
from tests.faults.__main__ import CAMPAIGNS, do_harm
from tests.faults.campaign import Campaign, Case, Found, Lab, UnavailableError
from tests.faults.planting import examine
from tests.faults.table import Table


def whole(case: Case, lab: Lab) -> Found:
    return Found(problems=(), faults=2, counts={"saves": 3}, highest={"steps_lost": float(case.number)})


def broken(case: Case, lab: Lab) -> Found:
    raise AssertionError("does not end")


def campaign(run: object = whole) -> Campaign:
    return Campaign(name="kills", must_hold="it resumes", full={"a": 5, "b": 2}, run=run)  # type: ignore[arg-type]


def fill(
    table: Table, made: Campaign, lab: Lab, *, kinds: str = "ab", cases: int = 99, count: int | None = None
) -> list[tuple[str, int]]:
    done = []
    while len(done) < cases and (case := table.next_case({"kills": kinds}, count=count)):
        table.add(case, examine(made, case, lab))
        done.append((case.kind, case.number))
    return done


@pytest.fixture
def lab(tmp_path: Path, toy_data: DataFolder) -> Lab:
    return Lab(tmp_path, toy_data)


def test_campaigns_resume_where_they_were_stopped(tmp_path: Path, lab: Lab) -> None:
    file, made = tmp_path / "faults.json", campaign()
    first = fill(Table(file, [made], lab.data.index), made, lab, cases=2)
    assert first == [("a", 0), ("b", 0)]
    assert fill(Table(file, [made], lab.data.index), made, lab) == [("a", 1), ("a", 2)]
    assert fill(Table(file, [made], lab.data.index), made, lab) == []
    result = read_result(file)
    assert result["figures"]["campaigns"]["kills"]["kinds"]["a"] == {
        "where": f"{result['date']}, {result['machine']}",
        "full": 5,
        "faults": 6,
        "passed": 6,
        "cases": 3,
        "counts": {"saves": 9},
        "highest": {"steps_lost": 2.0},
        "cells": {},
        "failed": [],
    }
    (_, line), _ = make_lines(file, result)
    assert "failing disks | 8 of 7 planned | 8 | " in line


def test_two_processes_may_fill_a_table_together(tmp_path: Path, lab: Lab) -> None:
    file, made = tmp_path / "faults.json", campaign()
    tables = [Table(file, [made], lab.data.index) for _ in range(2)]
    for table, kind in zip(tables, "ab", strict=True):
        table.add(Case(campaign="kills", kind=kind, number=0), whole(Case(campaign="kills", kind=kind, number=0), lab))
    kinds = read_result(file)["figures"]["campaigns"]["kills"]["kinds"]
    assert [kinds[kind]["faults"] for kind in "ab"] == [2, 2]


def test_fewer_may_be_enough(lab: Lab) -> None:
    made = campaign()
    assert fill(Table(None, [made], lab.data.index), made, lab, count=1) == [("a", 0), ("b", 0)]


def test_some_kinds_may_be_done_alone(lab: Lab) -> None:
    made = campaign()
    assert fill(Table(None, [made], lab.data.index), made, lab, kinds="b") == [("b", 0)]


def test_a_case_that_breaks_off_has_failed(tmp_path: Path, lab: Lab) -> None:
    file, made = tmp_path / "faults.json", campaign(broken)
    fill(Table(file, [made], lab.data.index), made, lab, cases=1)
    part = read_result(file)["figures"]["campaigns"]["kills"]["kinds"]["a"]
    assert (part["faults"], part["passed"]) == (1, 0)
    assert part["failed"] == [{"case": 0, "problems": ["AssertionError: does not end"]}]


def test_the_same_case_is_drawn_alike_and_another_one_is_not() -> None:
    draws = [Case(campaign="kills", kind="a", number=number).generator().random() for number in (0, 0, 1)]
    assert draws[0] == draws[1] != draws[2]


def test_every_fault_has_a_campaign_of_its_own_name() -> None:
    names = [made.name for made in CAMPAIGNS]
    modules = {path.stem for path in Path(__file__).parent.glob("*.py")}
    assert len(set(names)) == len(names)
    programs = {name for name in modules if not name.startswith("test_")}
    assert programs == {*names, "__main__", "campaign", "planted", "planting", "table"}


def test_bugs_that_were_found_stay_in_the_table(tmp_path: Path, lab: Lab) -> None:
    file, made = tmp_path / "faults.json", campaign()
    Table(file, [made], lab.data.index).add_planted(
        "kills", [{"bug": "x", "found": True}, {"bug": "y", "found": False}]
    )
    fill(Table(file, [made], lab.data.index), made, lab, cases=1)
    result = read_result(file)
    part = result["figures"]["campaigns"]["kills"]["planted"]
    assert part["bugs"] == [{"bug": "x", "found": True}, {"bug": "y", "found": False}]
    assert part["command"].endswith("--planted --only kills")
    assert part["where"] == f"{result['date']}, {result['machine']}"
    assert "for the campaigns to find | 2 | 1 | " in make_lines(file, result)[1][1]


def test_what_cannot_be_done_here_is_left_out(lab: Lab, capsys: pytest.CaptureFixture[str]) -> None:
    def some(case: Case, lab: Lab) -> Found:
        if case.kind == "a":
            raise UnavailableError("mkfs is not installed")
        return whole(case, lab)

    made = campaign(some)
    table = Table(None, [made], lab.data.index)
    arguments = argparse.Namespace(minutes=1, count=None)
    do_harm({"kills": made}, {"kills": ["a", "b"]}, lab, table, arguments)
    assert capsys.readouterr().out == "kills, a: left out: mkfs is not installed\nkills, b, case 0: passed\n"
    assert [table.parts["kills"]["kinds"][kind]["cases"] for kind in "ab"] == [0, 1]
