"""A room of the package, the tests and the benchmarks grow only in a change that says so."""

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_nothing_is_three_percent_larger_than_recorded() -> None:
    done = subprocess.run([sys.executable, "tests/sizes.py"], cwd=ROOT, capture_output=True, text=True, check=True)
    now, recorded = json.loads(done.stdout), json.loads((ROOT / "tests/sizes.json").read_text("utf-8"))
    grown = {
        room: (recorded.get(room, 0), lines) for room, lines in now.items() if lines > 1.03 * recorded.get(room, 0)
    }
    assert not grown, (
        "lines of code, recorded and now: remove what is not needed, or say in the change what it adds and replaces, "
        f"and record it with `python tests/sizes.py > tests/sizes.json`: {grown}"
    )
