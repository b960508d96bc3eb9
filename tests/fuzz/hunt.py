"""Damage by accidents, drawn by Hypothesis: every case is read by a real reader, in a child process with limits.

Libraries of C and Rust may crash the process, and a reader may never end.
"""

import ctypes
import faulthandler
import os
import resource
import signal
import unicodedata

import hypothesis
from hypothesis import HealthCheck, Phase
from hypothesis import strategies as st

from dist_transformer.base.errors import UserError
from tests.fuzz.formats import Format, Lab

CPU_SECONDS, WALL_SECONDS = 60, 600
MEMORY = 2**30
"""Bytes that the readers may take besides what the process has."""


@st.composite
def damaged(draw: st.DrawFn, sound: bytes) -> bytes:
    """Content with flipped bits, a block of zeros as after a power loss, or lost, repeated or foreign parts."""
    content = bytearray(sound)
    for _ in range(draw(st.integers(1, 3))):
        # More often near the ends, where headers and footers are.
        place = draw(st.integers(0, len(content)) | st.integers(0, 300) | st.integers(len(content) - 300, len(content)))
        place = min(max(place, 0), len(content))
        stop = place + draw(st.integers(1, 64))
        how = draw(st.sampled_from(["flip", "flip", "zeros", "cut", "lose", "repeat", "foreign"]))
        if how == "flip" and place < len(content):
            content[place] ^= 1 << draw(st.integers(0, 7))
        elif how == "zeros":
            content[place:stop] = bytes(len(content[place:stop]))
        elif how == "cut":
            del content[place:]
        elif how == "lose":
            del content[place:stop]
        elif how == "repeat":
            content[place:place] = content[place:stop]
        else:
            content[place:place] = draw(st.binary(min_size=1, max_size=16))
    return bytes(content)


def problem_of(kind: Format, lab: Lab, content: bytes) -> str | None:
    """Read a damaged file, and return what is wrong with the outcome."""
    try:
        kind.read(lab)
    except UserError as error:
        printable = not any(unicodedata.category(character) in ("Cc", "Cs", "Zl", "Zp") for character in str(error))
        return None if printable else f"not one line: {str(error)!r:.300}"
    except Exception as error:
        # The command line makes one line of it.
        return None if kind.is_ours else f"{type(error).__name__}: {error!s:.300}"
    return "read although its hash is recorded" if kind.is_hashed and content != kind.sound(lab) else None


def hunt(kind: Format, lab: Lab, *, cases: int, seed: int = 1) -> str | None:
    """Damage the file of a format again and again; return the first problem, with the content that shows it."""
    # What is loaded at its first use is loaded before the child is made.
    kind.read(lab)
    sound = kind.sound(lab)
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.close(reading)
            _limit_this_process()
            os.write(writing, _search(kind, lab, cases, seed).encode("utf-8", "backslashreplace")[:4096])
        finally:
            # No clean-up of the parent's: its files and fixtures are not this process's.
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as answer:
        said = answer.read().decode("utf-8")
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    content = (lab.folder / kind.file).read_bytes()
    (lab.folder / kind.file).write_bytes(sound)
    if status < 0:
        return f"ended by {signal.Signals(-status).name}: {content!r:.2000}"
    return said.removeprefix("done") or (None if said else "ended without an answer")


def _search(kind: Format, lab: Lab, cases: int, seed: int) -> str:
    problems: list[str] = []

    def examine(content: bytes) -> None:
        (lab.folder / kind.file).write_bytes(content)
        if not problems and (problem := problem_of(kind, lab, content)):
            problems.append(f"{problem} with {content!r:.2000}")

    settings = hypothesis.settings(
        max_examples=cases,
        database=None,
        deadline=None,
        derandomize=False,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    hypothesis.seed(seed)(settings(hypothesis.given(damaged(kind.sound(lab)))(examine)))()
    return "done" + "".join(problems)


def _limit_this_process() -> None:
    """Whatever exceeds a limit gets an error, or is ended by a signal, in code of any language."""
    ctypes.CDLL(None).malloc_trim(0)
    with open("/proc/self/statm", encoding="ascii") as file:
        held = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (held + MEMORY, held + MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)
    signal.alarm(WALL_SECONDS)
    faulthandler.disable()
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
