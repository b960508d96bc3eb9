"""What every tool imports first: it finds the package of its clone, and says so if the wrong Python runs it."""

import sys
from pathlib import Path

# An installed package comes before it.
sys.path.append(str(Path(__file__).resolve().parents[1]))

from dist_transformer.runtime.interpreter import check_interpreter

check_interpreter()
