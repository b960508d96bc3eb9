"""Runner of one stage of a preparation: many tasks on the processes of all ranks, each done once.

A task that an interrupted preparation has finished is not repeated, because its result is in the work folder. Tasks are
assigned to ranks in turn, and each process of a rank takes the next one when it is free.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from tqdm import tqdm

from dist_transformer.data.prepare.mpi_ranks import MpiRanks
from dist_transformer.data.prepare.work_dir import Work
from dist_transformer.data.prepare.worker_pool import Progress, Task, WorkerPool

T = TypeVar("T")


def _run_and_keep(work: Work, name: str, task: Task, progress: Progress) -> Any:
    result = task(progress)
    work.keep_result(name, result)
    return result


@dataclass(frozen=True, kw_only=True, slots=True)
class TaskRunner:
    work: Work
    pool: WorkerPool
    ranks: MpiRanks
    show: bool
    """Whether to show a progress bar on standard error."""

    def results(
        self, label: str, tasks: Mapping[str, Task], *, unit: str = "pair", sizes: Sequence[int] | None = None
    ) -> list[Any]:
        """Do all tasks; return their results in order.

        Collective: every rank must call it.

        Args:
            tasks: by the names under which their results, plain JSON, are kept in the work folder.
            unit: unit of the progress that tasks report.
            sizes: number of these units per task, if known.
        """
        found: dict[int, Any] = {}
        self._share(label, tasks, found.__setitem__, unit, sizes)
        for others in self.ranks.gather(list(found.items())):
            found.update(others)
        return [found[index] for index in range(len(tasks))]

    def merged(
        self, label: str, tasks: Mapping[str, Task], merge: Callable[[T, T], T], nothing: T, *, sizes: Sequence[int]
    ) -> T:
        """Do all tasks; return what their results are together. Memory does not grow with their number.

        Collective: every rank must call it.

        Args:
            merge: joins two results, in any order.
            nothing: result of no task.
            sizes: pairs of each task.
        """
        total = nothing

        def collect(_: int, result: Any) -> None:
            nonlocal total
            total = merge(total, result)

        self._share(label, tasks, collect, "pair", sizes)
        return functools.reduce(merge, self.ranks.gather(total), nothing)

    def _share(
        self,
        label: str,
        tasks: Mapping[str, Task],
        collect: Callable[[int, Any], None],
        unit: str,
        sizes: Sequence[int] | None,
    ) -> None:
        """Do this rank's share of the tasks; `collect` is called with (index, result) of each, in any order."""
        mine = [(index, task) for index, task in enumerate(tasks.items()) if index % self.ranks.size == self.ranks.rank]
        self.ranks.together(lambda: self._run(label, mine, collect, unit, sizes))

    def _run(
        self,
        label: str,
        mine: list[tuple[int, tuple[str, Task]]],
        collect: Callable[[int, Any], None],
        unit: str,
        sizes: Sequence[int] | None,
    ) -> None:
        left = []
        for index, (name, task) in mine:
            result = self.work.result(name)
            if result is None:
                left.append((index, functools.partial(_run_and_keep, self.work, name, task)))
            else:
                collect(index, result)
        total, todo = (sum(sizes[index] for index, _ in some) if sizes else 0 for some in (mine, left))
        with tqdm(
            desc=label,
            total=total if sizes else None,
            initial=total - todo,
            unit=f" {unit}s",
            unit_scale=True,
            dynamic_ncols=True,
            leave=False,
            disable=not self.show,
        ) as bar:

            def progress(count: int) -> None:
                bar.update(count)
                self.ranks.poll()

            for position, result in self.pool.run([task for _, task in left], progress, self.ranks.poll):
                collect(left[position][0], result)
