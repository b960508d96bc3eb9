"""Starts programs as forks of this process, which has imported the libraries: a program then starts in milliseconds.

A program is a real process: its arguments, environment, folder, output and exit status are its own. Jobs come as lines
of JSON on the standard input, and the statuses of each job's processes are a line of JSON on file descriptor `answers`.
Of a job in the background that line has the process's id, and its status comes later, when it is asked for.

The argument is the file descriptor.
"""

import atexit
import gc
import importlib
import json
import os
import runpy
import signal
import sys
import threading
from contextlib import suppress
from typing import Any

# What commands import, also late: a small training would spend most of its time with that.
LIBRARIES = (
    "deepspeed.runtime.zero.muon.muon_optimizer",
    "matplotlib.figure",
    "matplotlib.font_manager",
    "pandas",
    "sacrebleu",
    "tensorboard.plugins.hparams.api_pb2",
    "tensorboard.summary.writer.record_writer",
    "torch._dynamo",
    "torch.utils.tensorboard.summary",
    "dist_transformer.averaging.sweep",
    "dist_transformer.data.prepare.pipeline",
    "dist_transformer.preflight.job",
    "dist_transformer.reporting.html.page",
    "dist_transformer.training.assembly",
    "dist_transformer.preflight.dry_run",
)

# Processes whose status nobody has asked for yet.
ENDED: dict[int, int] = {}


def become(job: dict[str, Any], rank: int) -> None:
    """Make this process that of a job: what a shell or a launcher does."""
    if job["background"]:
        # What a shell does for a terminal: signals reach it, also all its processes at once.
        os.setsid()
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
    os.chdir(job["folder"])
    os.umask(job["umask"])
    os.environ.clear()
    os.environ.update(job["environment"])
    if job["ranks"] > 1:
        world = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": job["ranks"], "LOCAL_WORLD_SIZE": job["ranks"]}
        os.environ.update({name: str(value) for name, value in world.items()})
    # Python reads these at its start.
    sys.path[1:1] = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    sys.modules.pop("sitecustomize", None)
    with suppress(ModuleNotFoundError):
        importlib.import_module("sitecustomize")
    for place, file in enumerate(job["files"]):
        os.dup2(os.open(file, os.O_WRONLY | os.O_APPEND if place else os.O_RDONLY), place)
    sys.stdin = os.fdopen(0, closefd=False)
    sys.argv = job["words"]


def has_ended(options: int) -> int:
    """Take the status of a child that has ended, and give its id; with os.WNOHANG it may be 0, for none."""
    child, status = os.waitpid(-1, options)
    if child:
        ENDED[child] = os.waitstatus_to_exitcode(status)
    return child


def statuses_of(children: list[int]) -> list[int]:
    """Wait for the processes of a job; like a launcher, end all when one has failed."""
    statuses: dict[int, int] = {}
    while len(statuses) < len(children):
        child = has_ended(0)
        if child not in children:
            continue
        statuses[child] = ENDED.pop(child)
        if statuses[child]:
            for other in set(children) - statuses.keys():
                os.kill(other, signal.SIGTERM)
    # The first failure is that of the job, in whatever order the others end.
    return list(statuses.values())


def status_now(child: int) -> int | None:
    """Give the status of a process in the background, once, or None if it has not ended."""
    with suppress(ChildProcessError):
        while has_ended(os.WNOHANG):
            pass
    return ENDED.pop(child, None)


def next_program(answers: int) -> None:
    """Serve jobs; returns in the child, which is to run `sys.argv`, and ends with the input in the parent."""
    for line in sys.stdin:
        job = json.loads(line)
        answer: object
        if "asked" in job:
            answer = status_now(job["asked"])
        else:
            children = []
            for rank in range(job["ranks"]):
                child = os.fork()
                if child == 0:
                    os.close(answers)
                    signal.setitimer(signal.ITIMER_REAL, job["seconds"])
                    become(job, rank)
                    return
                children.append(child)
            answer = children[0] if job["background"] else statuses_of(children)
        os.write(answers, f"{json.dumps(answer)}\n".encode())
    sys.exit()


def run_program() -> None:
    if sys.argv[0] == "-m":
        del sys.argv[0]
        # As python does it, where the folder of this file is now.
        sys.path[0] = os.getcwd()
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    elif sys.argv[0] == "-c":
        code = compile(sys.argv.pop(1), "<string>", "exec")
        sys.path[0] = ""
        exec(code, {"__name__": "__main__"})
    else:
        sys.path[0] = os.path.dirname(os.path.abspath(sys.argv[0]))
        runpy.run_path(sys.argv[0], run_name="__main__")


def status_of_program() -> int:
    """Run the program to its end, as python does it, but for the modules, which it would take down in half a second."""
    status: object = 0
    try:
        run_program()
    except SystemExit as ended:
        status = ended.code or 0
    except BaseException:
        sys.excepthook(*sys.exc_info())
        status = 1
    if not isinstance(status, int):
        print(status, file=sys.stderr)
        status = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        if stream is not None and not stream.closed:
            stream.flush()
    return status


if __name__ == "__main__":
    for library in LIBRARIES:
        importlib.import_module(library)
    # No search for garbage in a program looks at what is here: DeepSpeed asks for one at each start of an engine.
    gc.freeze()
    next_program(int(sys.argv[1]))
    os._exit(status_of_program())
