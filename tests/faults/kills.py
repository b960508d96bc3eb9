"""Kills a training again and again, at random moments, and compares what comes of it with the plan of the data.

    python -m tests.faults.kills --data DATA --kills 20 --json results/kills.json

Each start has 1 or 2 ranks, drawn anew, and ends by -9 to the launcher and all ranks at once, at a moment drawn
uniformly from its start on: while it loads, trains, or saves. Then one run goes to the end without a kill, and
`tools/verify_run.py --data` must find that every step trained on the planned sentences.
"""

import argparse
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from dist_transformer.benchmarks.measure import result_of, write_result
from dist_transformer.data.folder import DataFolder
from dist_transformer.launch import deepspeed_command
from dist_transformer.training.ledger import read_ledger

_ROOT = Path(__file__).resolve().parents[2]
_SMALL = (
    "--preset tiny --model.width 32 --model.ffn-width 64 --model.heads 2 --batch.max-target-tokens 512 "
    "--batch.packs-per-step 4 --batch.window-shards 1 --optimizer.warmup-steps 10 --validate-every 0 --log-every 1 "
    "--save-every 2 --keep-checkpoints 2 --keep-weights 2"
)


def main() -> None:
    arguments = parse_arguments()
    generator, started = random.Random(arguments.seed), time.monotonic()
    with tempfile.TemporaryDirectory() as scratch:
        run_dir = Path(scratch) / "run"
        kills = [kill_once(run_dir, arguments, generator) for _ in range(arguments.kills)]
        # At least an epoch's end must lie on the way: as many steps as the kills have left, and some more.
        done = kills[-1]["step"] if kills else 0
        subprocess.run(train_command(2, run_dir, arguments, done + 20), check=True, cwd=_ROOT, env=environment())
        verify = [sys.executable, "tools/verify_run.py", str(run_dir), "--data", str(arguments.data)]
        verified = subprocess.run(verify, cwd=_ROOT, check=False, capture_output=True, text=True)
        print(verified.stdout)
        steps = len(read_ledger(run_dir / "ledger.jsonl"))
    if arguments.json and verified.returncode == 0:
        figures = {"kills": kills, "count": len(kills), "steps": steps, "verification": verified.stdout.splitlines()}
        write_result(arguments.json, describe(figures, arguments, round(time.monotonic() - started, 1)))
    raise SystemExit(verified.returncode)


def describe(figures: dict[str, Any], arguments: argparse.Namespace, wall_seconds: float) -> dict[str, Any]:
    """The result in the layout of tools/results_table.py."""
    first, last = arguments.seconds
    return result_of(
        DataFolder.open(arguments.data).index,
        what="a training killed by -9 at random moments and resumed on 1 or 2 ranks, compared with its plan",
        command=f"python -m tests.faults.kills --data DATA --kills {arguments.kills} --seconds {first:g} {last:g} "
        f"--seed {arguments.seed}",
        seeds=[arguments.seed],
        wall_seconds=wall_seconds,
        figures=figures,
        row={
            "what": "SIGKILL at random moments, each time resumed on one rank or two, drawn anew",
            "steps": "{figures[steps]}",
            "result": "{figures[count]} kills; `tools/verify_run.py --data`: every step on the planned sentences",
        },
    )


def kill_once(run_dir: Path, arguments: argparse.Namespace, generator: random.Random) -> dict[str, Any]:
    """Start, wait, kill; what was reached by then."""
    ranks, seconds = generator.choice((1, 2)), generator.uniform(*arguments.seconds)
    command = train_command(ranks, run_dir, arguments, 10**6)
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            command, cwd=_ROOT, env=environment(), stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            status = process.wait(timeout=seconds)
            log.seek(0)
            raise RuntimeError(f"ended by itself, status {status}:\n{log.read().decode()}")
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    time.sleep(0.5)
    saved = sorted(path.name for path in (run_dir / "checkpoints").glob("step-*"))
    step = int(saved[-1].removeprefix("step-")) if saved else 0
    print(f"{ranks} rank(s), killed after {seconds:.1f} s; newest checkpoint: step {step}", flush=True)
    return {"ranks": ranks, "seconds": round(seconds, 1), "step": step}


def train_command(ranks: int, run_dir: Path, arguments: argparse.Namespace, max_steps: int) -> list[str]:
    words = [*deepspeed_command(ranks), "--module", "dist_transformer.train", *_SMALL.split()]
    words += ["--data", arguments.data, "--run-dir", run_dir, "--max-steps", max_steps]
    return [str(word) for word in words]


def environment() -> dict[str, str]:
    return {**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="data folder")
    parser.add_argument("--kills", type=int, default=20, metavar="N", help="how often (default: %(default)s)")
    parser.add_argument(
        "--seconds", nargs=2, type=float, default=(1.0, 40.0), metavar="S", help="from and to, after the start"
    )
    parser.add_argument("--seed", type=int, default=1, help="of moments and worlds (default: %(default)s)")
    parser.add_argument("--json", type=Path, help="also write the result here")
    return parser.parse_args()


if __name__ == "__main__":
    main()
