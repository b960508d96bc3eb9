"""The search path of modules, without the current folder, which may be a stranger's.

It imports only what Python has loaded before it runs any program.
"""

import os
import sys


def leave_current_folder() -> None:
    """Remove the folder that Python puts first in the path for `-m` or a script.

    A package that was found there alone, as in a clone that is not installed, is still found: last.
    """
    if not sys.flags.safe_path:
        del sys.path[0]
    root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    if root not in sys.path:
        sys.path.append(root)
