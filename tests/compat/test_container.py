"""A container, built from its definition on a Debian of its own, and used: the demo, and the check of a machine.

Base images cannot be had everywhere, so Apptainer has a stand-in (tests/slurm/bin/apptainer) that takes the base from
debootstrap; the definition's files and commands, and the root they run in, are real.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.slurm.conftest import make_repository, run_as_user

# It builds an image, which takes minutes and 2 GB.
builds = pytest.mark.slice(name="container")

CONTAINERS = ROOT / "containers"
DEFINITION = (CONTAINERS / "dist_transformer.def").read_text(encoding="utf-8")
DOCKERFILE = (CONTAINERS / "Dockerfile").read_text(encoding="utf-8")
(BUILD,) = re.findall(r"^apptainer build .*", (ROOT / "docs" / "cluster.md").read_text("utf-8"), re.MULTILINE)


def site_of_this_machine(folder: Path) -> str:
    """Fill a folder with what an image must know to install here: settings of apt and pip, and certificates.

    Returns:
        the folders that pip's settings name, as SITE_FOLDERS takes them.
    """
    for name in ("etc/apt/apt.conf.d", "usr/local/share/ca-certificates"):
        if Path("/", name).is_dir():
            shutil.copytree(Path("/", name), folder / name)
    listed = subprocess.run([sys.executable, "-m", "pip", "config", "list"], check=True, capture_output=True, text=True)
    settings = dict(re.findall(r"^(?:global|:env:)\.([\w-]+)='(.*)'$", listed.stdout, re.MULTILINE))
    settings.pop("cert", None)
    (folder / "etc").mkdir(exist_ok=True)
    lines = [f"{name} = {value}" for name, value in settings.items()]
    (folder / "etc" / "pip.conf").write_text("\n".join(["[global]", *lines, ""]), encoding="utf-8")
    words = " ".join(settings.values()).split()
    # The pages of an index link to files beside its folder.
    indexes = {Path(word.removeprefix("file://")).parent for word in words if word.startswith("file://")}
    plain = {Path(word) for word in words if word.startswith("/")}
    return ":".join(sorted(map(str, indexes | {path if path.is_dir() else path.parent for path in plain})))


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A clone in which the page's command has built the image; it is gone afterwards, all 2 GB of it."""
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        pytest.skip("a root of its own needs root's rights and Debian's debootstrap")
    if shutil.which("debootstrap", path="/usr/sbin:/usr/bin") is None:
        subprocess.run(["apt-get", "install", "-y", "-qq", "debootstrap"], check=True, capture_output=True, timeout=600)
    folder = tmp_path_factory.mktemp("container")
    make_repository(folder / "checkout")
    # The build for CUDA would run here, too, and takes 5 GB.
    build = BUILD.replace("build ", f"build --build-arg TORCH=torch=={version('torch')} ", 1)
    apptainer(folder / "checkout", build, SITE=folder / "site", SITE_FOLDERS=site_of_this_machine(folder / "site"))
    yield folder / "checkout"
    shutil.rmtree(folder / "checkout")


def apptainer(checkout: Path, command: str, **settings: object) -> str:
    """Type a command of Apptainer; its output."""
    path = f"{ROOT / 'tests' / 'slurm' / 'bin'}:{os.environ['PATH']}:/usr/sbin:/sbin"
    return run_as_user(command, checkout, PATH=path, **settings)


def execute(checkout: Path, command: str) -> str:
    return apptainer(checkout, f"apptainer exec dist_transformer.sif {command}")


def test_both_containers_are_the_same_debian_and_script() -> None:
    for pattern in (r"(?i)^FROM:? (debian:\S+)$", r"TORCH=\".+?\" (sh containers/install\.sh .*)$"):
        found = [re.findall(pattern, text, re.MULTILINE) for text in (DEFINITION, DOCKERFILE)]
        assert len(found[0]) == 1
        assert found[0] == found[1]
    # Docker gets by .dockerignore what Apptainer copies file by file.
    copied = re.findall(r"^    (\S+) /tmp/checkout/\1$", DEFINITION, re.MULTILINE)
    kept = re.findall(r"^!(\S+)$", (ROOT / ".dockerignore").read_text(encoding="utf-8"), re.MULTILINE)
    assert copied == kept


@builds
def test_the_container_has_the_pinned_versions(checkout: Path) -> None:
    freeze = execute(checkout, "/opt/dist_transformer/bin/python -m pip freeze").splitlines()
    installed = dict(line.split("==") for line in freeze if "==" in line)
    constraints = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pinned = dict(line.split("==") for line in constraints if "==" in line and not line.startswith("#"))
    apart = {name for name in installed.keys() & pinned.keys() if installed[name].split("+")[0] != pinned[name]}
    assert apart == set()
    assert len(installed.keys() & pinned.keys()) > 50
    # Tools of tests stay out, and NCCL finds the library for InfiniBand.
    assert "pytest" not in installed
    execute(checkout, "/opt/dist_transformer/bin/python -c 'import ctypes; ctypes.CDLL(\"libibverbs.so.1\")'")


@builds
def test_the_demo_runs_in_it_without_rights(checkout: Path) -> None:
    """Shortened, because it shows that all parts work; test_wheel.py lets the whole demo reach its BLEU."""
    demo = "dist-transformer demo --train-pairs 1000 --max-steps 20 --average 1"
    execute(checkout, f"chroot --userspec=trainer / env HOME=/home/trainer sh -c 'cd && {demo}'")
    result = json.loads((checkout / "dist_transformer.sif/home/trainer/runs/demo/result.json").read_text("utf-8"))
    assert (result["world_size"], result["zero_stage"]) == (2, 1)
    assert 0 <= result["bleu"] <= 100


@builds
def test_it_is_fit_to_train(checkout: Path) -> None:
    said = execute(checkout, "dist-transformer doctor --run-dir runs/doctor --run-gib 0.1")
    assert re.search(r"^versions +ok +python 3\.11\.\d+, torch 2", said, re.MULTILINE)
    assert re.search(r"^GPUs +ok +none: training runs on CPU cores", said, re.MULTILINE)
