"""A real training on ext4 and XFS, which lose their power at some moment.

The file system is in a file, on a loop device. It is shut down without a flush of its journal, as its own tests do it
(xfstests, `FS_IOC_SHUTDOWN`): what was not written to the device is lost. Mounted again, it replays the journal.
"""

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from dist_transformer.config.plain import read_json
from dist_transformer.model_folder import load_model
from dist_transformer.run.layout import checkpoints_of, read_records, step_of
from tests.conftest import ROOT, run_command
from tests.distributed.worker_cut_power import STEPS
from tests.faults.campaign import Campaign, Case, Found, Lab, UnavailableError, same_end
from tests.faults.disks import mount
from tests.faults.power_loss import at_rest, whole

_WORKER = ROOT / "tests" / "distributed" / "worker_cut_power.py"
_MAKERS = {"ext4": ("mkfs.ext4", "-q"), "XFS": ("mkfs.xfs", "-q")}
# The smallest that mkfs.xfs makes is 300 MiB; the file is sparse.
_BYTES = 320 * 2**20
# Three saves and a model folder.
_PROMISES = 4
_PATIENCE = 60


def run(case: Case, lab: Lab) -> Found:
    """Every second loss comes right after something is done, when it is owed and may still be missing."""
    undisturbed = lab.scratch / "power_loss_disks"
    if not undisturbed.exists():
        undisturbed.mkdir()
        output = work(lab, undisturbed, "never")
        (lab.scratch / "operations").write_text(output.split()[-1])
    operations = int((lab.scratch / "operations").read_text())
    half, at_random = divmod(case.number, 2)
    moment = f"operation:{case.generator().randint(1, operations)}" if at_random else f"promise:{half % _PROMISES + 1}"
    image, disk = lab.folder / "image", lab.folder / "disk"
    make_file_system(case.kind, image)
    disk.mkdir()
    with mounted(image, disk):
        output = work(lab, disk, moment)
    promised = [line.removeprefix("promised ") for line in output.splitlines() if line.startswith("promised ")]
    with mounted(image, disk):
        problems = [f"{moment}, {promised}: {problem}" for problem in unbroken(judge(disk, undisturbed, promised, lab))]
    return Found(problems=tuple(problems), counts={"something was promised": bool(promised)})


def unbroken(problems: Iterator[str]) -> Iterator[str]:
    """Give what was found before an error, and then the error."""
    try:
        yield from problems
    except Exception as error:
        yield f"{type(error).__name__}: {error}"


def judge(disk: Path, undisturbed: Path, promised: list[str], lab: Lab) -> Iterator[str]:
    """Yield the problems of the folders after the loss, and when the same commands have run to their end."""
    run_dir, model = disk / "run", disk / "model"
    saved = max((int(what.removeprefix("step ")) for what in promised if what != "model"), default=0)
    if saved and not run_dir.exists():
        yield "the run is gone"
        return
    if run_dir.exists():
        yield from at_rest(run_dir, saved, 0)
    if saved:
        yield from history(run_dir, saved)
    if "model" in promised and not model.exists():
        yield "the model is gone"
    if model.exists():
        load_model(model, torch.device("cpu"))
    work(lab, disk, "never")
    yield from whole(run_dir, STEPS, 0)
    if not same_end(run_dir, undisturbed / "run", STEPS):
        yield "weights or ledger are not those of the undisturbed run"
    load_model(model, torch.device("cpu"))


def history(run_dir: Path, saved: int) -> Iterator[str]:
    """Check what a run that has saved must still have, before anything repairs it."""
    newest = max((step_of(path.name) or 0 for path in checkpoints_of(run_dir)), default=0)
    if newest < saved:
        yield f"the newest checkpoint is that of step {newest}, and step {saved} was promised"
    for name in ("config.json", "ledger.jsonl", "metrics.jsonl"):
        if not (run_dir / name).exists():
            yield f"{name} is gone"
            return
    if (run_dir / "ledger.jsonl").read_bytes().count(b"\n") < saved:
        yield f"ledger.jsonl ends before step {saved}"
    if [record["step"] for record in read_records(run_dir, "train")][:saved] != list(range(1, saved + 1)):
        yield f"metrics.jsonl does not have the steps 1 to {saved}"
    read_json(run_dir / "config.json")


def work(lab: Lab, disk: Path, moment: str) -> str:
    return run_command(sys.executable, _WORKER, lab.data.path, disk, moment)


def make_file_system(kind: str, image: Path) -> None:
    with image.open("wb") as file:
        file.truncate(_BYTES)
    program, *flags = _MAKERS[kind]
    try:
        subprocess.run([program, *flags, image], check=True, capture_output=True)
    except OSError:
        raise UnavailableError(f"{program} is not installed: install e2fsprogs and xfsprogs") from None


@contextmanager
def mounted(image: Path, folder: Path) -> Iterator[None]:
    mount("-o", "loop", image, folder)
    try:
        yield
    finally:
        unmount(folder)


def unmount(folder: Path) -> None:
    """Unmount for good: a lazy one would leave the file system as it is."""
    deadline = time.monotonic() + _PATIENCE
    while (done := subprocess.run(["umount", folder], check=False, capture_output=True, text=True)).returncode != 0:
        assert time.monotonic() < deadline, done.stderr
        time.sleep(0.5)


CAMPAIGN = Campaign(
    name="power_loss_disks",
    must_hold=(
        "mounted again, every reader finds a sound state: what was reported as saved is there, with config, ledger, "
        "metrics and weights; the same commands then end as the run that was left alone"
    ),
    full={"ext4": 12, "XFS": 12},
    run=run,
)
