"""First import of every tool: finds the package of the clone, and lets threads sleep while they wait."""

import sys
from pathlib import Path

# Appended last, so that an installed package takes precedence.
sys.path.append(str(Path(__file__).resolve().parents[1]))

from dist_transformer.runtime.interpreter import share_cores

share_cores()
