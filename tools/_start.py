"""First import of every tool: finds the package of the clone, and lets threads sleep while they wait."""

import sys
from importlib import import_module
from pathlib import Path

# Appended last, so that an installed package takes precedence.
sys.path.append(str(Path(__file__).resolve().parents[1]))

from dist_transformer.base.errors import exit_on_user_error
from dist_transformer.runtime.interpreter import share_cores


def run(module: str) -> None:
    """Run a module's `main` as a script."""
    share_cores()
    # A package that is missing is an error in one line, too.
    exit_on_user_error(lambda: import_module(module).main())
