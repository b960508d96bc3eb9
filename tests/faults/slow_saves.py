"""A rank that takes six seconds in each save, while another process reads what the pointer names."""

from dist_transformer.run.checkpoint.reader import checkpoint_problem
from tests.faults.campaign import STAGES, Campaign, Case, Found, Lab, failing

_SECONDS, _SAVES = 6, 3


def run(case: Case, lab: Lab) -> Found:
    """The kind is the ZeRO stage."""
    rank = case.number % 2
    run_dir, named, problems, looks = lab.folder / "run", set[str](), set[str](), 0
    # Each save removes the checkpoint before it.
    flags = ("--max-steps", 2 * _SAVES, "--save-every", 2, "--keep-checkpoints", 1)
    job = lab.job(run_dir, *flags, stage=case.kind, fault=f"{rank}:{_SECONDS}:slow").start_ranks()
    pointer = run_dir / "checkpoints" / "latest"
    while job.processes[0].poll() is None:
        if pointer.exists():
            name = pointer.read_text().strip()
            problem, looks = checkpoint_problem(pointer.parent / name), looks + 1
            named.add(name)
            # The pointer may have moved during the look, and the checkpoint that it named may then be gone.
            if problem and pointer.read_text().strip() == name:
                problems.add(problem)
    statuses = job.statuses()
    wanted = {f"step-{2 * save:08d}" for save in range(1, _SAVES + 1)}
    checks = failing(
        {f"status {statuses}": statuses == [0, 0], f"the pointer named {named}": wanted - named <= {max(wanted)}}
    )
    return Found(problems=(*sorted(problems), *checks), counts={"saves": _SAVES, "looks": looks})


CAMPAIGN = Campaign(
    name="slow_saves",
    must_hold="the pointer never names an incomplete checkpoint",
    full=dict.fromkeys(STAGES, 2),
    run=run,
)
