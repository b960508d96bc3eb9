"""From clone to score on a machine that has only what docs/cluster.md installs: no MPI library."""

import importlib.metadata
import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from dist_transformer.data.text.toy_corpus import make_toy_corpus, write_toy_corpus
from tests.conftest import ROOT
from tests.slurm.cluster import Cluster
from tests.slurm.conftest import SMALL, TWO_NODES, Site

pytestmark = pytest.mark.slurm

PAGE = (ROOT / "docs" / "cluster.md").read_text(encoding="utf-8")
COMMANDS = re.findall(r"^```sh\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)[0].splitlines()
EDIT = COMMANDS.index("nano slurm/cluster.env")
FALLBACK = "one node of 2 prepares the data, because Python finds no MPI library: install the extra [mpi]"


def run(script: str, cwd: Path, **settings: object) -> None:
    """In a user's shell: nothing is active, and nothing of this checkout is on the path."""
    kept = {name: value for name, value in os.environ.items() if name not in ("VIRTUAL_ENV", "PYTHONPATH")}
    env = {**kept, **{name: str(value) for name, value in settings.items()}}
    done = subprocess.run(["bash", "-ec", script], cwd=cwd, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]


def make_repository(folder: Path) -> None:
    """What git would clone of this checkout if all of it were committed."""
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listed, cwd=ROOT, check=True, capture_output=True, text=True).stdout.rstrip("\0").split("\0")
    for name in filter(lambda name: (ROOT / name).is_file(), names):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, folder / name)
    run("git init -q && git add -A && git -c user.name=test -c user.email=test@localhost commit -qm all", folder)


@pytest.fixture(scope="module")
def installed(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Site:
    """The page's commands, up to the one file that a user edits; the text is a toy, and a test adds its edit."""
    home = tmp_path_factory.mktemp("install")
    make_repository(home / "origin")
    # The page installs any torch that fits; a machine without network may hold one.
    constraints = home / "constraints.txt"
    constraints.write_text(f"torch=={importlib.metadata.version('torch')}\n")
    run("\n".join(COMMANDS[:EDIT]), home, URL=home / "origin", PIP_CONSTRAINT=constraints)
    checkout = home / "dist_transformer"
    write_toy_corpus(home, make_toy_corpus(train_pairs=400, valid_pairs=20, test_pairs=8))
    with (checkout / "slurm" / "cluster.env").open("a", encoding="utf-8") as settings:
        settings.write(
            f"PREPARE=(--src {home}/train.en --tgt {home}/train.de --vocab-size 400\n"
            f"    --valid-src {home}/valid.en --valid-tgt {home}/valid.de)\n"
            f"TEST_SRC={home}/test.en TEST_REF={home}/test.de EVALUATE=(--beam 1)\n"
            "export OMP_NUM_THREADS=1\n"
        )
    return Site(cluster=cluster, checkout=checkout)


def loads_mpi(site: Site) -> bool:
    command = [site.checkout / ".venv" / "bin" / "python", "-c", "import mpi4py.MPI"]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


@pytest.mark.parametrize("nodes", [1, 2])
def test_what_the_page_installs_goes_from_text_to_score(nodes: int, installed: Site) -> None:
    if loads_mpi(installed):
        assert not list((installed.checkout / ".venv").rglob("libmpi*")), "the page's commands install an MPI library"
        pytest.skip("this machine has an MPI library of its own")
    options = [f"--nodes={nodes}", "--gpus-per-node=1"]
    places = {"DATA": f"data/{nodes}", "RUNS": f"runs/{nodes}"}
    job = installed.submit("train_base.sh", *SMALL, options=options, **places)
    assert installed.cluster.wait(job) == "COMPLETED", installed.log(job)
    log = installed.log(job)
    assert f"{nodes} rank(s)" in log
    assert log.count(FALLBACK) == nodes - 1
    report = json.loads((installed.checkout / "runs" / str(nodes) / "base-en-de" / "bleu.json").read_text())
    assert (report["sentences"], report["world_size"]) == (8, nodes)


def test_with_the_extra_of_the_page_both_nodes_prepare(installed: Site) -> None:
    (extra,) = re.findall(r'`(\S+/pip install -e "\.\[mpi\]")`', PAGE)
    run(extra, installed.checkout, PIP_CONSTRAINT=installed.checkout.parent / "constraints.txt")
    assert loads_mpi(installed)
    # Each rank of the preparation says where it is.
    with (installed.checkout / "dist_transformer" / "data" / "prepare" / "mpi_ranks.py").open(
        "a", encoding="utf-8"
    ) as module:
        module.write(
            "\n_join = MpiRanks.join\n"
            "def _say() -> MpiRanks:\n"
            "    ranks = _join()\n"
            "    print(f\"rank {ranks.rank} of {ranks.size} on {os.environ['SLURMD_NODENAME']}\", flush=True)\n"
            "    return ranks\n"
            "MpiRanks.join = _say\n"
        )
    job = installed.submit("prepare.sh", options=TWO_NODES, DATA="data/mpi")
    assert installed.cluster.wait(job) == "COMPLETED", installed.log(job)
    log = installed.log(job)
    assert FALLBACK not in log
    assert {"rank 0 of 2 on node1", "rank 1 of 2 on node2"} <= set(log.splitlines())
    files = [path.relative_to(installed.checkout / "data/mpi") for path in (installed.checkout / "data/mpi").rglob("*")]
    assert files
    for file in files:
        of_one = installed.checkout / "data" / "1" / file
        assert of_one.is_dir() or of_one.read_bytes() == (installed.checkout / "data/mpi" / file).read_bytes()
