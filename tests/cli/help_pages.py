"""Files with what `--help` of every command prints at 80 columns; `python -m tests.cli.help_pages` writes them again.

A change of a flag shows there as a user sees it.
"""

from pathlib import Path

from dist_transformer.cli.command import COMMANDS
from tests.conftest import run_python

FOLDER = Path(__file__).parent / "help"
ALL = ("dist-transformer", *COMMANDS)


def help_of(name: str) -> str:
    words = [] if name == "dist-transformer" else [name]
    done = run_python("-m", "dist_transformer", *words, "--help", COLUMNS="80", NO_COLOR="1")
    assert done.returncode == 0, done.stderr
    return done.stdout


if __name__ == "__main__":
    for name in ALL:
        (FOLDER / f"{name}.txt").write_text(help_of(name), encoding="utf-8")
