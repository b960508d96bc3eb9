"""The table of results of all campaigns: one JSON file, to which each case adds."""

import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

from benchmarks.measure import result_of, write_result
from benchmarks.rows import row
from dist_transformer.base.locks import exclusive
from dist_transformer.config.plain import read_json
from dist_transformer.data.folder.format import DataIndex
from tests.faults.campaign import Campaign, Case, Found

_COMMAND = "python -m tests.faults --json results/faults.json"


class Table:
    """The results so far. They are written after each case, so that no case is repeated.

    Args:
        path: of the file, which may hold earlier results, and to which other processes may add those of other
            campaigns meanwhile; None keeps everything in memory.
    """

    def __init__(self, path: Path | None, campaigns: list[Campaign], index: DataIndex) -> None:
        self.path, self.campaigns, self.index = path, campaigns, index
        self.parts: dict[str, dict[str, Any]] = {}
        self._seconds, self._since = 0.0, time.monotonic()
        self._read()

    def _read(self) -> None:
        known = read_json(self.path) if self.path is not None and self.path.exists() else {}
        self._seconds = known.get("wall_seconds", self._seconds)
        before = known.get("figures", {}).get("campaigns", self.parts)
        where = f"{known.get('date')}, {known.get('machine')}"
        for campaign in self.campaigns:
            kinds = before.get(campaign.name, {}).get("kinds", {})
            for part in kinds.values():
                part.setdefault("where", where)
            self.parts[campaign.name] = {
                "must_hold": campaign.must_hold,
                "kinds": {
                    kind: {**_empty(), **kinds.get(kind, {}), "full": full} for kind, full in campaign.full.items()
                },
                "planted": before.get(campaign.name, {}).get("planted", {"command": "", "where": "", "bugs": []}),
            }

    def next_case(self, kinds: Mapping[str, Iterable[str]], *, count: int | None = None) -> Case | None:
        """Choose a part that is not full, one with the fewest cases.

        Args:
            kinds: which may be done, by campaign.
            count: of faults that are enough, where fewer than the full number.
        """
        open_parts = [
            (part["cases"], Case(campaign=name, kind=kind, number=part["cases"]))
            for name, some in kinds.items()
            for kind, part in ((kind, self.parts[name]["kinds"][kind]) for kind in some)
            if part["faults"] < min(part["full"], count if count is not None else part["full"])
        ]
        return min(open_parts, key=lambda pair: pair[0])[1] if open_parts else None

    def add(self, case: Case, found: Found) -> None:
        """Count a case."""
        with self._changing() as where:
            part = self.parts[case.campaign]["kinds"][case.kind]
            self._count(part, case, found)
            part["where"] = where

    def add_planted(self, campaign: str, bugs: list[dict[str, Any]]) -> None:
        """Keep which bugs that were planted in the code a campaign has found, in place of what is known."""
        with self._changing() as where:
            command = f"{_COMMAND} --planted --only {campaign}"
            self.parts[campaign]["planted"] = {"command": command, "where": where, "bugs": bugs}

    @contextmanager
    def _changing(self) -> Iterator[str]:
        """Read what other processes have added, let it be changed, and write it; gives today's date and the machine."""
        with exclusive(self.path.with_name(f".{self.path.name}.lock")) if self.path is not None else nullcontext():
            self._read()
            known = self.result()
            yield f"{known['date']}, {known['machine']}"
            now = time.monotonic()
            self._seconds, self._since = self._seconds + now - self._since, now
            if self.path is not None:
                write_result(self.path, self.result())

    @staticmethod
    def _count(part: dict[str, Any], case: Case, found: Found) -> None:
        part["cases"] += 1
        part["faults"] += found.faults
        part["passed"] += 0 if found.problems else found.faults
        for name, number in found.counts.items():
            part["counts"][name] = part["counts"].get(name, 0) + number
        for name, value in found.highest.items():
            part["highest"][name] = max(part["highest"].get(name, value), value)
        part["cells"].update(found.cells)
        if found.problems:
            part["failed"].append({"case": case.number, "problems": list(found.problems)})

    def result(self) -> dict[str, Any]:
        """In the layout of tools/results_table.py."""
        kinds = [kind for part in self.parts.values() for kind in part["kinds"].values()]
        totals = {name: sum(kind[name] for kind in kinds) for name in ("faults", "passed", "full")}
        bugs = [bug for part in self.parts.values() for bug in part["planted"]["bugs"]]
        totals |= {"planted": len(bugs), "planted_found": sum(bug["found"] for bug in bugs)}
        return result_of(
            self.index,
            what="faults done to real trainings on purpose: how many of each kind there were, how many are planned, "
            "and how many came out as they must; what did not is listed under failed",
            command=_COMMAND,
            seeds=[],
            wall_seconds=round(self._seconds, 1),
            figures={**totals, "campaigns": self.parts},
            rows=[
                row(
                    "faults",
                    "kills; slow, lost, stuck ranks; damaged, hostile files; failing disks",
                    "{figures[faults]:,} of {figures[full]:,} planned",
                    "{figures[passed]:,}",
                ),
                row(
                    "faults",
                    "bugs planted in the code, for the campaigns to find",
                    "{figures[planted]}",
                    "{figures[planted_found]}",
                ),
            ],
        )


def _empty() -> dict[str, Any]:
    counts: dict[str, Any] = {"full": 0, "faults": 0, "passed": 0, "cases": 0, "counts": {}, "highest": {}, "cells": {}}
    # The date and the machine of the last case.
    return {"where": "", **counts, "failed": []}
