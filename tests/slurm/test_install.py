"""The commands of docs/cluster.md alone lead from clone to score, in a virtual environment and in containers.

What a user would type into an editor, a stand-in for nano does. Apptainer and pyxis have stand-ins as well
(bin/apptainer, host.c), whose images are this machine's folders at other places: only inside an image is there a Python
at /opt/dist_transformer. tests/compat/test_container.py builds a real image.
"""

import importlib.metadata
import json
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from dist_transformer.data.text.toy_corpus import make_toy_corpus, write_toy_corpus
from tests.conftest import ROOT
from tests.slurm.cluster import Cluster
from tests.slurm.conftest import SMALL, TWO_NODES, Site, make_repository, run_as_user

pytestmark = pytest.mark.slice(name="slurm-jobs")

PAGE = (ROOT / "docs" / "cluster.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```sh\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
VENV, APPTAINER = (block for block in BLOCKS if block.startswith("git clone "))
FALLBACK = "one node of 2 prepares the data, because Python finds no MPI library: install the extra [mpi]"
STAND_INS = Path(__file__).with_name("bin")
IN_IMAGE = Path("/opt/dist_transformer/bin/python")

# An editor that does with a file what the script EDIT of sed says, and appends the texts of a toy.
NANO = """\
#!/bin/sh
sed -i -E "$EDIT" "$1"
cat >>"$1" <<'END'
PREPARE=(--src "$STORAGE/text/train.en" --tgt "$STORAGE/text/train.de" --vocab-size 400
    --valid-src "$STORAGE/text/valid.en" --valid-tgt "$STORAGE/text/valid.de")
TEST_SRC=$STORAGE/text/test.en TEST_REF=$STORAGE/text/test.de EVALUATE=(--beam 1)
export OMP_NUM_THREADS=1
END
cp -R "$HOME_OF_TEXT" text
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class User:
    """A user with an origin to clone, an editor, and this cluster."""

    cluster: Cluster
    home: Path

    def type(self, block: str, *, edit: str = "") -> tuple[Site, str]:
        """Type the commands of a block of the page; give the checkout and the number of the job that they submit.

        The job is asked for GPUs that the test's nodes can bear, and for a small model.

        Args:
            edit: What is done to slurm/cluster.env, as a script of sed.
        """
        lines = block.replace("sbatch slurm/train_big.sh", f"sbatch slurm/train_big.sh {' '.join(SMALL)}")
        settings = {
            **self.cluster.environment,
            "PATH": f"{self.home / 'programs'}:{STAND_INS}:{self.cluster.environment['PATH']}",
            "URL": self.home / "origin",
            "PIP_CONSTRAINT": self.home / "constraints.txt",
            "SBATCH_GPUS_PER_NODE": 1,
            "EDIT": edit,
            "HOME_OF_TEXT": self.home / "text",
            "LAYERS": self.home / "layers",
        }
        said = run_as_user(lines, self.home, **settings)
        return Site(cluster=self.cluster, checkout=self.home / "dist_transformer"), said.split()[-1]

    def assert_done(self, site: Site, job: str) -> None:
        assert site.cluster.wait(job) == "COMPLETED", site.log(job)
        log = site.log(job)
        assert "2 rank(s)" in log
        assert re.search(r"^0: all-reduce 16 MiB +ok", log, re.MULTILINE)
        report = json.loads((site.checkout / "runs/big-en-de/bleu.json").read_text(encoding="utf-8"))
        assert (report["sentences"], report["world_size"]) == (8, 2)


@pytest.fixture
def user(cluster: Cluster, tmp_path: Path) -> User:
    make_repository(tmp_path / "origin")
    # The page installs any torch that fits; a machine without network may hold one.
    (tmp_path / "constraints.txt").write_text(f"torch=={importlib.metadata.version('torch')}\n")
    for folder in ("programs", "text"):
        (tmp_path / folder).mkdir()
    (tmp_path / "programs" / "nano").write_text(NANO, encoding="utf-8")
    (tmp_path / "programs" / "nano").chmod(0o755)
    write_toy_corpus(tmp_path / "text", make_toy_corpus(train_pairs=400, valid_pairs=20, test_pairs=8))
    folders = {"/usr": "/usr", "/etc": "/etc", sys.base_prefix: sys.base_prefix, sys.prefix: IN_IMAGE.parents[1]}
    (tmp_path / "layers").write_text("".join(f"{here} {there}\n" for here, there in folders.items()))
    return User(cluster=cluster, home=tmp_path)


def loads_mpi(python: Path) -> bool:
    return subprocess.run([python, "-c", "import mpi4py.MPI"], capture_output=True, check=False).returncode == 0


def test_what_the_page_installs_goes_from_text_to_score(user: User) -> None:
    site, job = user.type(VENV)
    user.assert_done(site, job)
    python = site.checkout / ".venv" / "bin" / "python"
    if loads_mpi(python):
        assert not list((site.checkout / ".venv").rglob("libmpi*")), "the page's commands install an MPI library"
        pytest.skip("this machine has an MPI library of its own")
    job = site.submit("prepare.sh", options=TWO_NODES, DATA=user.home / "alone")
    assert site.cluster.wait(job) == "COMPLETED", site.log(job)
    assert site.log(job).count(FALLBACK) == 1
    # With the extra of the page both nodes prepare.
    (extra,) = re.findall(r'`(\S+/pip install -e "\.\[mpi\]")`', PAGE)
    run_as_user(extra, site.checkout, PIP_CONSTRAINT=user.home / "constraints.txt")
    assert loads_mpi(python)
    say_where_each_rank_prepares(site.checkout)
    job = site.submit("prepare.sh", options=TWO_NODES, DATA=user.home / "mpi")
    assert site.cluster.wait(job) == "COMPLETED", site.log(job)
    assert FALLBACK not in site.log(job)
    assert {"0: rank 0 of 2 on node1", "1: rank 1 of 2 on node2"} <= set(site.log(job).splitlines())
    assert_same_files(user.home / "mpi", user.home / "alone")


@pytest.mark.parametrize("program", ["apptainer", "pyxis"])
def test_in_a_container_the_page_goes_from_text_to_score(program: str, user: User) -> None:
    """The program's line of slurm/cluster.env loses its `#`."""
    assert not IN_IMAGE.exists()
    block, mark = APPTAINER, "PYTHON=\\(apptainer "
    if program == "pyxis":
        image = "apptainer build dist_transformer.sif containers/dist_transformer.def"
        block, mark = block.replace(image, image.replace(".sif", ".sqsh")), "PYTHON=\\(/opt/"
    site, job = user.type(block, edit=f"s%^# ({mark})%\\1%")
    user.assert_done(site, job)


def say_where_each_rank_prepares(checkout: Path) -> None:
    with (checkout / "dist_transformer" / "data" / "prepare" / "mpi_ranks.py").open("a", encoding="utf-8") as module:
        module.write(
            "\n_join = MpiRanks.join\n"
            "def _say() -> MpiRanks:\n"
            "    ranks = _join()\n"
            "    print(f\"rank {ranks.rank} of {ranks.size} on {os.environ['SLURMD_NODENAME']}\", flush=True)\n"
            "    return ranks\n"
            "MpiRanks.join = _say\n"
        )


def assert_same_files(folder: Path, other: Path) -> None:
    files = [path.relative_to(folder) for path in folder.rglob("*") if path.is_file()]
    assert files
    for file in files:
        assert (other / file).read_bytes() == (folder / file).read_bytes()
