"""Files of every format that comes from elsewhere, far too large."""

from tests.faults.campaign import Campaign, Case, Found
from tests.faults.campaign import Lab as Place
from tests.fuzz.harness import CPU_SECONDS, MEMORY, READ, REFUSED
from tests.fuzz.hunt import sound_files
from tests.fuzz.sizes import KINDS, outcome_of


def run(case: Case, place: Place) -> Found:
    grown = KINDS[case.kind][case.number]
    outcome = outcome_of(grown, sound_files(place.scratch / "sizes"))
    is_sound = outcome in (READ, REFUSED)
    return Found(problems=() if is_sound else (f"{grown.name}: {outcome}",), counts={outcome: 1} if is_sound else {})


CAMPAIGN = Campaign(
    name="sizes",
    must_hold=(
        f"the real readers read the file, a part of it, or refuse it in one line, within {CPU_SECONDS} s of processor "
        f"time and {MEMORY // 2**20:,} MiB"
    ),
    full={kind: len(cases) for kind, cases in KINDS.items()},
    run=run,
)
