"""The table that campaigns add to: what is done is not done again, and what failed stays visible."""

from pathlib import Path

from benchmarks.results_table import make_lines, read_result
from tests.faults.campaign import Case, add, campaign, cases_of

MARKED = campaign({"a": 5, "b": 2}, each=2, sample=("b",)).kwargs


def test_campaigns_resume_where_they_were_stopped(tmp_path: Path) -> None:
    table = tmp_path / "faults.json"
    cases = cases_of("kills", MARKED, table)
    assert [(case.kind, case.number) for case in cases] == [("a", 0), ("a", 1), ("a", 2), ("b", 0)]
    add(table, cases[0], MARKED, "", 1.5)
    add(table, cases[3], MARKED, "it does not end", 1.0)
    assert [(case.kind, case.number) for case in cases_of("kills", MARKED, table)] == [("a", 1), ("a", 2)]
    result = read_result(table)
    kinds = result["figures"]["campaigns"]["kills"]["kinds"]
    assert (kinds["a"]["faults"], kinds["a"]["passed"], kinds["b"]["passed"]) == (2, 2, 0)
    assert kinds["b"]["failed"] == [{"case": 0, "problem": "it does not end"}]
    assert result["wall_seconds"] == 2.5
    assert "failing disks | 4 of 7 planned | 2 | " in make_lines(table, result)[0][1]


def test_the_suite_runs_the_sample() -> None:
    assert cases_of("kills", MARKED, None) == [Case(campaign="kills", kind="b", number=0)]
