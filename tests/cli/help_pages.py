"""Files with what `--help` of every command prints at 80 columns; `python -m tests.cli.help_pages` writes them again.

A change of a flag shows there as a user sees it.
"""

import os
import subprocess
import sys
from pathlib import Path

from dist_transformer.cli.command import COMMANDS
from tests.conftest import ROOT

FOLDER = Path(__file__).parent / "help"
ALL = ("dist-transformer", *COMMANDS)


def help_of(name: str) -> str:
    words = [] if name == "dist-transformer" else [name]
    done = subprocess.run(
        [sys.executable, "-m", "dist_transformer", *words, "--help"],
        cwd=ROOT,
        env={**os.environ, "COLUMNS": "80", "NO_COLOR": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout


if __name__ == "__main__":
    for name in ALL:
        (FOLDER / f"{name}.txt").write_text(help_of(name), encoding="utf-8")
