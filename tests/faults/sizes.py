"""Files of every format that comes from elsewhere, far too large."""

from functools import cache
from pathlib import Path

import torch

from tests.faults.campaign import Campaign, Case, Found
from tests.faults.campaign import Lab as Place
from tests.fuzz.formats import Lab
from tests.fuzz.harness import CPU_SECONDS, MEMORY, READ, REFUSED
from tests.fuzz.hunt import make_model
from tests.fuzz.sizes import KINDS, outcome_of


@cache
def sound_files(scratch: Path) -> Lab:
    torch.set_num_threads(1)
    folder = scratch / "sizes"
    folder.mkdir()
    return Lab(folder, make_model(folder / "sound model"))


def run(case: Case, place: Place) -> Found:
    grown = KINDS[case.kind][case.number]
    outcome = outcome_of(grown, sound_files(place.scratch))
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
