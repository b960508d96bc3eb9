"""Files of every format that comes from elsewhere, damaged at random."""

from tests.faults.campaign import Campaign, Case, Found
from tests.faults.campaign import Lab as Place
from tests.fuzz.formats import FORMATS
from tests.fuzz.harness import CPU_SECONDS, MEMORY, READ, REFUSED
from tests.fuzz.hunt import hunt, sound_files

_AT_ONCE = 100
_KINDS = {kind.name: kind for kind in FORMATS}


def run(case: Case, place: Place) -> Found:
    result = hunt(_KINDS[case.kind], sound_files(place.scratch / "formats"), cases=_AT_ONCE, seed=case.number + 1)
    counts = {name: result.counts[name] for name in (READ, REFUSED)}
    return Found(problems=tuple(result.found), faults=result.cases, counts=counts)


CAMPAIGN = Campaign(
    name="formats",
    must_hold=(
        f"the real readers read the file, or refuse it in one line, within {CPU_SECONDS} s of processor time and "
        f"{MEMORY // 2**20:,} MiB; no traceback, no signal"
    ),
    full=dict.fromkeys(_KINDS, 1000),
    run=run,
)
