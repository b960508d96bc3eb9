"""Disks that are full, read-only or broken while two ranks save.

Full: a tmpfs of a drawn size. Read-only: the folder of checkpoints is mounted so in the middle of the run. Broken: EIO
at a drawn write of a drawn rank, injected in its process where the program asks for the write (worker_faults.py). The
job ends by one clear error; older checkpoints are intact; no temporary file stays, or where the disk forbids that it is
gone after the next save; the same command then ends as the run that was left alone.
"""

from pathlib import Path

from dist_transformer.run.checkpoint.reader import checkpoint_problem
from dist_transformer.run.layout import checkpoints_of, step_of
from tests.faults.campaign import Case, Lab, campaign, clear_errors, in_slice
from tests.faults.disks import mount, mounted
from tests.jobs import Job, require_same_end, unfinished

_STEPS = 20
_FLAGS = ("--max-steps", _STEPS, "--save-every", 2, "--keep-checkpoints", 99, "--keep-weights", 99)
# That a run has: rank 1 writes and flushes one file a save.
_WRITES = (60, 2 * _STEPS // 2)


@in_slice
@campaign({"full": 8, "read-only": 4, "EIO (injected)": 8}, sample=("full",))
def test_disks(case: Case, lab: Lab) -> None:
    whole, generator, run_dir = lab.undisturbed("disks", *_FLAGS), case.generator(), lab.folder / "run"
    if case.kind == "full":
        # From room for only the first files to room for all saves but the last ones.
        needed = sum(file.stat().st_size for file in whole.rglob("*") if file.is_file())
        run_dir.mkdir()
        size = int(generator.uniform(0.02, 0.9) * needed) // 4096 * 4096
        with mounted("-t", "tmpfs", "-o", f"size={size}", "tmpfs", run_dir):
            require_clear_end(lab.job(run_dir / "run", *_FLAGS).start_ranks(), "No space left on device")
            mount("-o", f"remount,size={8 * needed}", run_dir)
            require_resume(run_dir / "run", whole, lab)
    elif case.kind == "read-only":
        folder = run_dir / "checkpoints"
        job = lab.job(run_dir, *_FLAGS, "--max-steps", 10**6).start_ranks()
        job.wait_for((folder / f"step-{2 * generator.randint(1, 5):08d}").exists)
        with mounted("--bind", folder, folder):
            mount("-o", "remount,ro,bind", folder)
            require_clear_end(job, "Read-only file system", clean=False)
        require_resume(run_dir, whole, lab)
    else:
        rank = generator.randrange(2)
        fault = f"{rank}:{generator.randint(1, _WRITES[rank])}:EIO"
        require_clear_end(lab.job(run_dir, *_FLAGS, fault=fault).start_ranks(), "Input/output error")
        require_resume(run_dir, whole, lab)


def require_clear_end(job: Job, reason: str, *, clean: bool = True) -> None:
    statuses = job.statuses()
    assert 0 not in statuses, job.output[-1500:]
    # What one rank has found, the others repeat, unless a launcher ends them before.
    (own,) = {line for line in clear_errors(job.output) if " ends: rank " not in line}
    assert reason in own
    assert "Traceback" not in job.output
    assert not any(map(checkpoint_problem, checkpoints_of(job.run_dir))), "an incomplete checkpoint has a name"
    assert not clean or unfinished(job.run_dir) == [], "temporary files were left"


def require_resume(run_dir: Path, whole: Path, lab: Lab) -> None:
    """Give the same command on a disk that works again, which ends as an undisturbed run does."""
    newest = max((step_of(path.name) or 0 for path in checkpoints_of(run_dir)), default=0)
    steps = max(_STEPS, newest + 2)
    if steps > _STEPS:
        whole = lab.undisturbed(f"disks {steps}", *_FLAGS, "--max-steps", steps)
    lab.train(run_dir, *_FLAGS, "--max-steps", steps)
    require_same_end(run_dir, whole, steps)
