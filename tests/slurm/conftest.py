"""A cluster, a user's checkout, and one finished run, for all tests of this folder."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from dist_transformer.data.text.toy_corpus import make_toy_corpus, write_toy_corpus
from tests.conftest import ROOT
from tests.slurm.cluster import Cluster, ClusterError, running_cluster, wait_until

# For all commands that a user types at once; what builds a container takes longest, some minutes.
PATIENCE_SECONDS = 25 * 60
STEPS = 20
# A model that is small, and steps that are many: what is interrupted must still be running. Initial weights do not
# know when to end a sentence, so few are decoded, and greedily.
SMALL = (
    "--preset tiny --model.width 32 --model.ffn-width 64 --model.heads 2 --batch.max-target-tokens 512 "
    "--batch.packs-per-step 16 --batch.window-shards 1 --optimizer.warmup-steps 10 --validate-every 0 --log-every 1 "
    f"--save-every 5 --keep-checkpoints 2 --keep-weights 2 --max-steps {STEPS}"
).split()
TWO_NODES = ["--nodes=2", "--gpus-per-node=1"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Site:
    """A user's place on the cluster; every path of it has spaces and a quote."""

    cluster: Cluster
    checkout: Path

    @property
    def data(self) -> Path:
        return self.checkout / "data" / "wmt14-en-de"

    def submit(self, script: str, *flags: str, options: list[str], **settings: object) -> str:
        """sbatch the script as it is; the job's number. Unless asked for, without the doctor, which takes seconds."""
        env = {name: str(value) for name, value in {"DOCTOR": "no", **settings}.items()}
        command = ["sbatch", "--parsable", *options, f"slurm/{script}", *flags]
        return self.cluster.run(*command, cwd=self.checkout, env=env)

    @contextmanager
    def edited(self, line: str) -> Iterator[None]:
        """The user's settings with one more line."""
        settings = self.checkout / "slurm" / "cluster.env"
        kept = settings.read_text(encoding="utf-8")
        settings.write_text(f"{kept}{line}\n", encoding="utf-8")
        try:
            yield
        finally:
            settings.write_text(kept, encoding="utf-8")

    def log(self, job: str) -> str:
        path = next(self.checkout.glob(f"*-{job}.out"), None)
        return path.read_text(encoding="utf-8") if path else ""

    def await_line(self, job: str, text: str, *, times: int = 1) -> None:
        try:
            wait_until(lambda: self.log(job).count(text) >= times, f"{text!r} in the log", seconds=600)
        except TimeoutError as error:
            raise AssertionError(f"{error}:\n{self.log(job)[-3000:]}") from None


def run_as_user(script: str, cwd: Path, **settings: object) -> str:
    """Run commands in a shell where nothing is active and nothing of this checkout is on the path; their output."""
    kept = {name: value for name, value in os.environ.items() if name not in ("VIRTUAL_ENV", "PYTHONPATH")}
    env = {**kept, **{name: str(value) for name, value in settings.items()}}
    done = subprocess.run(
        ["bash", "-ec", script],
        cwd=cwd,
        env=env,
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE_SECONDS,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout


def make_repository(folder: Path) -> None:
    """Make what git would clone of this checkout if all of it were committed."""
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listed, cwd=ROOT, check=True, capture_output=True, text=True).stdout.rstrip("\0").split("\0")
    for name in filter(lambda name: (ROOT / name).is_file(), names):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, folder / name)
    run_as_user(
        "git init -q && git add -A && git -c user.name=test -c user.email=test@localhost commit -qm all", folder
    )


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    try:
        with running_cluster() as cluster:
            yield cluster
    except ClusterError as reason:
        pytest.skip(str(reason))


@pytest.fixture(scope="session")
def site(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Site:
    """A checkout with the one file edited that a user edits."""
    home = tmp_path_factory.mktemp("slurm") / "it's a home"
    checkout, text = home / "check out", home / "parallel text"
    for folder in (checkout, text):
        folder.mkdir(parents=True)
    for name in ("dist_transformer", "tools", "ds_configs"):
        (checkout / name).symlink_to(ROOT / name)
    shutil.copytree(ROOT / "slurm", checkout / "slurm")
    write_toy_corpus(text, make_toy_corpus(train_pairs=400, valid_pairs=20, test_pairs=8))
    with (checkout / "slurm" / "cluster.env").open("a", encoding="utf-8") as settings:
        settings.write(
            f'PYTHON=("{sys.executable}")\n'
            f'text="{text}"\n'
            'PREPARE=(--src "$text/train.en" --tgt "$text/train.de" --vocab-size 400\n'
            '    --valid-src "$text/valid.en" --valid-tgt "$text/valid.de")\n'
            "TEST_SRC=$text/test.en TEST_REF=$text/test.de EVALUATE=(--beam 1)\n"
            "export OMP_NUM_THREADS=1\n"
        )
    return Site(cluster=cluster, checkout=checkout)


@dataclass(frozen=True, kw_only=True, slots=True)
class FinishedJob:
    job: str
    run_dir: Path


@pytest.fixture(scope="session")
def finished(site: Site) -> FinishedJob:
    """The training script on two nodes, nobody interrupts it."""
    job = site.submit("train_big.sh", *SMALL, options=TWO_NODES, DOCTOR="yes")
    assert site.cluster.wait(job) == "COMPLETED", site.log(job)
    return FinishedJob(job=job, run_dir=site.checkout / "runs" / "big-en-de")
