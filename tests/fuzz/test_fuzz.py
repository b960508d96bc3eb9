"""Damage by accidents, drawn by Hypothesis: a few cases of every format are read or refused by its readers in real use.

The readers run in a child process with limits: libraries of C and Rust may crash it, and a reader may never end.
"""

import ctypes
import faulthandler
import os
import resource
import signal
import unicodedata
from dataclasses import replace

import hypothesis
import pytest
from hypothesis import HealthCheck, Phase
from hypothesis import strategies as st

from dist_transformer.base.errors import UserError
from tests.fuzz.formats import FORMATS, Format, Lab

pytestmark = pytest.mark.system

MEMORY = 2**30
"""Bytes that the readers may take besides what the process has."""


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Lab:
    return Lab(tmp_path_factory.mktemp("fuzz") / "formats")


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


def problem_of(kind: Format, lab: Lab, is_sound: bool) -> str | None:
    """Read a file, and return what is wrong with the outcome."""
    try:
        kind.read(lab)
    except UserError as error:
        printable = not any(unicodedata.category(character) in ("Cc", "Cs", "Zl", "Zp") for character in str(error))
        return None if printable else f"not one line: {str(error)!r:.300}"
    except Exception as error:
        # The command line makes one line of it.
        return None if kind.is_ours else f"{type(error).__name__}: {error!s:.300}"
    return "read although its hash is recorded" if kind.is_hashed and not is_sound else None


def hunt(kind: Format, lab: Lab, *, cases: int, seconds: int = 60) -> str | None:
    """Damage the file of a format again and again; return the first problem, with the content that shows it.

    Args:
        seconds: of the CPU, for all cases together.
    """
    # What is loaded at its first use is loaded before the child is made.
    kind.read(lab)
    file = lab.folder / kind.file
    sound = file.read_bytes()
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            limit_this_process(seconds)
            os.write(writing, search(kind, lab, sound, cases).encode("utf-8", "backslashreplace")[:4096])
        finally:
            # No clean-up of the parent's: its files and fixtures are not this process's.
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as answer:
        said = answer.read().decode("utf-8")
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    content = file.read_bytes()
    file.write_bytes(sound)
    if status < 0:
        return f"ended by {signal.Signals(-status).name}: {content!r:.2000}"
    return said.removeprefix("done") or (None if said else "ended without an answer")


def search(kind: Format, lab: Lab, sound: bytes, cases: int) -> str:
    problems: list[str] = []

    @hypothesis.seed(1)
    @hypothesis.settings(
        max_examples=cases,
        database=None,
        derandomize=False,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @hypothesis.given(damaged(sound))
    def examine(content: bytes) -> None:
        (lab.folder / kind.file).write_bytes(content)
        if not problems and (problem := problem_of(kind, lab, content == sound)):
            problems.append(f"{problem} with {content!r:.2000}")

    examine()
    return "done" + "".join(problems)


def limit_this_process(seconds: int) -> None:
    """Whatever exceeds a limit gets an error, or is ended by a signal, in code of any language."""
    ctypes.CDLL(None).malloc_trim(0)
    with open("/proc/self/statm", encoding="ascii") as file:
        taken = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (taken + MEMORY, taken + MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    signal.alarm(10 * seconds)
    faulthandler.disable()
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)


@pytest.mark.parametrize("kind", FORMATS, ids=lambda kind: kind.name)
def test_a_damaged_file_is_read_or_refused_in_one_line(kind: Format, lab: Lab) -> None:
    # A vocabulary from elsewhere starts a process for each case.
    assert hunt(kind, lab, cases=3 if kind.name.startswith(("Marian", "Sentence")) else 12) is None


def spin(_: Lab) -> None:
    while True:
        pass


@pytest.mark.parametrize(
    ("read", "found"),
    [
        (lambda _: os.kill(os.getpid(), signal.SIGSEGV), "ended by SIGSEGV"),
        (spin, "ended by SIGPROF"),
        (lambda _: bytes(2 * MEMORY), "MemoryError"),
        (lambda _: None, "read although its hash is recorded"),
    ],
    ids=["crash", "loop", "memory", "no check"],
)
def test_a_hunt_finds_what_no_reader_may_do(read: object, found: str, lab: Lab) -> None:
    parent, (kind,) = os.getpid(), [kind for kind in FORMATS if kind.name == "tokenizer.json"]
    in_child = replace(kind, read=lambda lab: read(lab) if os.getpid() != parent else None)  # type: ignore[operator]
    assert found in (hunt(in_child, lab, cases=5, seconds=4 if read is spin else 60) or "")
