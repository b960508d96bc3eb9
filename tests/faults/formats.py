"""Files of every format that comes from elsewhere, damaged at random."""

from functools import cache
from pathlib import Path

import torch

from tests.faults.campaign import Campaign, Case, Found
from tests.faults.campaign import Lab as Place
from tests.fuzz.formats import FORMATS, Lab
from tests.fuzz.harness import CPU_SECONDS, MEMORY, READ, REFUSED
from tests.fuzz.hunt import hunt, make_model

_AT_ONCE = 100
_KINDS = {kind.name: kind for kind in FORMATS}


@cache
def sound_files(scratch: Path) -> Lab:
    torch.set_num_threads(1)
    folder = scratch / "formats"
    folder.mkdir()
    return Lab(folder, make_model(folder / "sound model"))


def run(case: Case, place: Place) -> Found:
    result = hunt(_KINDS[case.kind], sound_files(place.scratch), cases=_AT_ONCE, seed=case.number + 1)
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
