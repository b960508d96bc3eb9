"""Flipped bits, cut, emptied and missing files of a checkpoint of two ranks.

Most are looked for without a launch, where a start of the run would look; of some the run is started by two ranks.
"""

import os
import random
import shutil
from pathlib import Path

from dist_transformer.run.checkpoint.reader import checkpoint_problem, newest_checkpoint
from tests.faults.campaign import Campaign, Case, Found, Lab, failing, same_end

_STEPS = 6
_FLAGS = ("--max-steps", _STEPS, "--save-every", 2)
_FILES = ("manifest.json", "part-00000.safetensors", "part-00001.safetensors", "state.json")
_AT_ONCE = 25


def run(case: Case, lab: Lab) -> Found:
    whole, generator = lab.undisturbed("damage", *_FLAGS), case.generator()
    if case.kind == "started by two ranks":
        return start_damaged(whole, generator, lab)
    if case.kind in ("deletion", "zero length"):
        return Found(problems=looked_for(whole, case.kind, _FILES[case.number % len(_FILES)], generator, lab))
    problems: list[str] = []
    for _ in range(_AT_ONCE):
        problems += looked_for(whole, case.kind, generator.choice(_FILES), generator, lab)
    return Found(faults=_AT_ONCE, problems=tuple(problems))


def looked_for(whole: Path, kind: str, name: str, generator: random.Random, lab: Lab) -> tuple[str, ...]:
    """Damage the newest checkpoint of a copy of the run."""
    run_dir = copied(whole, lab)
    checkpoints = run_dir / "checkpoints"
    newest, older = (checkpoints / f"step-{step:08d}" for step in (_STEPS, _STEPS - 2))
    how = hurt(newest / name, kind, generator)
    problem, warned = checkpoint_problem(newest), list[str]()
    chosen = newest_checkpoint(run_dir, warned.append)
    return failing(
        {
            f"{how}: not found": problem is not None,
            f"{how}: {chosen} was chosen": chosen == older,
            f"{how}: not told": warned and str(older) in warned[-1],
        }
    )


def start_damaged(whole: Path, generator: random.Random, lab: Lab) -> Found:
    """Damage the newest, or the newest two, and start the run."""
    run_dir = copied(whole, lab)
    damaged = generator.choice((1, 2))
    for back in range(damaged):
        kind = generator.choice(("bit flip", "truncation", "deletion", "zero length"))
        hurt(run_dir / "checkpoints" / f"step-{_STEPS - 2 * back:08d}" / generator.choice(_FILES), kind, generator)
    output = lab.train(run_dir, *_FLAGS)
    chosen = run_dir / "checkpoints" / f"step-{_STEPS - 2 * damaged:08d}"
    checks = {
        "another checkpoint was chosen": f"resumed from {chosen}\n" in output,
        "the user was not told": f"falling back to {chosen}" in output,
        "weights or ledger are not those of the undisturbed run": same_end(run_dir, whole, _STEPS),
    }
    return Found(faults=damaged, problems=failing(checks))


def copied(whole: Path, lab: Lab) -> Path:
    run_dir = lab.folder / "run"
    shutil.rmtree(run_dir, ignore_errors=True)
    shutil.copytree(whole, run_dir)
    return run_dir


def hurt(file: Path, kind: str, generator: random.Random) -> str:
    """Damage a file; return in words what was done."""
    size = file.stat().st_size
    if kind == "bit flip":
        at, bit = generator.randrange(size), generator.randrange(8)
        content = bytearray(file.read_bytes())
        content[at] ^= 1 << bit
        file.write_bytes(content)
        return f"bit {bit} of byte {at} of {file.name}"
    if kind == "deletion":
        file.unlink()
        return f"{file.name} deleted"
    length = 0 if kind == "zero length" else generator.randrange(1, size)
    os.truncate(file, length)
    return f"{file.name} cut from {size} to {length} bytes"


CAMPAIGN = Campaign(
    name="damage",
    must_hold="all damage is found before use and reported; all ranks resume from the same older checkpoint",
    full={"bit flip": 200, "truncation": 50, "deletion": 4, "zero length": 4, "started by two ranks": 20},
    run=run,
)
