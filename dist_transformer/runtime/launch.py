"""Launchers: the commands that start this project's commands, and the variables that a launcher sets for its ranks."""

import ctypes
import os
import shlex
import shutil
import signal
import site
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import TextIO

from dist_transformer.base.errors import UserError, say
from dist_transformer.runtime.interpreter import typed_path

RANK_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""Variables in which a launcher describes a process's place in the job. A process of another job must not use them."""

_OTHER_PLACE_VARIABLES = (
    *("LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE"),
    *("GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_NAME", "ROLE_RANK", "ROLE_WORLD_SIZE"),
    *("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID", "SLURM_GTIDS", "SLURM_TASK_PID"),
)
# Under torchrun, they also lead to the store of its agents, which no other launch may use.
_PLACE_PREFIXES = ("TORCHELASTIC_", "SLURM_STEP", "OMPI_COMM_WORLD_", "PMI_", "PMIX_")

NODE_LAUNCHER = "deepspeed.launcher.launch"
"""DeepSpeed's launcher of a node's ranks, as a module name: a word in the command line of its process."""

LAUNCH_VARIABLE = "DIST_TRANSFORMER_LAUNCH"
"""Name of a launch by `--processes`, by which its ranks know each other."""

CALLER_VARIABLE = "DIST_TRANSFORMER_CALLER"
"""Process id of the program that started a command as part of its own work. The command ends with that program."""


def environment_of_child() -> dict[str, str]:
    """Copy the environment for a Python program that finds this package and imports nothing from the current folder.

    With `-m`, Python would import from there first, and the folder may be a stranger's.
    """
    root = str(Path(__file__).parents[2])
    installed = root in (*site.getsitepackages(), site.getusersitepackages())
    # An empty entry is the current folder.
    entries = [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry not in ("", root)]
    path = os.pathsep.join([*([] if installed else [root]), *entries])
    return {**os.environ, "PYTHONSAFEPATH": "1", **({"PYTHONPATH": path} if path else {})}


def without_place(environment: Mapping[str, str]) -> dict[str, str]:
    """Copy an environment without the variables that describe this process's place in a launch.

    What describes the whole job stays, such as SLURM's job number and time limit.
    """
    place = {*RANK_VARIABLES, *_OTHER_PLACE_VARIABLES, LAUNCH_VARIABLE}
    return {
        name: value for name, value in environment.items() if name not in place and not name.startswith(_PLACE_PREFIXES)
    }


def own_command(name: str, *arguments: object) -> list[object]:
    """Build a command of `dist-transformer`: the installed program of this environment, or the module."""
    program = installed_program("dist-transformer")
    start = [program] if program.exists() else [sys.executable, "-m", "dist_transformer"]
    return [*start, name, *arguments]


def take_values(words: Sequence[str], flag: str) -> tuple[list[str], list[str]]:
    """Remove every occurrence of a flag and its value from a command line.

    Returns:
        the values, and the remaining words.

    Raises:
        UserError: the flag has no value.
    """
    values, left, rest = list[str](), list[str](), iter(words)
    for word in rest:
        if word == flag or word.startswith(f"{flag}="):
            value = word.partition("=")[2] if "=" in word else next(rest, "")
            if not value:
                raise UserError(f"{flag} has no value: pass one after it")
            values.append(value)
        else:
            left.append(word)
    return values, left


def take_number(words: Sequence[str], flag: str) -> tuple[int | None, list[str]]:
    """Remove a flag and its number from a command line; None if the flag is not there.

    Raises:
        UserError: the value is not a number, or the flag is given twice.
    """
    values, left = take_values(words, flag)
    if len(values) > 1:
        raise UserError(f"{flag} appears twice: pass it once")
    for value in values:
        if not value.isdecimal():
            raise UserError(f"{flag} is {value!r}: it must be a number")
    return (int(values[0]) if values else None), left


def installed_program(name: str) -> Path:
    """Return the path of a program that a package installed into this interpreter's environment."""
    return Path(sys.executable).with_name(name)


def as_typed(command: Sequence[object]) -> str:
    """Return a command that begins with a program's path as a user types it in a new shell in this folder.

    The program's name alone is enough if the shell finds it, which is so if this interpreter's environment is active.
    """
    program, *arguments = map(str, command)
    folder, name = os.path.split(program)
    found = shutil.which(name)
    # Compare the folders: python is a link in each environment, and all of these links lead to one file.
    if found and os.path.samefile(os.path.dirname(found), folder):
        return shlex.join([name, *arguments])
    return shlex.join([typed_path(program), *arguments])


def free_port() -> int:
    """Return a port of this machine that no process listens on."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        port: int = probe.getsockname()[1]
    return port


def port_remedy() -> str:
    """Tell a user how to start again on a free port, in the syntax of this process's launcher."""
    # Only DeepSpeed's launcher sets CROSS_SIZE. torchrun holds the port itself, or chooses it.
    flag = "deepspeed --master_port " if "CROSS_SIZE" in os.environ else "MASTER_PORT="
    return f"use another one, such as {flag}{free_port()}"


def number_in(name: str) -> int | None:
    """Read the number that a launcher put into an environment variable.

    Raises:
        UserError: the variable is not a number.
    """
    text = os.environ.get(name)
    if text is not None and not text.isdecimal():
        raise UserError(f"{name} is {text!r}, which is not a number: start the job with its launcher")
    return int(text) if text else None


def slurm_tasks() -> int:
    """Count the tasks of the SLURM step that this process belongs to; 1 outside of steps, as in a job script."""
    if "SLURM_STEP_ID" not in os.environ:
        return 1
    return number_in("SLURM_STEP_NUM_TASKS") or number_in("SLURM_NTASKS") or 1


def mpi_tasks() -> int:
    """Count the tasks that an MPI launcher started, according to its variables; 1 without such a launcher."""
    return number_in("OMPI_COMM_WORLD_SIZE") or number_in("PMI_SIZE") or 1


def needs_mpi() -> bool:
    """Decide whether only MPI knows the peers of this process; a single process needs no MPI library."""
    if {"OMPI_COMM_WORLD_SIZE", "PMI_SIZE"} & os.environ.keys():
        return mpi_tasks() > 1
    # PMIx does not put the world size into the environment; for a step of srun, SLURM does.
    return "PMIX_RANK" in os.environ and "SLURM_STEP_ID" not in os.environ


def has_gpu() -> bool:
    """Ask the CUDA driver for a GPU that this process may use; for commands that do without torch."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    count = ctypes.c_int()
    # 0 is success.
    return driver.cuInit(0) == 0 and driver.cuDeviceGetCount(ctypes.byref(count)) == 0 and count.value > 0


def load_mpi() -> ModuleType:
    """Import mpi4py's MPI module, which loads the MPI library and joins the ranks of the launch.

    Raises:
        UserError: there is no MPI library.
    """
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        # The other lines list where the library was looked for.
        reason = (str(error).strip() or "no reason given").splitlines()[0]
        raise UserError(
            f"MPI cannot be loaded ({reason}): install one (pip install mpich), or start one process, without mpirun "
            "and srun"
        ) from None
    return MPI


def parent_of(process: int) -> int | None:
    """Find the parent of a process of this machine; None if the process is gone."""
    try:
        fields = Path(f"/proc/{process}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    except OSError:
        return None
    return int(fields[1])


def command_of(process: int) -> list[str]:
    """Read the words that a process of this machine was started with."""
    try:
        return Path(f"/proc/{process}/cmdline").read_text(encoding="utf-8", errors="replace").split("\0")
    except OSError:
        return []


def run_printed(command: Sequence[object], *, output: TextIO = sys.stdout, seconds: float | None = None) -> str:
    """Print a command to `output` and run it with its output going there, too. A training ends with this process.

    Returns:
        the command for a record: its program by name, as a user types it in an active environment.

    Raises:
        UserError: it failed, or took longer than `seconds` and was killed.
    """
    import torch

    words = [str(word) for word in command]
    say(f"$ {as_typed(words)}", file=output)
    # Without a GPU, DeepSpeed's launcher would warn that it found none.
    accelerator = {} if torch.cuda.is_available() else {"DS_ACCELERATOR": "cpu"}
    environment = {**environment_of_child(), **accelerator, CALLER_VARIABLE: str(os.getpid())}
    if words[1:] and words[1].endswith(".py"):
        # A script imports what is beside it, from its own folder and not the current one.
        del environment["PYTHONSAFEPATH"]
    try:
        status = subprocess.run(words, check=False, env=environment, stdout=output, timeout=seconds).returncode
    except subprocess.TimeoutExpired:
        raise UserError(
            f"the command above took more than {seconds:.0f} s: allow more time, or choose less work"
        ) from None
    if status < 0:
        name = signal.Signals(-status).name
        raise UserError(f"the command above was ended by {name}: SIGKILL mostly means that memory ran out")
    if status != 0:
        raise UserError(f"the command above ended with status {status}: fix what it reports and run this one again")
    return shlex.join([Path(words[0]).name, *words[1:]])
