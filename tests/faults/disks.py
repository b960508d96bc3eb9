"""Disks that are full, read-only or broken while two ranks save.

Full: a tmpfs of a drawn size. Read-only: the folder of checkpoints is mounted so in the middle of the run. Broken: EIO
at a drawn write of a drawn rank, injected in its process where the program asks for the write (worker_faults.py).
"""

import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from dist_transformer.run.checkpoint.reader import checkpoint_problem
from dist_transformer.run.layout import checkpoints_of
from tests.faults.campaign import (
    Campaign,
    Case,
    Found,
    Lab,
    UnavailableError,
    clear_errors,
    failing,
    same_end,
    unfinished,
)
from tests.jobs import PATIENCE, Job

_STEPS = 20
_FLAGS = ("--max-steps", _STEPS, "--save-every", 2, "--keep-checkpoints", 99, "--keep-weights", 99)
# That a run has: rank 1 writes and flushes one file a save.
_WRITES = (60, 2 * _STEPS // 2)


def run(case: Case, lab: Lab) -> Found:
    whole = lab.undisturbed("disks", *_FLAGS)
    kinds = {"full": full_disk, "read-only": read_only_disk, "EIO (injected)": broken_disk}
    return kinds[case.kind](case, whole, lab)


def full_disk(case: Case, whole: Path, lab: Lab) -> Found:
    """Limit the disk: from room for only the first files to room for all saves but the last ones."""
    needed = sum(file.stat().st_size for file in whole.rglob("*") if file.is_file())
    size = int(case.generator().uniform(0.02, 0.9) * needed) // 4096 * 4096
    disk = lab.folder / "disk"
    disk.mkdir()
    with mounted("-t", "tmpfs", "-o", f"size={size}", "tmpfs", disk):
        run_dir = disk / "run"
        job = lab.job(run_dir, *_FLAGS).start_ranks()
        problems = ended_clearly(job, "No space left on device")
        mount("-o", f"remount,size={8 * needed}", disk)
        return Found(problems=(*problems, *resumes(run_dir, whole, lab)))


def read_only_disk(case: Case, whole: Path, lab: Lab) -> Found:
    generator, run_dir = case.generator(), lab.folder / "run"
    folder = run_dir / "checkpoints"
    job = lab.job(run_dir, *_FLAGS, "--max-steps", 10**6).start_ranks()
    wait_for(folder / f"step-{2 * generator.randint(1, 5):08d}", job)
    with mounted("--bind", folder, folder):
        mount("-o", "remount,ro,bind", folder)
        problems = ended_clearly(job, "Read-only file system", clean=False)
    return Found(problems=(*problems, *resumes(run_dir, whole, lab, beyond=True)))


def broken_disk(case: Case, whole: Path, lab: Lab) -> Found:
    generator, run_dir = case.generator(), lab.folder / "run"
    rank = generator.randrange(2)
    fault = f"{rank}:{generator.randint(1, _WRITES[rank])}:EIO"
    job = lab.job(run_dir, *_FLAGS, fault=fault).start_ranks()
    problems = [f"{fault}: {problem}" for problem in ended_clearly(job, "Input/output error")]
    return Found(problems=(*problems, *resumes(run_dir, whole, lab)))


def ended_clearly(job: Job, *reasons: str, clean: bool = True) -> tuple[str, ...]:
    """The job has failed by one clear error, and left what is whole."""
    statuses, errors = job.statuses(), clear_errors(job.output)
    # What one rank has found, the others repeat, unless a launcher ends them before.
    own = sorted({line for line in errors if " ends: rank " not in line})
    return failing(
        {
            f"status {statuses}: {job.output[-600:]}": 0 not in statuses,
            f"the errors are {errors}": len(own) == 1 and any(reason in own[0] for reason in reasons),
            f"a traceback: {job.output[-1500:]}": "Traceback" not in job.output,
            "an incomplete checkpoint has a name": not any(map(checkpoint_problem, checkpoints_of(job.run_dir))),
            f"temporary files were left: {unfinished(job.run_dir)}": not clean or not unfinished(job.run_dir),
        }
    )


def resumes(run_dir: Path, whole: Path, lab: Lab, *, beyond: bool = False) -> tuple[str, ...]:
    """Give the same command on a disk that works again; return how its end differs from that of an undisturbed run."""
    if beyond and (step := newest_step(run_dir)) > _STEPS - 2:
        whole = lab.undisturbed(f"disks {step + 2}", *_FLAGS, "--max-steps", step + 2)
        steps = step + 2
    else:
        steps = _STEPS
    lab.train(run_dir, *_FLAGS, "--max-steps", steps)
    return failing(
        {
            "weights or ledger are not those of the undisturbed run": same_end(run_dir, whole, steps),
            "temporary files are still there": not unfinished(run_dir),
        }
    )


def newest_step(run_dir: Path) -> int:
    return max((int(path.name[5:]) for path in checkpoints_of(run_dir)), default=0)


def wait_for(path: Path, job: Job) -> None:
    deadline = time.monotonic() + PATIENCE
    while not path.exists():
        assert job.processes[0].poll() is None, job.output
        assert time.monotonic() < deadline, f"{path} does not come"
        time.sleep(0.005)


@contextmanager
def mounted(*arguments: object) -> Iterator[None]:
    mount(*arguments)
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(arguments[-1])], check=True)


def mount(*arguments: object) -> None:
    done = subprocess.run(["mount", *map(str, arguments)], check=False, capture_output=True, text=True)
    if done.returncode != 0:
        raise UnavailableError(f"nothing can be mounted here ({done.stderr.strip()}): run as root")


CAMPAIGN = Campaign(
    name="disks",
    must_hold=(
        "the job ends by one clear error; older checkpoints are intact; no temporary file stays, or where the disk "
        "forbids that it is gone after the next save; the same command then ends as the run that was left alone"
    ),
    full={"full": 8, "read-only": 4, "EIO (injected)": 8},
    run=run,
)
