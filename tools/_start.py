"""First import of every tool: finds the package of the clone, and exits with a message in the wrong Python."""

import sys
from pathlib import Path

# Appended last, so that an installed package takes precedence.
sys.path.append(str(Path(__file__).resolve().parents[1]))

from dist_transformer.runtime.interpreter import check_interpreter, share_cores

check_interpreter()
share_cores()
