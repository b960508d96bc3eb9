"""Score translations by a program of the user, such as COMET in its own environment, on rank 0."""

import math
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

from dist_transformer.base.errors import UserError
from dist_transformer.base.files import append_to, write_file
from dist_transformer.config.measures import HYPOTHESIS, REFERENCE, SOURCE, words_of_command
from dist_transformer.runtime import distributed
from dist_transformer.runtime.launch import without_place
from dist_transformer.training.fault_tolerance.preemption import Preemption

# How long rank 0 waits before it asks again whether the program has ended, and how long it lets the program end itself.
_ROUND_SECONDS, _GRACE_SECONDS = 0.1, 5.0
# Bytes that are read at the end of an output.
_TAIL = 4096


@dataclass(frozen=True, kw_only=True, slots=True)
class CommandOutcome:
    """The outcome of one call of the program, the same on every rank. One of the three is not None."""

    score: float | None
    problem: str | None
    """Why there is no score, and the remedy: the rest of a sentence about the command."""
    stopped_by: str | None
    """Why all ranks stop now. The program was ended before it had a score."""


class ValidationCommand:
    """A program that scores translations.

    Rank 0 runs it. The ranks exchange short messages until it has ended, so that no collective and no watchdog waits
    long. A signal to any rank, or the time limit of the job, ends it at once.

    Args:
        command: words with `{source}`, `{hypothesis}` and `{reference}`, as a shell quotes them.
        minutes: time limit of one call.
    """

    def __init__(self, command: str, *, minutes: float, preemption: Preemption) -> None:
        self.words, self.minutes, self.preemption = words_of_command(command), minutes, preemption

    def score(self, *, sources: Sequence[str], hypotheses: Sequence[str], references: Sequence[str]) -> CommandOutcome:
        """Run the program on files with these lines. Collective: every rank must call it."""
        with ExitStack() as held:
            program: _Program | None = None
            found: tuple[float | None, str | None] = (None, None)
            if distributed.rank() == 0:
                try:
                    program = self._start({SOURCE: sources, HYPOTHESIS: hypotheses, REFERENCE: references}, held)
                except OSError as error:
                    place = f": {error.filename}" if error.filename else ""
                    found = None, f"cannot be started ({error.strerror}{place}): check --validation-command and TMPDIR"
                except UserError as error:
                    found = None, f"cannot be started: {error}"
            stopped_by = self.preemption.wait_until(lambda: program is None or program.has_ended())
            if program is not None and stopped_by is None:
                found = program.answer()
        score, problem = distributed.broadcast_object(found)
        return CommandOutcome(score=score, problem=problem, stopped_by=stopped_by)

    def _start(self, texts: Mapping[str, Sequence[str]], held: ExitStack) -> "_Program":
        folder = Path(held.enter_context(tempfile.TemporaryDirectory(prefix="dist_transformer-")))
        words = self.words
        for placeholder, lines in texts.items():
            file = folder / f"{placeholder.strip('{}')}.txt"
            write_file(file, "".join(f"{line}\n" for line in lines), durable=False)
            words = [word.replace(placeholder, str(file)) for word in words]
        program = _Program(words, folder, minutes=self.minutes)
        endings = self.preemption.watchdog.endings
        endings.append(program.end)
        held.callback(endings.remove, program.end)
        held.callback(program.end)
        return program


class _Program:
    """A started program, in a process group of its own; what it prints goes to files in `folder`."""

    def __init__(self, words: Sequence[str], folder: Path, *, minutes: float) -> None:
        self.stdout, self.stderr = folder / "stdout.txt", folder / "stderr.txt"
        self.minutes, self.began = minutes, time.monotonic()
        with append_to(self.stdout) as stdout, append_to(self.stderr) as stderr:
            self.process = subprocess.Popen(
                words,
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=stderr,
                # A library in the program would otherwise join this job as one more rank.
                env=without_place(os.environ),
                # It is ended with the processes that it has started, and a terminal's Ctrl-C is for the ranks.
                start_new_session=True,
            )

    def has_ended(self) -> bool:
        """Wait a moment, and return whether the program has ended or has used up its time."""
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(_ROUND_SECONDS)
        return self.process.returncode is not None or time.monotonic() - self.began > 60 * self.minutes

    def answer(self) -> tuple[float | None, str | None]:
        """Return the score, or why there is none."""
        status = self.process.returncode
        if status is None:
            return None, f"took longer than {self.minutes:g} minutes: raise --validation-command-minutes"
        if status != 0:
            how = f"failed with status {status}" if status > 0 else f"was ended by {signal.Signals(-status).name}"
            said = _end_of(self.stderr).strip().split("\n")[-1]
            return None, f"{how} ({said or 'it printed no error':.200}): check --validation-command"
        words = _end_of(self.stdout).split()
        with suppress(IndexError, ValueError):
            score = float(words[-1])
            if math.isfinite(score):
                return score, None
        printed = f"{words[-1]!r:.60}" if words else "nothing"
        return None, f"printed {printed} at its end, not a number: check --validation-command"

    def end(self) -> None:
        """End the program and what it has started, if it still runs."""
        if self.process.poll() is None:
            self._signal(signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(_GRACE_SECONDS)
            self._signal(signal.SIGKILL)
            self.process.wait()

    def _signal(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, number)


def _end_of(output: Path) -> str:
    with output.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL))
        return file.read().decode(errors="replace")
