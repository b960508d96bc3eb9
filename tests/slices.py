"""Runs the slices of `make test-all`: tests that a change of their part needs, and a release, but not every change.

`python -m tests.slices` runs all of them, and with names those. `python -m tests.slices --of-commit` prints the one
that continuous integration runs: chosen by the commit's hash, among those whose files the last commits changed. A test
belongs to a slice by `@pytest.mark.slice(name="NAME")`.
"""

import argparse
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RECENT = 10
"""Commits back from the newest whose files count as changed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Slice:
    """Tests with one subject, of at most twelve minutes on two cores."""

    files: tuple[str, ...]
    """Beginnings of the paths whose change calls for it."""
    processes: int = 2
    """Number of pytest's processes; one where the tests share what takes minutes to make."""


SLICES = {
    "benchmarks": Slice(files=("benchmarks/", "tests/benchmarks/", "tools/bench")),
    "browser": Slice(files=("dist_transformer/reporting/", "dist_transformer/serving/", "dist_transformer/pictures/")),
    "campaigns": Slice(files=("dist_transformer/run/", "dist_transformer/base/", "tests/faults/", "tests/fuzz/")),
    "commands": Slice(files=("README.md", "docs/", "dist_transformer/cli/", "dist_transformer/config/", "tools/")),
    "container": Slice(files=("containers/", "pyproject.toml", "constraints.txt"), processes=1),
    "exports": Slice(
        files=("dist_transformer/export/", "dist_transformer/importing/", "dist_transformer/model_folder"), processes=1
    ),
    "marian": Slice(files=("dist_transformer/importing/", "dist_transformer/data/vocabulary/"), processes=1),
    "newcomer": Slice(
        files=("README.md", "Makefile", "dist_transformer/cli/", "dist_transformer/averaging/"), processes=1
    ),
    "pickles": Slice(files=("dist_transformer/base/", "dist_transformer/model_folder")),
    "reproduce": Slice(files=("dist_transformer/model/", "dist_transformer/training/", "dist_transformer/inference/")),
    # What is installed from the wheel; continuous integration always runs it, with one of the others.
    "smoke": Slice(files=(), processes=1),
    "slurm-ends": Slice(files=("slurm/", "tests/slurm/", "dist_transformer/training/fault_tolerance/"), processes=1),
    "slurm-jobs": Slice(files=("slurm/", "tests/slurm/", "dist_transformer/runtime/"), processes=1),
    "store": Slice(files=("dist_transformer/data/folder/", "dist_transformer/data/loading/"), processes=1),
    "trackers": Slice(files=("dist_transformer/reporting/", "pyproject.toml"), processes=1),
    "vocabularies": Slice(files=("dist_transformer/data/vocabulary/", "dist_transformer/export/")),
    "wheel": Slice(files=("pyproject.toml", "constraints.txt", "dist_transformer/api", "ds_configs/"), processes=1),
    "worlds": Slice(files=("dist_transformer/training/", "dist_transformer/cost/", "tests/distributed/")),
}


def git(*words: str) -> str:
    return subprocess.run(["git", *words], cwd=ROOT, check=True, capture_output=True, text=True).stdout


def chosen(commit: str, changed: Sequence[str]) -> str:
    """Choose among the slices of the changed files, or among all if these are of no slice."""
    called = {name for name, each in SLICES.items() if any(file.startswith(each.files) for file in changed)}
    names = sorted((called or SLICES.keys()) - {"smoke"})
    return names[int(commit, 16) % len(names)]


def of_commit() -> str:
    commits = git("rev-list", f"--max-count={RECENT + 1}", "--first-parent", "HEAD").split()
    return chosen(commits[0], git("diff", "--name-only", commits[-1], commits[0]).splitlines())


def install_browser() -> None:
    """Install Chromium where that is possible; without it, tests of pages are skipped, and say so."""
    if shutil.which("chromium") or os.geteuid() != 0 or not shutil.which("apt-get"):
        return
    for words in (["update", "-qq"], ["install", "-y", "-qq", "chromium"]):
        environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
        subprocess.run(["apt-get", *words], check=False, stdout=subprocess.DEVNULL, env=environment)


def run(name: str) -> int:
    """Run a slice; gives pytest's status."""
    if name in ("browser", "wheel"):
        install_browser()
    spread = ["-n", str(SLICES[name].processes)] if SLICES[name].processes > 1 else []
    begin = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-m", f"slice(name={name!r})", *spread], cwd=ROOT, check=False
    )
    print(f"slice {name}: status {done.returncode}, {time.monotonic() - begin:.0f} s", flush=True)
    return done.returncode


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"one of {', '.join(SLICES)}")
    parser.add_argument("--of-commit", action="store_true", help="print the slice of the newest commit")
    given = parser.parse_args()
    if unknown := set(given.names) - SLICES.keys():
        raise SystemExit(f"error: no slice is called {', '.join(sorted(unknown))}: use some of {', '.join(SLICES)}")
    if given.of_commit:
        print(of_commit())
        return
    failed = [name for name in given.names or SLICES if run(name)]
    if failed:
        raise SystemExit(f"error: slices failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
