"""Runs many commands quickly: libraries are imported once, and each command is a fork of that process.

A command is what a user types after `python`: real arguments, its own working folder, output and exit status.
"""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

_SERVER = """
import json, os, runpy, signal, sys, traceback
import deepspeed, sacrebleu, tyro
import dist_transformer.training.trainer, dist_transformer.training.dry_run, dist_transformer.averaging.sweep
import dist_transformer.reporting.html.page, dist_transformer.preflight.preflight
import dist_transformer.data.prepare.pipeline

first, seconds = sys.argv[1:]
exec(first)

for line in sys.stdin:
    job = json.loads(line)
    child = os.fork()
    if child == 0:
        signal.alarm(int(seconds))
        os.chdir(job["folder"])
        os.environ.update(job["environment"])
        output = os.open(job["output"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        os.dup2(os.open(job["input"], os.O_RDONLY), 0)
        os.dup2(output, 1)
        os.dup2(output, 2)
        sys.argv = job["words"]
        sys.stdin = open(0, closefd=False)
        status = 0
        try:
            if sys.argv[0] == "-m":
                sys.argv = sys.argv[1:]
                runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
            else:
                sys.path.insert(0, os.path.dirname(sys.argv[0]))
                runpy.run_path(sys.argv[0], run_name="__main__")
        except SystemExit as error:
            status = error.code if isinstance(error.code, int) else 1 if error.code else 0
        except BaseException:
            traceback.print_exc()
            status = 1
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), file=sys.stderr, flush=True)
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Ended:
    """The status and the output of a command, as a user sees them."""

    status: int
    output: str
    """Standard output and standard error."""


class Commands:
    """Starts commands, one after the other; a context manager.

    Args:
        first: code that the process runs before any command.
        seconds: after which a command is ended, by a signal.
    """

    def __init__(self, scratch: Path, *, first: str = "", seconds: int = 600) -> None:
        self.output = scratch / "output"
        environment = {**os.environ, "DS_ACCELERATOR": "cpu", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        self.server = subprocess.Popen(
            [sys.executable, "-c", _SERVER, first, str(seconds)],
            cwd=ROOT,
            env=environment,
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
        )

    def __enter__(self) -> "Commands":
        return self

    def __exit__(self, *_: object) -> None:
        assert self.server.stdin is not None
        self.server.stdin.close()
        self.server.wait(timeout=60)

    def run(
        self, words: Sequence[object], folder: Path, *, stdin: Path = Path(os.devnull), **environment: str
    ) -> Ended:
        """`words`: a tool's name, or `train`, and its arguments."""
        assert self.server.stdin is not None
        assert self.server.stderr is not None
        name, *arguments = map(str, words)
        program = ["-m", "dist_transformer.train"] if name == "train" else [str(ROOT / "tools" / f"{name}.py")]
        job = {
            "words": [*program, *arguments],
            "folder": str(folder),
            "environment": environment,
            "input": str(stdin),
            "output": str(self.output),
        }
        print(json.dumps(job), file=self.server.stdin, flush=True)
        # Warnings of libraries at their import come first.
        while not (line := self.server.stderr.readline()).strip().lstrip("-").isdecimal():
            assert line, "the server ended"
        return Ended(status=int(line), output=self.output.read_text(encoding="utf-8", errors="replace"))
