"""Flipped bits, cut, emptied and missing files of a checkpoint of two ranks.

All damage is found before use and reported; all ranks resume from the same older checkpoint.
"""

from dist_transformer.run.checkpoint.reader import checkpoint_problem, newest_checkpoint
from tests.faults.campaign import Case, Lab, campaign, in_slice
from tests.jobs import require_same_end
from tests.support.damage import FAULTS, damage

_STEPS = 6
_FLAGS = ("--max-steps", _STEPS, "--save-every", 2)
_FILES = ("manifest.json", "part-00000.safetensors", "state.json")
_KINDS = {"bit flip": 200, "truncation": 50, "deletion": 4, "zero length": 4}
_FAULTS = dict(zip(_KINDS, ("flipped", "cut", "missing", "empty"), strict=True))


@in_slice
@campaign(_KINDS)
def test_damage(case: Case, lab: Lab) -> None:
    """Looked for without a launch, where a start of the run would look."""
    run_dir = lab.copy_of(lab.undisturbed("damage", *_FLAGS))
    newest, older = (run_dir / "checkpoints" / f"step-{step:08d}" for step in (_STEPS, _STEPS - 2))
    damage(newest / _FILES[case.number % len(_FILES)], FAULTS[_FAULTS[case.kind]], case.generator())
    warned: list[str] = []
    assert checkpoint_problem(newest) is not None
    assert newest_checkpoint(run_dir, warned.append) == older
    assert str(older) in warned[-1]


@in_slice
@campaign({"started by two ranks": 20})
def test_damaged_start(case: Case, lab: Lab) -> None:
    """The newest checkpoint is damaged, or the newest two, and the run is started."""
    whole, generator = lab.undisturbed("damage", *_FLAGS), case.generator()
    run_dir, damaged = lab.copy_of(whole), generator.choice((1, 2))
    for back in range(damaged):
        file = run_dir / "checkpoints" / f"step-{_STEPS - 2 * back:08d}" / generator.choice(_FILES)
        damage(file, FAULTS[generator.choice(list(_FAULTS.values()))], generator)
    output = lab.train(run_dir, *_FLAGS)
    chosen = run_dir / "checkpoints" / f"step-{_STEPS - 2 * damaged:08d}"
    assert f"resumed from {chosen}\n" in output
    assert f"falling back to {chosen}" in output
    require_same_end(run_dir, whole, _STEPS)
