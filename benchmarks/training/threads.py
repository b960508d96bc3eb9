"""Training on a CPU with one thread, with all threads that spin while they wait, and with all threads that sleep.

python -m benchmarks.training.threads tiny --tokens 1024 --rounds 3 --seconds 3 --busy 2

Each way is a process of its own, because OpenMP reads its variables once. They train in turns, so that other work slows
all of them down. Prints the target tokens per second of wall time of each round as JSON.
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

from benchmarks.training.contenders import PlainDriver
from benchmarks.training.cost_curve import make_batch
from dist_transformer.base.errors import exit_on_user_error
from dist_transformer.config.presets import PRESETS
from dist_transformer.config.settings import BatchConfig, TrainConfig
from dist_transformer.model.transformer import Transformer
from dist_transformer.runtime.process_group import process_group
from dist_transformer.runtime.world import World

_VOCABULARY, _SENTENCE_TOKENS = 8000, 32
_WAY = "DIST_TRANSFORMER_MEASURED_WAY"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("preset", choices=PRESETS)
    parser.add_argument("--tokens", type=int, required=True, metavar="N", help="target tokens of a micro-batch")
    parser.add_argument("--rounds", type=int, default=3, metavar="N")
    parser.add_argument("--seconds", type=float, default=3.0, metavar="S", help="seconds of a way in a round")
    parser.add_argument("--busy", type=int, default=0, metavar="N", help="busy loops beside the training")
    arguments = parser.parse_args()
    if _WAY in os.environ:
        _train(arguments.preset, arguments.tokens)
    else:
        print(json.dumps(measure(arguments)))


def measure(arguments: argparse.Namespace) -> dict[str, list[float]]:
    """Train in turns, and return the rates of each way."""
    cores = str(len(os.sched_getaffinity(0)))
    ways = {
        "one": {"OMP_NUM_THREADS": "1"},
        "spinning": {"OMP_NUM_THREADS": cores, "OMP_WAIT_POLICY": ""},
        "passive": {"OMP_NUM_THREADS": cores, "OMP_WAIT_POLICY": "PASSIVE"},
    }
    command = [sys.executable, "-m", __spec__.name, *sys.argv[1:]]
    trained: dict[str, subprocess.Popen[str]] = {}
    loops: list[subprocess.Popen[str]] = []
    rates: dict[str, list[float]] = {name: [] for name in ways}
    try:
        for name, variables in ways.items():
            environment = {key: value for key, value in {**os.environ, **variables, _WAY: name}.items() if value}
            trained[name] = subprocess.Popen(
                command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            )
            _answer_of(trained[name])
        loops = [subprocess.Popen([sys.executable, "-c", "while 1: pass"], text=True) for _ in range(arguments.busy)]
        for _ in range(arguments.rounds):
            for name, process in trained.items():
                assert process.stdin is not None
                print(arguments.seconds, file=process.stdin, flush=True)
                rates[name].append(_answer_of(process))
    finally:
        for process in (*loops, *trained.values()):
            process.kill()
            process.wait()
    return rates


def _answer_of(process: "subprocess.Popen[str]") -> float:
    assert process.stdout is not None
    return float(process.stdout.readline())


def _train(preset: str, tokens: int) -> None:
    """Train for as many seconds as each line of the standard input names, and print the rate."""
    batch = BatchConfig(max_target_tokens=tokens, packs_per_step=1)
    model = dataclasses.replace(PRESETS[preset].model, vocab_size=_VOCABULARY)
    settings: dict[str, Any] = {"model": model, "batch": batch, "precision": "fp32"}
    config = TrainConfig.of(data=("none",), run_dir=Path("unused"), **settings)
    with process_group(World(), device_name="cpu"):
        driver = PlainDriver(Transformer(model), config, World())
        driver.module.train()
        words = make_batch(tokens, _SENTENCE_TOKENS, vocabulary=_VOCABULARY)

        def step() -> None:
            driver.forward_backward(words, step_tokens=tokens)
            driver.end_micro_batch()

        step()
        print(0.0, flush=True)
        for line in sys.stdin:
            started, steps, elapsed = time.perf_counter(), 0, 0.0
            while elapsed < float(line):
                step()
                steps, elapsed = steps + 1, time.perf_counter() - started
            print(steps * tokens / elapsed, flush=True)


if __name__ == "__main__":
    exit_on_user_error(main)
