"""Rates of several pieces of work, measured in turns, and the result file that keeps them.

Turns make the comparison fair: other work that slows the machine down for a while affects all of them.
"""

import datetime
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dist_transformer.base.errors import UserError, exit_on_user_error
from dist_transformer.data.folder.format import DataIndex
from dist_transformer.run.environment import describe_environment
from dist_transformer.runtime.launch import RANK_VARIABLES

if TYPE_CHECKING:
    import torch

    from dist_transformer.model_folder import ModelInfo

# Warm-up of each piece of work as a share of a measure's time, not counted: files are read, caches are filled.
_WARM_UP = 0.2
_UNITS = {"amx_bf16": "AMX", "avx512_bf16": "AVX-512-bf16", "avx512f": "AVX-512", "avx2": "AVX2"}
NO_CORPUS = "no text"
ROOT = Path(__file__).resolve().parents[1]
"""Root of the clone, whose package is measured."""


@dataclass(frozen=True, slots=True)
class Measure:
    """Repeated values of one figure."""

    values: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    def to_json(self) -> dict[str, Any]:
        return {
            "median": self.median,
            "lowest": min(self.values),
            "highest": max(self.values),
            "values": list(self.values),
        }


def now(device: "torch.device | None" = None) -> float:
    """Read the clock of all benchmarks, in seconds.

    On a CPU this is the CPU time of all threads of this process, which other work on the machine changes only a little.
    On a GPU it is wall time, read after the GPU has finished its queued work.
    """
    if device is not None and device.type == "cuda":
        import torch

        torch.cuda.synchronize(device)
        return time.perf_counter()
    return time.process_time()


def rate(work: Iterator[int], seconds: float) -> float:
    """Measure units of work per CPU second. Each item of `work` is a number of units; at least one item is taken.

    The clock is read between items, so an item that takes longer than `seconds` counts in full.
    """
    started, units, elapsed = now(), 0, 0.0
    while elapsed < seconds or units == 0:
        units += next(work)
        elapsed = now() - started
    return units / elapsed


def measure_rates(
    works: Mapping[str, Iterator[int]], *, seconds: float, repeats: int, report: Callable[[str], None]
) -> dict[str, Measure]:
    """Measure the rates of endless pieces of work, in `repeats` rounds of `seconds` each."""
    for work in works.values():
        rate(work, _WARM_UP * seconds)
    values: dict[str, list[float]] = {name: [] for name in works}
    for number in range(repeats):
        for name, work in works.items():
            values[name].append(rate(work, seconds))
        report(f"round {number + 1} of {repeats}")
    return {name: Measure(tuple(rates)) for name, rates in values.items()}


@contextmanager
def one_thread() -> Iterator[None]:
    """Limit torch, Arrow and tokenizers to one thread inside the context."""
    import pyarrow as pa
    import torch

    name = "TOKENIZERS_PARALLELISM"
    before = (torch.get_num_threads(), pa.cpu_count(), os.environ.get(name))
    torch.set_num_threads(1)
    pa.set_cpu_count(1)
    # tokenizers reads the environment at each call.
    os.environ[name] = "false"
    try:
        yield
    finally:
        torch.set_num_threads(before[0])
        pa.set_cpu_count(before[1])
        if before[2] is None:
            del os.environ[name]
        else:
            os.environ[name] = before[2]


def measure_apart(module: str, request: dict[str, Any], *, failure: str, remedy: str) -> dict[str, float]:
    """Run a module that calls `answer` in a separate process, and return its answer to a request."""
    environment = {name: value for name, value in os.environ.items() if name not in RANK_VARIABLES}
    # Measure the clone, not an installed package.
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, (str(ROOT), environment.get("PYTHONPATH"))))
    done = subprocess.run(
        [sys.executable, "-m", module, json.dumps(request)],
        capture_output=True,
        text=True,
        env=environment,
        check=False,
    )
    if done.returncode != 0:
        killed = "it was killed, probably because memory is too small"
        last = killed if done.returncode < 0 else (done.stderr.strip().splitlines() or ["it printed no error"])[-1]
        raise UserError(f"{failure}: {last.removeprefix('error: ')}: {remedy}")
    # Libraries may print before the answer.
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def check_counts(settings: object, **least: int) -> None:
    """Check that numbers of a benchmark's settings are not below a minimum, given by field name.

    Raises:
        UserError: a number is too small; the message names its flag.
    """
    for name, smallest in least.items():
        if getattr(settings, name) < smallest:
            flag = name.replace("_", "-")
            raise UserError(f"--{flag} is {getattr(settings, name)}: it must be {smallest} or more")


def answer(measure: Callable[[dict[str, Any]], dict[str, float]]) -> None:
    """Measure the request on the command line and print the answer, in a module that `measure_apart` runs."""
    exit_on_user_error(lambda: print(json.dumps(measure(json.loads(sys.argv[1])))))


def resident_mib(field: str, process: int | str = "self") -> float:
    """Read the memory of a process in Linux' /proc. (getrusage would include the parent's memory at the start.)

    Args:
        field: VmRSS for the resident memory now, VmHWM for its peak.
        process: its number.
    """
    lines = Path(f"/proc/{process}/status").read_text(encoding="ascii", errors="replace").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{field}:")) / 1024


def who_can_run(needs: Mapping[str, Sequence[str]], report: Callable[[str], None]) -> list[str]:
    """List the names whose packages are all installed, and report the others."""
    found = []
    for name, packages in needs.items():
        missing = [package for package in packages if importlib.util.find_spec(package) is None]
        if missing:
            report(f"left out, because {', '.join(missing)} is not installed: {name}")
        else:
            found.append(name)
    return found


def vector_units(flags: Iterable[str] | None = None) -> str:
    """Name the widest units of this processor, on which its speed depends; processors of one name differ in them.

    Args:
        flags: as Linux names them; None: those of this machine.
    """
    if flags is None:
        flags = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").split()
    return next((name for flag, name in _UNITS.items() if flag in flags), "no AVX2")


def result_of(
    index: "DataIndex | ModelInfo | None",
    *,
    what: str,
    command: str,
    seeds: Sequence[int],
    wall_seconds: float,
    figures: dict[str, Any],
    rows: Sequence[dict[str, Any]],
) -> dict[str, Any]:
    """Make a result in the layout of tools/results_table.py.

    Args:
        index: index of the text; None if no text was used.
    """
    machine = describe_environment()
    machine["gpus"] = ", ".join(machine["gpus"]) or "none"
    machine["cores"] = f"{machine['cores']} core{'s' if machine['cores'] > 1 else ''}"
    machine["units"] = vector_units()
    form = "{cores} of {processor} with {units}, {memory_gib} GiB, GPUs: {gpus}; torch {torch}, Python {python}"
    # The work done per second of CPU time depends on the number of threads.
    form += f"; OMP_NUM_THREADS={threads}" if (threads := os.environ.get("OMP_NUM_THREADS")) else ""
    return {
        "what": what,
        "corpus": f"{index.corpus} ({index.source_language}-{index.target_language})" if index else NO_CORPUS,
        "synthetic": index.synthetic if index else True,
        "date": datetime.date.today().isoformat(),
        "machine": form.format(**machine),
        "commands": [command],
        "seeds": list(seeds),
        "wall_seconds": wall_seconds,
        "figures": figures,
        "rows": list(rows),
    }


def write_result(path: Path, result: dict[str, Any]) -> None:
    """Write a result file whole: a reader finds the old file or the new one."""
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        temporary.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        temporary.replace(path)
    except OSError as error:
        raise UserError(f"{path} cannot be written ({error.strerror}): choose another --json") from None
