"""Every command meets every file that it reads in every bad state.

Which files a command reads is known from the command itself, which says what it opens on a sound folder; so the table
has a cell for each file and command, and the cell of a file that a command does not read is empty.
"""

import os
import random
import shutil
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path

from tests import lived
from tests.commands import Commands, Ended
from tests.faults.campaign import Campaign, Case, Found, Lab
from tests.lived import NEWEST

TOOLS: Mapping[str, tuple[str, ...]] = {
    "train": lived.FRESH,
    "train, resumed": lived.RESUMED,
    "train --init-from": lived.BEGIN_WITH,
    "average --last": lived.LAST,
    "average --best": lived.BEST,
    "average --sweep": lived.SWEEP,
    "average of a checkpoint": lived.AVERAGE_CHECKPOINT,
    "average of a model": lived.AVERAGE_MODEL,
    "translate": lived.TRANSLATE,
    "score": lived.SCORE,
    "evaluate": lived.EVALUATE,
    "report": lived.REPORT,
    "inspect": lived.INSPECT,
    "verify": lived.VERIFY,
    "verify --data": lived.VERIFY_DATA,
    "doctor": lived.DOCTOR,
    "plan": lived.PLAN,
    "plan --against": lived.AGAINST,
    "prepare --tokenizer": lived.PREPARE,
}

FILES = (
    "data/index.json",
    "data/tokenizer.json",
    "data/lengths.npy",
    "data/train-00000.arrow",
    "data/valid/lengths.npy",
    "data/valid/valid-00000.arrow",
    "data/valid/source.txt",
    "data/valid/target.txt",
    "run/config.json",
    "run/tokenizer.json",
    "run/metrics.jsonl",
    "run/ledger.jsonl",
    "run/environment.json",
    "run/lock",
    "run/bleu.json",
    "run/samples/step-00000002.json",
    "run/checkpoints/latest",
    f"{NEWEST}/manifest.json",
    f"{NEWEST}/state.json",
    f"{NEWEST}/part-00000.safetensors",
    "run/weights/SHA256SUMS",
    "run/weights/step-00000002.safetensors",
    "run/weights/ema-00000002.safetensors",
    "run/model/config.json",
    "run/model/model.safetensors",
    "run/model/tokenizer.json",
)

READS: Mapping[str, int] = {
    "train": 8,
    "train, resumed": 18,
    "train --init-from": 11,
    "average --last": 3,
    "average --best": 5,
    "average --sweep": 10,
    "average of a checkpoint": 4,
    "average of a model": 3,
    "translate": 3,
    "score": 3,
    "evaluate": 3,
    "report": 10,
    "inspect": 8,
    "verify": 18,
    "verify --data": 26,
    "doctor": 8,
    "plan": 4,
    "plan --against": 7,
    "prepare --tokenizer": 1,
}
"""Number of these files that a command opens on a sound folder."""

# What these print is all that they make; it has nothing of the time or the place in it.
_EXACT = ("translate", "score", "average of a model")
_STATUSES = (0, 1)
_SECONDS = 120
_OPENED = """
import atexit, os, sys
def note(event, arguments):
    if event == "open" and isinstance(arguments[0], str) and "TRACE" in os.environ:
        with_name = os.path.realpath(arguments[0])
        if with_name != os.environ["TRACE"]:
            handle = os.open(os.environ["TRACE"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
            os.write(handle, (with_name + "\\n").encode())
            os.close(handle)
sys.addaudithook(note)
"""

Fault = Callable[[Path, random.Random], object]


def missing(file: Path, _: random.Random) -> None:
    file.unlink()


def empty(file: Path, _: random.Random) -> None:
    file.write_bytes(b"")


def cut(file: Path, generator: random.Random) -> None:
    content = file.read_bytes()
    file.write_bytes(content[: generator.randrange(max(1, len(content)))])


def flipped(file: Path, generator: random.Random) -> None:
    content = bytearray(file.read_bytes() or b"\0")
    content[generator.randrange(len(content))] ^= 1 << generator.randrange(8)
    file.write_bytes(content)


def zeros(file: Path, _: random.Random) -> None:
    """Replace the content by zeros, as some file systems do after a loss of power."""
    file.write_bytes(bytes(file.stat().st_size))


def nested(file: Path, _: random.Random) -> None:
    file.write_bytes(b"[" * 100_000 + b"]" * 100_000)


def pipe(file: Path, _: random.Random) -> None:
    file.unlink()
    os.mkfifo(file)


def device(file: Path, _: random.Random) -> None:
    file.unlink()
    file.symlink_to("/dev/zero")


def folder(file: Path, _: random.Random) -> None:
    file.unlink()
    file.mkdir()


def circle(file: Path, _: random.Random) -> None:
    file.unlink()
    file.symlink_to(file.name)


def linked(file: Path, _: random.Random) -> None:
    """The file is elsewhere, and must stay as it is."""
    shutil.move(file, victim_of(file))
    file.symlink_to(victim_of(file))


def victim_of(file: Path) -> Path:
    """Outside of the folder of the case."""
    return next(parent for parent in file.parents if parent.name == "copy").with_name(f"victim {file.name}")


FAULTS: tuple[Fault, ...] = (
    missing,
    empty,
    cut,
    flipped,
    zeros,
    nested,
    pipe,
    device,
    folder,
    circle,
    linked,
)
LEGEND = {
    "R": "refused in one sentence",
    "w": "continued",
    "=": "continued, with the output of a sound folder, byte for byte",
    "X": "failed",
}
COLUMNS = " ".join(fault.__name__ for fault in FAULTS)


class Workshop:
    """A sound folder, what the commands print in it, and a warm process that runs them.

    Args:
        plant: code that the process runs first: a bug that must be found.
        seconds: that a command may take.
    """

    def __init__(self, scratch: Path, data: Path, plant: str = "", *, seconds: int = _SECONDS) -> None:
        self.scratch = scratch
        scratch.mkdir(parents=True, exist_ok=True)
        self.commands = Commands(scratch, first=_OPENED + plant, seconds=seconds)
        self.sound = scratch / "sound"
        if not self.sound.exists():
            lived.live(self.commands, data, self.sound)
        self._known: dict[str, tuple[Ended, frozenset[str]]] = {}

    def on_sound_folder(self, tool: str) -> tuple[Ended, frozenset[str]]:
        """Return how a tool ends, and the files of FILES that it opens."""
        if tool not in self._known:
            copy, trace = self._copy(), self.scratch / "trace"
            trace.unlink(missing_ok=True)
            ended = self._run(tool, copy, TRACE=str(trace))
            assert ended.status == 0, f"{tool}: {ended.output}"
            opened = set(trace.read_text().splitlines())
            self._known[tool] = ended, frozenset(name for name in FILES if str(copy / name) in opened)
        return self._known[tool]

    def examine(self, tool: str, name: str, fault: Fault, generator: random.Random) -> tuple[str, str]:
        """A letter of LEGEND, and what is wrong where that is X."""
        sound, opened = self.on_sound_folder(tool)
        if name not in opened:
            return "", ""
        copy = self._copy()
        fault(copy / name, generator)
        victim = victim_of(copy / name)
        before = victim.read_bytes() if fault is linked else b""
        ended = self._run(tool, copy)
        wrong = problem(ended)
        if not wrong and fault is linked and victim.read_bytes() != before:
            wrong = f"{name} outside the folder was changed"
        if not wrong and tool in _EXACT and ended.status == 0 and ended.output != sound.output:
            wrong = "its output differs from that on a sound folder"
        if wrong:
            return "X", f"{tool}, {name} {fault.__name__}: {wrong}"
        return ("R" if ended.status else "=" if tool in _EXACT else "w"), ""

    def _copy(self) -> Path:
        copy = self.scratch / "copy"
        shutil.rmtree(copy, ignore_errors=True)
        return Path(shutil.copytree(self.sound, copy))

    def _run(self, tool: str, folder: Path, **environment: str) -> Ended:
        return self.commands.run(TOOLS[tool], folder, stdin=folder / "in.en", **environment)


def problem(ended: Ended) -> str:
    """Return what a user must not see, or an empty text."""
    if ended.status not in _STATUSES:
        return f"status {ended.status}: {ended.output[-300:]}"
    if "Traceback" in ended.output:
        return f"a traceback: {ended.output[-300:]}"
    errors = [line for line in ended.output.splitlines() if line.startswith("error: ")]
    if ended.status and len(errors) != 1 and "FAIL" not in ended.output:
        return f"no line that says why: {ended.output[-300:]}"
    return ""


@cache
def workshop(scratch: Path, data: Path) -> Workshop:
    return Workshop(scratch / "tools", data)


def run(case: Case, lab: Lab) -> Found:
    """All faults of one file."""
    shop = workshop(lab.scratch, lab.data.path)
    _, opened = shop.on_sound_folder(case.kind)
    name = [name for name in FILES if name in opened][case.number % len(opened)]
    results = [shop.examine(case.kind, name, fault, case.generator()) for fault in FAULTS]
    return Found(
        problems=tuple(wrong for _, wrong in results if wrong),
        faults=len(FAULTS),
        cells={**{other: "" for other in FILES if other not in opened}, name: "".join(letter for letter, _ in results)},
    )


CAMPAIGN = Campaign(
    name="tools",
    must_hold=(
        "a command that reads the file ends with status 0, or with 1 and one sentence: no traceback, no signal, within "
        f"{_SECONDS} s; a file that a link leads to stays as it is. A cell has one letter for each of: {COLUMNS}. "
        + "; ".join(f"{letter} {meaning}" for letter, meaning in LEGEND.items())
    ),
    full={tool: READS[tool] * len(FAULTS) for tool in TOOLS},
    run=run,
)
