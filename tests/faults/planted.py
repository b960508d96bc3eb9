"""Three bugs for each campaign that starts real trainings; `python -m tests.faults --planted` must find them all.

The other campaigns are quick, and their bugs are planted by tests: see `IN_TESTS`.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from dist_transformer.base.files import remove_tree
from dist_transformer.run.checkpoint import reader
from dist_transformer.run.checkpoint.writer import move_pointer
from dist_transformer.run.layout import checkpoints_of
from dist_transformer.runtime import distributed
from tests.faults.planting import Bug, plant_named

IN_TESTS = {
    "power_loss": "tests/faults/test_power_loss.py::test_a_planted_bug_is_found",
    "histories": "tests/faults/test_histories.py::test_a_planted_bug_is_found",
    "formats": "tests/fuzz/test_fuzz.py::test_a_check_that_is_taken_away_is_missed",
    "tools": "tests/faults/test_tools.py::test_a_planted_bug_is_found",
    "translation_parts": "tests/faults/test_translation_parts.py::test_a_planted_bug_is_found",
}
"""Campaigns whose bugs the test suite plants."""

_READER = "dist_transformer.run.checkpoint.reader"
_TENSORS = "dist_transformer.base.tensor_file"
_WRITER = "dist_transformer.run.checkpoint.writer"
_ENGINE = "dist_transformer.training.engine.engine"
_ASSEMBLY = "dist_transformer.training.assembly"
_SYNC = f"dist_transformer.base.files:sync {_WRITER}:sync"

Original = Callable[..., Any]


def plant_by_name() -> None:
    """Plant the bug that the environment names: for a process that a campaign starts."""
    plant_named(BUGS)


def restart_data(original: Original, engine: Any, data: Any, origin: Any) -> Any:
    progress = original(engine, data, origin)
    progress.position = data.plan.start()
    return progress


def restart_window(original: Original, engine: Any, data: Any, origin: Any) -> Any:
    progress = original(engine, data, origin)
    progress.position = replace(progress.position, packs_consumed=0)
    return progress


def do_nothing(original: Original, *_: Any) -> None:
    pass


def point_early(original: Original, self: Any, temporary: Path, snapshot: Any) -> Any:
    files = original(self, temporary, snapshot)
    if distributed.rank() == 0:
        move_pointer(temporary.with_name(snapshot.name))
    return files


def prune_early(original: Original, self: Any, temporary: Path, snapshot: Any) -> Any:
    if distributed.rank() == 0:
        for path in checkpoints_of(self.run_dir)[snapshot.retention.checkpoints - 1 :]:
            remove_tree(path)
    return original(self, temporary, snapshot)


def state_one_part(original: Original, self: Any, temporary: Path, snapshot: Any, files: dict[str, Any]) -> None:
    own = {name: stated for name, stated in files.items() if not name.startswith("part-") or "00000" in name}
    original(self, temporary, snapshot, own)


def compare_sizes(original: Original, folder: Path, name: str, stated: tuple[Any, Any]) -> str | None:
    file = folder / name
    return None if file.is_file() and file.stat().st_size == stated[0] else f"{file} is damaged"


def accept(original: Original, *_: Any) -> bool:
    return True


def ask_rank_0(original: Original, path: Path, judge: Callable[[Path], str | None]) -> str | None:
    """The ranks share the hashing, and what another one finds is lost."""
    files, problem = reader._stated_files(path)
    own = list(files)[distributed.rank() :: distributed.world_size()]
    problem = problem or next(filter(None, (reader._file_problem(path, name, files[name]) for name in own)), None)
    return distributed.broadcast_object(problem)


def swallow_errors(original: Original, path: Path, tensors: Any, metadata: Any = None) -> dict[str, Any]:
    try:
        return original(path, tensors, metadata)
    except OSError:
        return {"bytes": 0, "sha256": ""}


def agree_on_nothing(original: Original, self: Any, action: Callable[[], Any]) -> Any:
    return distributed.on_all_ranks(self._behind_fence(action), group=self._group)


def count_as_applied(original: Original, self: Any) -> bool:
    original(self)
    return True


def count_skipped_updates(original: Original, self: Any) -> bool:
    applied = original(self)
    if not applied:
        self.scheduler.step()
    return applied


def update_anyway(original: Original, self: Any, closure: None = None) -> None:
    original(self, closure)
    if self.overflow:
        torch.optim.AdamW.step(self, closure)


def tell_nobody(original: Original, self: Any, failure: Any) -> Any:
    return failure


def look_twice_at_once(original: Original, self: Any, *, wait_seconds: float) -> str:
    return original(self, wait_seconds=0.0)


def count_from_one(original: Original, ranks: list[int]) -> str:
    return original([rank + 1 for rank in ranks])


def seed_by_rank(original: Original, seed: int, epoch: int, step: int, first_pack: int) -> int:
    return original(seed + distributed.rank(), epoch, step, first_pack)


def take_first_part(original: Original, parameter: Any, value: torch.Tensor) -> torch.Tensor:
    whole = value.flatten()
    size = original(parameter, value).numel()
    return torch.nn.functional.pad(whole[:size], (0, max(0, size - whole.numel())))


def unpickle(original: Original, file: Path, **options: Any) -> Any:
    try:
        return original(file, **options)
    except Exception:
        # Given a path, torch would look at the name.
        with file.open("rb") as opened:
            torch.load(opened, weights_only=False)
        raise


def follow_link(original: Original, path: Path) -> Any:
    return original(path.resolve())


def join(original: Original, folder: Path, name: str) -> Path:
    return folder / name


def flush_data_alone(original: Original, path: Path) -> None:
    if not path.is_dir():
        original(path)


def flush_names_alone(original: Original, path: Path) -> None:
    if path.is_dir():
        original(path)


def state_names(original: Original, stated: Any) -> dict[str, str]:
    return dict.fromkeys(original(stated), "")


def _bugs(campaign: str, kind: str, numbers: tuple[int, ...], *bugs: tuple[str, str, Original, str]) -> list[Bug]:
    """Bugs that the same cases meet: name, place, what it does, what must be reported."""
    return [
        Bug(
            name=name,
            campaign=campaign,
            places=tuple(place.split()),
            behave=behave,
            kind=kind,
            numbers=numbers,
            reported=reported,
        )
        for name, place, behave, reported in bugs
    ]


_DIFFERENT_END = "weights or ledger are not those"

BUGS = [
    *_bugs(
        "kills",
        "zero0",
        (7,),
        ("a resumed run starts the data from the beginning", f"{_ASSEMBLY}:_restore", restart_data, _DIFFERENT_END),
        (
            "ranks do not see that their launcher is gone",
            "dist_transformer.training.fault_tolerance.launcher_watch:LauncherWatch.gone",
            do_nothing,
            "to the end without a launcher",
        ),
        (
            "what a killed save left is not removed",
            f"dist_transformer.run.folder:remove_unfinished_saves {_WRITER}:remove_unfinished_saves",
            do_nothing,
            "temporary files were left",
        ),
    ),
    *_bugs(
        "slow_saves",
        "zero1",
        (1,),
        (
            "the pointer moves when rank 0 has written its part",
            f"{_WRITER}:CheckpointWriter._write_share",
            point_early,
            "is a link or not a folder",
        ),
        (
            "older checkpoints are removed before the new one is written",
            f"{_WRITER}:CheckpointWriter._write_share",
            prune_early,
            "is a link or not a folder",
        ),
        (
            "the manifest states the part of rank 0 alone",
            f"{_WRITER}:CheckpointWriter._commit",
            state_one_part,
            "is not in the manifest",
        ),
    ),
    *_bugs(
        "damage",
        "bit flip",
        (0, 1),
        ("files are compared by size, not by hash", f"{_READER}:_file_problem", compare_sizes, "not found"),
        ("the manifest's own hash is not compared", f"{_READER}:has_own_hash", accept, "manifest.json: not found"),
    ),
    *_bugs(
        "damage",
        "started by two ranks",
        (8,),
        (
            "damage that another rank than 0 finds is ignored",
            f"{_READER}:_agreed_problem",
            ask_rank_0,
            "another checkpoint was chosen",
        ),
    ),
    *_bugs(
        "disks",
        "EIO (injected)",
        (5,),
        ("an error of a write is swallowed", f"{_WRITER}:_write_tensors", swallow_errors, "status [0, 0]"),
        (
            "what a failed save wrote stays",
            f"{_WRITER}:CheckpointWriter._clean_up",
            do_nothing,
            "temporary files were left",
        ),
        (
            "ranks do not agree on an error of a disk",
            f"{_WRITER}:CheckpointWriter._agree",
            agree_on_nothing,
            "a traceback",
        ),
    ),
    *_bugs(
        "not_finite",
        "zero1 fp32",
        (0,),
        (
            "a skipped update counts as done",
            f"{_ENGINE}:Engine.end_micro_batch",
            count_as_applied,
            "status [0, 0]",
        ),
        (
            "the schedule advances at a skipped update",
            f"{_ENGINE}:Engine.end_micro_batch",
            count_skipped_updates,
            "the rate moved on",
        ),
    ),
    *_bugs(
        "not_finite",
        "zero0 fp32",
        (0,),
        (
            "Adam takes a gradient that is not finite",
            "dist_transformer.training.engine.plain_adam:PlainAdam.step",
            update_anyway,
            "weights or moments changed",
        ),
    ),
    *_bugs(
        "lost_ranks",
        "raises",
        (1,),
        (
            "a rank that fails does not tell the others",
            "dist_transformer.training.fault_tolerance.heartbeats:Heartbeats.first_failure",
            tell_nobody,
            "is not in",
        ),
    ),
    *_bugs(
        "lost_ranks",
        "stops for 30 s",
        (0,),
        (
            "beats are compared without waiting for the next ones",
            "dist_transformer.training.fault_tolerance.heartbeats:Heartbeats.who_is_behind",
            look_twice_at_once,
            "every rank is said to be silent",
        ),
    ),
    *_bugs(
        "lost_ranks",
        "never joins",
        (0,),
        (
            "missing ranks are counted from 1",
            "dist_transformer.runtime.rendezvous:as_ranges",
            count_from_one,
            "did not join' is not in",
        ),
    ),
    *_bugs(
        "ranks_apart",
        "other code",
        (0,),
        ("one hash of the code for all", "dist_transformer.runtime.agreement:hash_of_code", accept, "the run began"),
    ),
    *_bugs(
        "ranks_apart",
        "other data",
        (0,),
        ("ranks with other data agree", f"{_ASSEMBLY}:require_agreement", do_nothing, "the run began"),
    ),
    *_bugs(
        "ranks_apart",
        "another value",
        (5,),
        (
            "only the names of settings are compared",
            "dist_transformer.runtime.agreement:statement_of",
            state_names,
            "the run began",
        ),
    ),
    *_bugs(
        "elastic",
        "worlds",
        (1,),
        ("a resumed run reads its window of shards again", f"{_ASSEMBLY}:_restore", restart_window, "ledger"),
        (
            "the seed of dropout knows the rank",
            "dist_transformer.training.trainer:micro_batch_seed",
            seed_by_rank,
            "losses differ",
        ),
    ),
    *_bugs(
        "elastic",
        "stages, fp32",
        (2,),
        ("every rank of ZeRO-3 restores the first part", f"{_ENGINE}:_own_part", take_first_part, "losses differ"),
    ),
    *_bugs(
        "hostile",
        "names and pickles",
        (1,),
        (
            "what is no safetensors file is unpickled",
            "dist_transformer.base.tensor_file:open_tensors",
            unpickle,
            "the canary ran",
        ),
    ),
    *_bugs(
        "hostile",
        "names and pickles",
        (6,),
        (
            "a link is taken for a checkpoint",
            f"{_READER}:_stated_files",
            follow_link,
            "another checkpoint was chosen",
        ),
    ),
    *_bugs(
        "hostile",
        "names and pickles",
        (13,),
        (
            "names of shards may lead out of the folder",
            "dist_transformer.data.folder.reader:_inside",
            join,
            "status 0",
        ),
    ),
    *_bugs(
        "power_loss_disks",
        "ext4",
        (0,),
        ("nothing is flushed", _SYNC, do_nothing, "step 2 was promised"),
        ("content of files is not flushed", _SYNC, flush_names_alone, "ledger.jsonl ends before step 2"),
    ),
    *_bugs(
        "power_loss_disks",
        "XFS",
        (6,),
        ("names of files are not flushed", _SYNC, flush_data_alone, "the model is gone"),
    ),
]
