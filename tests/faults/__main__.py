"""Inject faults into trainings, again and again, and keep the table of the outcomes.

    python -m tests.faults --json results/faults.json [--only kills damage] [--kinds zero0 zero1] [--minutes 60]
    python -m tests.faults --json results/faults.json --planted [--only kills damage]

Each case is a function of its campaign, kind and number. What the table holds already is not done again, so the
campaigns may be stopped (Ctrl-C) and resume on another day, and several processes may do some each (--only, --kinds);
kinds that had fewer cases come first. Trainings are tiny, on CPU, on the embedded synthetic corpus. Kinds for
which this machine lacks something are left out: disks need root, which mounts them.

With --planted, each campaign that starts trainings must find three bugs that are planted in the code, one after the
other (planted.py), and the same cases must pass without them.
"""

import argparse
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from dist_transformer.base.errors import UserError, exit_on_user_error
from dist_transformer.data.folder.reader import DataFolder
from tests.conftest import ROOT
from tests.faults import (
    damage,
    disks,
    elastic,
    formats,
    histories,
    hostile,
    kills,
    lost_ranks,
    not_finite,
    power_loss,
    power_loss_disks,
    ranks_apart,
    slow_saves,
    tools,
    translation_parts,
)
from tests.faults.campaign import Campaign, Lab, UnavailableError
from tests.faults.planted import BUGS
from tests.faults.planting import examine, prove
from tests.faults.table import Table

CAMPAIGNS: list[Campaign] = [
    module.CAMPAIGN
    for module in (
        kills,
        slow_saves,
        damage,
        disks,
        not_finite,
        lost_ranks,
        ranks_apart,
        elastic,
        hostile,
        power_loss,
        power_loss_disks,
        histories,
        formats,
        tools,
        translation_parts,
    )
]


def main() -> None:
    arguments = parse_arguments()
    # As Ctrl-C: what was started is ended.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    campaigns = {campaign.name: campaign for campaign in CAMPAIGNS}
    open_kinds = {
        name: [kind for kind in campaigns[name].full if kind in (arguments.kinds or [kind])]
        for name in arguments.only or campaigns
    }
    if arguments.kinds and not any(open_kinds.values()):
        raise UserError(f"--only {' '.join(open_kinds)} has no kind {', '.join(arguments.kinds)}: see --help for both")
    with tempfile.TemporaryDirectory(prefix="dist_transformer-faults-", ignore_cleanup_errors=True) as scratch:
        data = make_data(Path(scratch) / "data")
        table = Table(arguments.json, CAMPAIGNS, data.index)
        if arguments.planted:
            find_bugs([campaigns[name] for name in open_kinds], Path(scratch), data, table)
        else:
            do_harm(campaigns, open_kinds, Lab(Path(scratch), data), table, arguments)


def do_harm(
    campaigns: Mapping[str, Campaign],
    open_kinds: Mapping[str, list[str]],
    lab: Lab,
    table: Table,
    arguments: argparse.Namespace,
) -> None:
    """Run cases until there is no more to do, or the time is over."""
    deadline = time.monotonic() + 60 * arguments.minutes
    failed = 0
    try:
        while time.monotonic() < deadline and (case := table.next_case(open_kinds, count=arguments.count)):
            lab.clear()
            try:
                found = examine(campaigns[case.campaign], case, lab)
            except UnavailableError as reason:
                print(f"{case.campaign}, {case.kind}: left out: {reason}", flush=True)
                open_kinds[case.campaign].remove(case.kind)
                continue
            table.add(case, found)
            failed += bool(found.problems)
            verdict = "\n  ".join(("FAILED", *found.problems)) if found.problems else "passed"
            print(f"{case.campaign}, {case.kind}, case {case.number}: {verdict}", flush=True)
    finally:
        lab.clear()
    if failed:
        raise UserError(f"{failed} cases failed: what did not hold is above, and under `failed` in the table")


def find_bugs(campaigns: Iterable[Campaign], scratch: Path, data: DataFolder, table: Table) -> None:
    """Let each campaign look for the bugs that are planted for it."""
    missed = 0
    for campaign in campaigns:
        bugs, outcomes = [bug for bug in BUGS if bug.campaign == campaign.name], list[dict[str, Any]]()
        try:
            for outcome in prove(campaign, bugs, scratch, data):
                outcomes.append(outcome)
                passes = not outcome["without_the_bug"]
                missed += not (outcome["found"] and passes)
                verdict = "found" if outcome["found"] else "MISSED"
                verdict += "" if passes else f", but FAILED without it: {outcome['without_the_bug']}"
                print(f"{campaign.name}, {outcome['bug']}: {verdict}\n  {outcome['said']}", flush=True)
        except UnavailableError as reason:
            print(f"{campaign.name}: left out: {reason}", flush=True)
            continue
        if outcomes:
            table.add_planted(campaign.name, outcomes)
    if missed:
        raise UserError(f"{missed} planted bugs were missed, or their cases fail without them: see above")


def make_data(path: Path) -> DataFolder:
    tool = [sys.executable, "tools/prepare_data.py", "--toy", "2000", "--vocab-size", "400"]
    subprocess.run([*tool, "--pairs-per-shard", "500", "--out", path], cwd=ROOT, check=True, capture_output=True)
    return DataFolder.open(path)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.faults", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="table of results, which this adds to")
    names = [campaign.name for campaign in CAMPAIGNS]
    parser.add_argument("--only", nargs="+", choices=names, metavar="NAME", help=f"some of: {', '.join(names)}")
    kinds = sorted({kind for campaign in CAMPAIGNS for kind in campaign.full})
    parser.add_argument("--kinds", nargs="+", choices=kinds, metavar="KIND", help=f"some of: {'; '.join(kinds)}")
    parser.add_argument("--count", type=int, help="of faults of each kind (default: the full number of each)")
    parser.add_argument("--planted", action="store_true", help="find bugs that are planted in the code")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin no case after so long")
    return parser.parse_args()


if __name__ == "__main__":
    exit_on_user_error(main)
