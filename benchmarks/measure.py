"""Rates of several pieces of work, measured in turns; the parts of `tools/benchmark.py`; the result file of a part.

Turns make the comparison fair: other work that slows the machine down for a while affects all of them.
"""

import datetime
import importlib.util
import json
import os
import platform
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

from dist_transformer.base.errors import UserError, exit_on_user_error
from dist_transformer.base.files import write_file
from dist_transformer.config.command_line import Page, parse
from dist_transformer.config.flags import parse_training
from dist_transformer.config.schema import setting, settings_of, values_of
from dist_transformer.config.settings import TrainConfig
from dist_transformer.cost.hardware import kind_of_device
from dist_transformer.data.folder.format import DataIndex
from dist_transformer.run.environment import describe_environment
from dist_transformer.runtime.launch import without_place

if TYPE_CHECKING:
    import torch

    from dist_transformer.model_folder import ModelInfo

# Warm-up of each piece of work as a share of a measure's time, not counted: files are read, caches are filled.
_WARM_UP = 0.2
_UNITS = {"amx_bf16": "AMX", "avx512_bf16": "AVX-512-bf16", "avx512f": "AVX-512", "avx2": "AVX2"}
NO_CORPUS = "no text"
ALLOCATOR = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(2**62), "MALLOC_ARENA_MAX": "1"}
"""Variables with which glibc keeps freed memory, as `dist_transformer` lets it."""
ROOT = Path(__file__).resolve().parents[1]
"""Root of the clone, whose package is measured."""


Settings = TypeVar("Settings")


def read_flags(kind: type[Settings], words: Sequence[str] | None = None) -> Settings:
    """Read settings from flags, and flags of training after `--`; the help begins with the module's docstring."""
    words = sys.argv[1:] if words is None else words
    end = words.index("--") if "--" in words else len(words)
    settings: Any = parse(kind, Page(text=sys.modules[kind.__module__].__doc__, taken=()), words=words[:end])
    if end < len(words):
        if not hasattr(settings, "flags"):
            raise UserError(f"nothing is trained with {' '.join(words[end:])}: leave it out")
        settings = replace(settings, flags=tuple(words[end + 1 :]))
    return cast(Settings, settings)


def require_known(flag: str, names: Iterable[str], known: Collection[str]) -> None:
    for name in names:
        if name not in known:
            raise UserError(f"{flag} {name} is unknown: choose among {', '.join(known)}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """A part of `tools/benchmark.py`, whose fields are its flags."""

    json: Path | None = None
    """Result file, besides the printed table."""

    def measure(self) -> "Measured":
        raise NotImplementedError

    def words(self) -> list[str]:
        """Write its flags as a result has them, with names in place of the folders and files of this machine."""
        words, values = list[str](), values_of(self)
        for each in settings_of(type(self)):
            value = values[each.name]
            if each.name == "json" or value is None or value is False:
                continue
            if each.name == "data" or Path in each.kinds:
                words += [each.flag, each.name.upper()]
            elif isinstance(value, tuple):
                words += [each.flag, *map(str, value)]
            else:
                words.append(each.flag if value is True else f"{each.flag}={value}")
        return words


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingPart(Part):
    """A part that trains on a data folder. Flags of `dist-transformer train` come after `--`."""

    data: str
    """Data folder."""
    preset: str = "tiny"
    """Model and batch."""
    flags: tuple[str, ...] = setting(default=(), python_only=True)

    def config(self) -> TrainConfig:
        """Apply the flags of training to the preset."""
        return parse_training(["--preset", self.preset, "--data", self.data, "--run-dir", "unused", *self.flags])[0]

    def words(self) -> list[str]:
        # super() does not know the class in a dataclass with slots.
        return [*Part.words(self), *(["--", *self.flags] if self.flags else [])]


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """Figures of a part, and what its result file needs besides them."""

    what: str
    figures: dict[str, Any]
    table: str
    rows: Sequence[dict[str, Any]] = ()
    text: "DataIndex | ModelInfo | None" = None
    """Index of the data folder or model that names the corpus."""
    seeds: Sequence[int] = ()
    wall_seconds: float | None = None
    """Time of a measurement in several calls, if it is not that of this one."""
    flaw: str | None = None
    """Reason why the figures are wrong, if they are."""


def spread(values: Iterable[float]) -> dict[str, Any]:
    """Summarise the repeated values of one figure."""
    found = list(values)
    return {"median": statistics.median(found), "lowest": min(found), "highest": max(found), "values": found}


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


def measure_rates(works: Mapping[str, Iterator[int]], *, seconds: float, repeats: int) -> dict[str, dict[str, Any]]:
    """Measure the rates of endless pieces of work, in `repeats` rounds of `seconds` each."""
    for work in works.values():
        rate(work, _WARM_UP * seconds)
    values: dict[str, list[float]] = {name: [] for name in works}
    for number in range(repeats):
        for name, work in works.items():
            values[name].append(rate(work, seconds))
        say(f"round {number + 1} of {repeats}")
    return {name: spread(rates) for name, rates in values.items()}


@contextmanager
def apart(
    serve: Callable[[Iterator[Any]], Iterator[Any]], *, failure: str, remedy: str
) -> Iterator[Callable[[Any], Any]]:
    """Start a process that answers requests, and yield a function that sends one and returns its answer.

    Its memory and its time are its own, and its allocator keeps freed memory, as that of our trainings does.

    Args:
        serve: a module's function, which takes the requests and yields an answer to each, both as JSON values.
        failure: beginning of the error if the process ends; `remedy` is its end.
    """
    environment = {**without_place(os.environ), **ALLOCATOR}
    # Measure the clone, not an installed package.
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, (str(ROOT), environment.get("PYTHONPATH"))))
    name, module = serve.__name__, serve.__module__
    program = f"from benchmarks.measure import answer; from {module} import {name}; answer({name})"
    with (
        tempfile.TemporaryFile("w+", errors="replace") as errors,
        subprocess.Popen(
            [sys.executable, "-c", program],
            bufsize=0,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            env=environment,
        ) as process,
    ):
        assert process.stdin is not None
        assert process.stdout is not None
        requests, answers = process.stdin, process.stdout

        def ask(request: Any) -> Any:
            with suppress(BrokenPipeError):
                requests.write(json.dumps(request).encode() + b"\n")
            if line := answers.readline():
                return json.loads(line)
            killed = "it was killed, probably because memory is too small"
            ended = process.wait()
            errors.seek(0)
            last = killed if ended < 0 else (errors.read().strip().splitlines() or ["it printed no error"])[-1]
            raise UserError(f"{failure}: {last.removeprefix('error: ')}: {remedy}")

        try:
            yield ask
        finally:
            process.kill()


def answer(serve: Callable[[Iterator[Any]], Iterator[Any]]) -> None:
    """Answer requests, a line each, until there are no more."""
    # Libraries print, too.
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    sys.stdout = sys.stderr

    def write() -> None:
        for found in serve(map(json.loads, sys.stdin)):
            print(json.dumps(found), file=answers, flush=True)

    exit_on_user_error(write)


def children_seconds() -> float:
    """Return the CPU time of the children that have ended, and of theirs."""
    times = os.times()
    return times.children_user + times.children_system


def columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """Align the cells of rows: the first to the left, the others to the right."""
    widths = [max(map(len, cells)) for cells in zip(*rows, strict=True)]
    return ["  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in rows]


def resident_mib(field: str, process: int | str = "self") -> float:
    """Read the memory of a process in Linux' /proc. (getrusage would include the parent's memory at the start.)

    Args:
        field: VmRSS for the resident memory now, VmHWM for its peak.
        process: its number.
    """
    lines = Path(f"/proc/{process}/status").read_text(encoding="ascii", errors="replace").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{field}:")) / 1024


def missing_packages(names: Iterable[str]) -> str:
    """List the packages that are not installed, or return an empty text."""
    return ", ".join(name for name in names if importlib.util.find_spec(name) is None)


def vector_units(flags: Iterable[str] | None = None) -> str:
    """Name the widest units of this processor, on which its speed depends; processors of one name differ in them.

    Args:
        flags: as Linux names them; None: those of this machine.
    """
    flags = _cpu_info().split() if flags is None else flags
    return next((name for flag, name in _UNITS.items() if flag in flags), "no AVX2")


def processor_name(info: str | None = None) -> str:
    """Name a processor with its family, model and widest units, because a cloud's "AMD EPYC" is any of many.

    Args:
        info: what Linux reports of it; None: of this machine's.
    """
    info = info or _cpu_info()
    found = dict(re.findall(r"^(model name|cpu family|model)\s*: (.+)$", info, re.MULTILINE))
    numbers = [f"{key.removeprefix('cpu ')} {found[key]}" for key in ("cpu family", "model") if key in found]
    name = found.get("model name", platform.machine())
    return " ".join([name, *numbers, "with", vector_units(info.split())])


def _cpu_info() -> str:
    return Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")


def device_name() -> str:
    """Name the device briefly, for file names: `cpu-` and the processor, or the GPU's name in the table of GPUs."""
    import torch

    if not torch.cuda.is_available():
        return f"cpu-{short_name(processor_name())}"
    properties = torch.cuda.get_device_properties(0)
    known = kind_of_device(f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB")
    return known or short_name(properties.name)


def short_name(processor: str) -> str:
    """Shorten a name: `Intel(R) Xeon(R) Gold 6338 CPU @ 2.00GHz with AVX2` becomes `intel-xeon-gold-6338-avx2`."""
    name = re.sub(r"\((?:r|tm)\)|@ [\d.]+ghz|\b(?:cpu|processor|with|[0-9]+-core)\b", " ", processor.lower())
    return re.sub(r"[^a-z0-9]+", "-", name).strip("-")


def result_of(
    index: "DataIndex | ModelInfo | None",
    *,
    what: str,
    command: str | Sequence[str],
    figures: dict[str, Any],
    wall_seconds: float,
    seeds: Sequence[int] = (),
    rows: Sequence[dict[str, Any]] = (),
) -> dict[str, Any]:
    """Make a result in the layout of tools/results_table.py.

    Args:
        index: index of the text; None if no text was used.
    """
    machine = describe_environment()
    machine["gpus"] = ", ".join(machine["gpus"]) or "none"
    machine["cores"] = f"{machine['cores']} core{'s' if machine['cores'] > 1 else ''}"
    machine["processor"] = processor_name()
    form = "{cores} of {processor}, {memory_gib} GiB, GPUs: {gpus}; torch {torch}, Python {python}"
    # The work done per second of CPU time depends on the number of threads.
    form += f"; OMP_NUM_THREADS={threads}" if (threads := os.environ.get("OMP_NUM_THREADS")) else ""
    return {
        "what": what,
        "corpus": f"{index.corpus} ({index.source_language}-{index.target_language})" if index else NO_CORPUS,
        "synthetic": index.synthetic if index else True,
        "date": datetime.date.today().isoformat(),
        "machine": form.format(**machine),
        "commands": [command] if isinstance(command, str) else [*command],
        "seeds": list(seeds),
        "wall_seconds": wall_seconds,
        "figures": figures,
        "rows": list(rows),
    }


def write_result(path: Path, result: dict[str, Any]) -> None:
    """Write a result file whole: a reader finds the old file or the new one."""
    write_file(path, json.dumps(result, indent=1, ensure_ascii=False) + "\n")


def say(line: str) -> None:
    """Report progress, on standard error."""
    print(line, file=sys.stderr, flush=True)
