"""First steps of a program, before it imports anything: check its Python, and decide how it waits and is interrupted.

A wrong Python ends it with one sentence that names the environment to activate.

Old Pythons must be able to read this file, so its syntax is plain and its functions have no types.
"""

import importlib.util
import os
import re
import shlex
import signal
import sys

# More than every machine's cores. Without a limit, OpenMP aborts where it cannot start so many.
MOST_THREADS = 1024
_ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))


def check_interpreter():  # type: ignore[no-untyped-def]
    """End the program if this Python is too old, and explain the first import of a missing package.

    A program calls it before it imports anything else.
    """
    if sys.version_info < (3, 11):  # noqa: UP036
        version = "{}.{}.{}".format(*sys.version_info[:3])
        sys.exit(f"error: {sys.executable} is Python {version}, but 3.11 or newer is needed: {_remedy()}")
    sys.excepthook = _explain


def share_cores():  # type: ignore[no-untyped-def]
    """Let threads of OpenMP sleep while they wait for each other, and check OMP_NUM_THREADS.

    By default they spin for milliseconds. If other work runs on the cores, they then take the time of the thread that
    they wait for: `tiny` trained at 200 instead of 2,100 tokens/s beside two busy loops on two cores. OpenMP reads its
    variables once, when torch is imported. A policy of the user stays.
    """
    threads = os.environ.get("OMP_NUM_THREADS", "").strip()
    if not threads:
        os.environ.pop("OMP_NUM_THREADS", None)
    elif not re.fullmatch(r"[0-9]{1,4}(,[0-9]+)*", threads) or not 1 <= int(threads.split(",")[0]) <= MOST_THREADS:
        shown = ascii(threads[:40])
        sys.exit(f"error: OMP_NUM_THREADS is {shown}: set it to a number of threads, 1 to {MOST_THREADS}, or unset it")
    if not {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME"} & set(os.environ):
        os.environ["OMP_WAIT_POLICY"] = "PASSIVE"


def end_at_ctrl_c():  # type: ignore[no-untyped-def]
    """Let Ctrl-C end the process at once, until it installs a handler that saves.

    Python's own handler raises KeyboardInterrupt, which is lost where Python ignores exceptions: in a finalizer, and in
    a callback of a weak reference. A process that ignores Ctrl-C, as those in the background of a shell, continues to.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _end)


def typed_path(path):  # type: ignore[no-untyped-def]
    """Return a path as a user types it here, not quoted: relative if it is below this folder, otherwise absolute."""
    relative = os.path.relpath(path)
    return os.path.abspath(path) if relative.startswith("..") or "/" not in relative else relative


def _end(number, frame):  # type: ignore[no-untyped-def]
    try:
        os.write(2, b"interrupted\n")
    finally:
        os._exit(130)


def _explain(kind, error, trace):  # type: ignore[no-untyped-def]
    package = (getattr(error, "name", None) or "").partition(".")[0] if kind is ModuleNotFoundError else ""
    if package and package not in sys.modules and importlib.util.find_spec(package) is None:
        print(f"error: {sys.executable} has no {package}: {_remedy()}", file=sys.stderr, flush=True)
    else:
        sys.__excepthook__(kind, error, trace)


def _remedy():  # type: ignore[no-untyped-def]
    environment = os.path.join(_ROOT, ".venv")
    if os.path.realpath(sys.prefix) == os.path.realpath(environment):
        install = [typed_path(sys.executable), "-m", "pip", "install", "-e", _ROOT + "[bench]"]
        return "install what is missing: " + " ".join(map(shlex.quote, install))
    activate = os.path.join(environment, "bin", "activate")
    if os.path.exists(activate):
        return "activate the project's environment: source " + shlex.quote(typed_path(activate))
    folder = shlex.quote(typed_path(_ROOT))
    return f"activate the environment that has the project installed, or make one: make -C {folder} .venv/.installed"
