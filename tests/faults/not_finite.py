"""Trainings in which one rank computes losses that are not numbers, from some step on."""

from typing import Any

from dist_transformer.run.checkpoint.reader import CheckpointReader
from dist_transformer.run.layout import step_name
from tests.faults.campaign import STAGES, Campaign, Case, Found, Lab, clear_errors, failing

_ABORTS_AT = 3


def run(case: Case, lab: Lab) -> Found:
    """The kind is ZeRO stage and precision."""
    stage, precision = case.kind.split()
    generator, run_dir = case.generator(), lab.folder / "run"
    rank, first = generator.randrange(2), generator.randint(2, 6)
    flags = ("--precision", precision, "--save-every", 1, "--max-steps", 20, "--max-skipped-steps", _ABORTS_AT)
    job = lab.job(run_dir, *flags, "--keep-checkpoints", 99, stage=stage, fault=f"{rank}:{first}:nan").start_ranks()
    statuses, errors = job.statuses(), clear_errors(job.output)
    last = first + _ABORTS_AT - 1
    skipped = [f"step {step}: loss or gradient is not finite" in job.output for step in range(first, last + 1)]
    before, after = (CheckpointReader(run_dir / "checkpoints" / step_name(step)) for step in (first - 1, last - 1))
    checks: dict[str, object] = {
        f"status {statuses}": 0 not in statuses,
        f"skipped {skipped}": all(skipped),
        f"the output names no rank {rank}": f"is not finite (loss of rank {rank} in pack" in job.output,
        f"the errors are {errors}": bool(errors)
        and f"{_ABORTS_AT} steps in a row" in errors[0]
        and f"step {last}" in errors[0],
        "weights or moments changed": same_tensors(before, after),
        "the rate moved on": before.state["updates"] == after.state["updates"] == first - 1,
    }
    return Found(problems=failing(checks), counts={"skipped_steps": len(skipped)})


def same_tensors(before: CheckpointReader, after: CheckpointReader) -> bool:
    states: list[list[Any]] = [
        [reader.parameter(name) for name in before.parameter_names()] for reader in (before, after)
    ]
    return all(
        old.weight.equal(new.weight) and all(old.moments[key].equal(new.moments[key]) for key in old.moments)
        for old, new in zip(*states, strict=True)
    )


CAMPAIGN = Campaign(
    name="not_finite",
    must_hold="all ranks skip the step; weights, moments and the schedule's step stay; at the limit all ranks end",
    full={f"{stage} {precision}": 2 for stage in STAGES for precision in ("bf16", "fp32")},
    run=run,
)
