"""A real training is recorded, and states of the disk after a loss of power are resumed for real: DATA SCRATCH COUNT.

Prints a line of JSON: what was resumed at which step, and what did not end as the run to which nothing happened.
"""

import json
import random
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file

from dist_transformer.config.flags import parse_training
from dist_transformer.run.layout import checkpoints_of, step_of
from dist_transformer.run.verify import verify_run
from dist_transformer.runtime.process_group import process_group
from dist_transformer.runtime.world import World, read_world
from dist_transformer.training.assembly import assemble
from tests.disk_states import no_flushes, recording, states_after
from tests.jobs import SMALL

_STEPS = 6


def main() -> None:
    data, scratch, count = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
    world = read_world()
    with process_group(world, single=True) as device:
        train(data, scratch / "whole", _STEPS, world, device)
        disk = scratch / "disk"
        disk.mkdir()
        with recording(disk) as recorder:
            train(data, disk / "run", 2, world, device)
            recorder.promise(2)
            train(data, disk / "run", 4, world, device)
            recorder.promise(4)
        states = list(states_after(recorder.trace, random.Random(1)))
        resumed, problems = [], []
        with no_flushes():
            for number, state in enumerate(random.Random(2).sample(states, count)):
                root = scratch / f"state-{number}"
                root.mkdir()
                state.write_to(root)
                before = max((step_of(path.name) or 0 for path in checkpoints_of(root / "run")), default=0)
                train(data, root / "run", _STEPS, world, device)
                resumed.append(before)
                if before < max(state.promises, default=0):
                    problems.append(f"{root}: step {before} is the newest, {state.promises} were promised")
                problems += [f"{root}: {problem}" for problem in differences(root / "run", scratch / "whole")]
    print(json.dumps({"states": len(states), "resumed": resumed, "problems": problems}))


def train(data: str, run_dir: Path, steps: int, world: World, device: torch.device) -> None:
    flags = [*SMALL, "--validate-every", 0, "--save-every", 2, "--keep-checkpoints", 1, "--keep-weights", 2]
    words = [*flags, "--data", data, "--run-dir", run_dir, "--max-steps", steps]
    config, _ = parse_training([str(word) for word in words], prog="train")
    assert assemble(config, world, device, quiet=True).train()


def differences(run_dir: Path, whole: Path) -> list[str]:
    found = [f"{check.name}: {check.found}" for check in verify_run(run_dir) if not check.passed]
    if (run_dir / "ledger.jsonl").read_bytes() != (whole / "ledger.jsonl").read_bytes():
        found.append("another ledger")
    name = f"weights/step-{_STEPS:08d}.safetensors"
    own, expected = load_file(run_dir / name), load_file(whole / name)
    if not all(own[key].equal(expected[key]) for key in expected):
        found.append("other weights")
    return found


if __name__ == "__main__":
    main()
