"""Runner of one stage of a preparation: many tasks on the processes of all ranks, each done once.

A task that an interrupted preparation has finished is not repeated, because its result is in the work folder. Tasks are
assigned to ranks in turn, and each process of a rank takes the next one when it is free.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from tqdm import tqdm

from dist_transformer.data.prepare.mpi_ranks import MpiRanks
from dist_transformer.data.prepare.work_dir import Work
from dist_transformer.data.prepare.worker_pool import Progress, Task, WorkerPool


class NamedTask(Task, Protocol):
    @property
    def name(self) -> str:
        """Unique name of the task's result in the work folder."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Kept:
    """Task whose result, which must be plain JSON, is written to the work folder."""

    work: Work
    task: NamedTask

    def run(self, progress: Progress) -> Any:
        result = self.task.run(progress)
        self.work.keep_result(self.task.name, result)
        return result


@dataclass(frozen=True, kw_only=True, slots=True)
class TaskRunner:
    work: Work
    pool: WorkerPool
    ranks: MpiRanks
    show: bool
    """Whether to show a progress bar on standard error."""

    def run(
        self,
        label: str,
        tasks: Iterable[NamedTask],
        collect: Callable[[int, Any], None],
        *,
        unit: str = "pair",
        sizes: Sequence[int] | None = None,
    ) -> None:
        """Do this rank's share of the tasks.

        Collective: every rank must call it.

        Args:
            collect: called with (index, result) of each task of this rank, in any order.
            unit: unit of the progress that tasks report.
            sizes: number of these units per task, if known.
        """
        mine = [(index, task) for index, task in enumerate(tasks) if index % self.ranks.size == self.ranks.rank]
        self.ranks.together(lambda: self._run(label, mine, collect, unit, sizes))

    def _run(
        self,
        label: str,
        mine: list[tuple[int, NamedTask]],
        collect: Callable[[int, Any], None],
        unit: str,
        sizes: Sequence[int] | None,
    ) -> None:
        left = []
        for index, task in mine:
            result = self.work.result(task.name)
            if result is None:
                left.append((index, _Kept(work=self.work, task=task)))
            else:
                collect(index, result)
        total = sum(sizes[index] for index, _ in mine) if sizes is not None else None
        done = total - sum(sizes[index] for index, _ in left) if sizes is not None and total is not None else 0
        with tqdm(
            desc=label,
            total=total,
            initial=done,
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
