"""Files of every format, damaged at random."""

from tests.faults.campaign import Campaign, Case, Found
from tests.faults.campaign import Lab as Place
from tests.fuzz.formats import FORMATS, Lab
from tests.fuzz.hunt import CPU_SECONDS, MEMORY, hunt

_AT_ONCE = 100
_KINDS = {kind.name: kind for kind in FORMATS}


def run(case: Case, place: Place) -> Found:
    folder = place.scratch / f"formats-{case.kind}-{case.number}"
    problem = hunt(_KINDS[case.kind], Lab(folder), cases=_AT_ONCE, seed=case.number + 1)
    return Found(problems=(problem,) if problem else (), faults=_AT_ONCE)


CAMPAIGN = Campaign(
    name="formats",
    must_hold=(
        f"the real readers read the file, or refuse it in one line; {_AT_ONCE} files take at most {CPU_SECONDS} s of "
        f"processor time, and {MEMORY // 2**20:,} MiB; no signal, and nothing is read whose hash is recorded"
    ),
    full=dict.fromkeys(_KINDS, 1000),
    run=run,
)
