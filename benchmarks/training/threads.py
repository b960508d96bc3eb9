"""Training on a CPU with one thread, with all threads that spin while they wait, and with all threads that sleep.

python -m benchmarks.training.threads tiny --tokens 1024 --rounds 3 --seconds 3 --busy 2

Each measure is a process of its own, because OpenMP reads its variables once. The ways take turns, so that other work
slows all of them down. Prints the target tokens per second of wall time of each round as JSON.
"""

import argparse
import dataclasses
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.measure import measure_apart
from benchmarks.training.contenders import PlainDriver
from benchmarks.training.random_packs import random_batch
from dist_transformer.base.errors import exit_on_user_error
from dist_transformer.config.presets import PRESETS
from dist_transformer.config.settings import BatchConfig, TrainConfig
from dist_transformer.model.transformer import Transformer
from dist_transformer.runtime.process_group import process_group
from dist_transformer.runtime.world import World


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("preset", choices=PRESETS)
    parser.add_argument("--tokens", type=int, required=True, metavar="N", help="target tokens of a micro-batch")
    parser.add_argument("--rounds", type=int, default=3, metavar="N")
    parser.add_argument("--seconds", type=float, default=3.0, metavar="S", help="seconds of a way in a round")
    parser.add_argument("--busy", type=int, default=0, metavar="N", help="busy loops next to the training")
    arguments = parser.parse_args()
    # Otherwise threads of OpenMP spin for a while.
    os.environ.pop("OMP_WAIT_POLICY", None)
    cores = str(len(os.sched_getaffinity(0)))
    ways = {
        "one": {"OMP_NUM_THREADS": "1"},
        "spinning": {"OMP_NUM_THREADS": cores},
        "passive": {"OMP_NUM_THREADS": cores, "OMP_WAIT_POLICY": "PASSIVE"},
    }
    rates: dict[str, list[float]] = {name: [] for name in ways}
    loops = [subprocess.Popen([sys.executable, "-c", "while 1: pass"]) for _ in range(arguments.busy)]
    try:
        for _ in range(arguments.rounds):
            for name, variables in ways.items():
                failure = f"training with {name} threads failed"
                found = measure_apart(train, vars(arguments), failure=failure, remedy="see above", variables=variables)
                rates[name].append(found["rate"])
    finally:
        for loop in loops:
            loop.kill()
    print(json.dumps(rates))


def train(request: dict[str, Any]) -> dict[str, float]:
    """Train for some seconds after a first step, and return the target tokens per second."""
    model = dataclasses.replace(PRESETS[request["preset"]].model, vocab_size=8000)
    batch = BatchConfig(max_target_tokens=request["tokens"], packs_per_step=1)
    config = TrainConfig.of(data=("none",), run_dir=Path("unused"), model=model, batch=batch, precision="fp32")
    words = random_batch(config, 1)
    tokens = int(words.target.lengths.sum())
    with process_group(World(), device_name="cpu"):
        driver = PlainDriver(Transformer(model), config, World())
        driver.module.train()

        def step() -> None:
            driver.forward_backward(words, step_tokens=tokens)
            driver.end_micro_batch()

        step()
        started, steps, elapsed = time.perf_counter(), 0, 0.0
        while elapsed < request["seconds"]:
            step()
            steps, elapsed = steps + 1, time.perf_counter() - started
    return {"rate": steps * tokens / elapsed}


if __name__ == "__main__":
    exit_on_user_error(main)
