"""Bugs planted in the code of the package, and campaigns that must find them.

A bug replaces functions, in this process and in every Python process that is started meanwhile: those find a module
`sitecustomize` on their path, which Python imports before anything else.
"""

import functools
import importlib
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

from dist_transformer.data.folder.reader import DataFolder
from tests.conftest import ROOT
from tests.faults.campaign import Campaign, Case, Found, Lab, UnavailableError

_VARIABLE = "PLANTED_BUG"
_START = "from tests.faults.planted import plant_by_name\n\nplant_by_name()\n"


@dataclass(frozen=True, kw_only=True, slots=True)
class Bug:
    """A small change of the code that one campaign must find."""

    name: str
    campaign: str
    places: tuple[str, ...]
    """Functions that are replaced, as "module:name" or "module:Class.name"."""
    behave: Callable[..., Any]
    """Function that replaces them; it gets the original function, then its arguments."""
    kind: str
    numbers: tuple[int, ...]
    """Numbers of the campaign's cases that meet the bug."""
    reported: str
    """A part of what the campaign must say: a bug that only crashes is not found by what must hold."""

    def replacements(self) -> Iterator[tuple[Any, str, Callable[..., Any]]]:
        """Yield, for each place of the bug, the owner, the name there, and the function that takes it."""
        for place in self.places:
            module, _, path = place.partition(":")
            *owners, name = path.split(".")
            owner = functools.reduce(getattr, owners, importlib.import_module(module))
            yield owner, name, self._replacing(getattr(owner, name))

    def _replacing(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def replacement(*arguments: Any, **options: Any) -> Any:
            return self.behave(original, *arguments, **options)

        return replacement


def plant_named(bugs: Sequence[Bug]) -> None:
    """Plant the bug that the environment names, for as long as this process lives."""
    name = os.environ.get(_VARIABLE)
    for bug in bugs:
        if bug.name == name:
            for owner, attribute, replacement in bug.replacements():
                setattr(owner, attribute, replacement)


@contextmanager
def planted(bug: Bug, scratch: Path) -> Iterator[None]:
    """Plant a bug in this process and in those that it starts."""
    site = scratch / "site"
    site.mkdir(exist_ok=True)
    (site / "sitecustomize.py").write_text(_START)
    path = os.pathsep.join(filter(None, (str(site), str(ROOT), os.environ.get("PYTHONPATH"))))
    with ExitStack() as patched:
        for owner, name, replacement in bug.replacements():
            patched.enter_context(mock.patch.object(owner, name, replacement))
        patched.enter_context(mock.patch.dict(os.environ, {_VARIABLE: bug.name, "PYTHONPATH": path}))
        yield


def examine(campaign: Campaign, case: Case, lab: Lab) -> Found:
    """Run a case; one that breaks off has failed."""
    try:
        return campaign.run(case, lab)
    except UnavailableError:
        raise
    except Exception as error:
        return Found(problems=(f"{type(error).__name__}: {error}",))


def prove(campaign: Campaign, bugs: Sequence[Bug], scratch: Path, data: DataFolder) -> Iterator[dict[str, Any]]:
    """Run the cases of each bug with the bug and without any; give what the table keeps of it."""
    sound: dict[tuple[str, tuple[int, ...]], list[str]] = {}
    for bug in bugs:
        met = bug.kind, bug.numbers
        cases = [Case(campaign=campaign.name, kind=bug.kind, number=number) for number in bug.numbers]
        if met not in sound:
            sound[met] = _examine_alone(campaign, cases, scratch / "sound", data)
        with planted(bug, scratch):
            problems = _examine_alone(campaign, cases, scratch / "bugged", data)
        problems = [problem.replace(f"{scratch}/", "").replace(f"{ROOT}/", "") for problem in problems]
        said = next((problem for problem in problems if bug.reported in problem), None)
        yield {
            "bug": bug.name,
            "found": said is not None,
            "cases": len(cases),
            "kind": bug.kind,
            "numbers": list(bug.numbers),
            "said": _shortened("; ".join(problems) if said is None else said.partition(bug.reported)[0] + bug.reported),
            "without_the_bug": [_shortened(problem) for problem in sound[met]],
        }


def _examine_alone(campaign: Campaign, cases: Sequence[Case], scratch: Path, data: DataFolder) -> list[str]:
    """Give the problems of some cases, with undisturbed runs of their own, which a bug may be part of."""
    scratch.mkdir()
    lab, problems = Lab(scratch, data), list[str]()
    try:
        for case in cases:
            lab.clear()
            problems += examine(campaign, case, lab).problems
    finally:
        lab.clear()
        shutil.rmtree(scratch)
    return problems


def _shortened(text: str, *, most: int = 160) -> str:
    """The end of a text, in one line."""
    return " ".join(text[-most:].split())
