"""Steps of the real engine on the null GPU: launches, waits, memory, graphs. Prints a line of JSON for each request.

python step.py '{"preset": "big", "packs": 64, "packs_per_micro_batch": 64, "compile": true, "stage": 1}' …

Packs are those of a rank: a launcher may start several.
"""

import collections
import dataclasses
import gc
import json
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.training.random_packs import make_engine, random_batch, random_config, train_step
from dist_transformer.runtime.process_group import process_group
from dist_transformer.runtime.world import read_world
from dist_transformer.training.engine.deepspeed_engine import Engine
from tests.nullgpu.counts import Counts
from tests.nullgpu.train import leave_out_looks

_TIMED = 5


def main() -> None:
    world = read_world()
    leave_out_looks()
    with process_group(world, single=True) as device:
        for text in sys.argv[1:]:
            found = measure(json.loads(text), device, ranks=world.size)
            if world.is_main:
                print(json.dumps(found), flush=True)
            gc.collect()


def measure(request: dict[str, Any], device: torch.device, *, ranks: int) -> dict[str, Any]:
    config = random_config(
        request["preset"],
        packs=ranks * request["packs"],
        at_once=request["packs_per_micro_batch"],
        compile=request["compile"],
    )
    optimizer = dataclasses.replace(config.optimizer, kind=request.get("optimizer", "adam"))
    config = config.changed(optimizer=optimizer)
    graph = request.get("graph", False)
    if graph:
        from dist_transformer.training.engine.graphs import MicroBatchGraph

        config = config.changed(cuda_graphs="yes")
        # Nothing is computed, so that there is nothing to compare.
        MicroBatchGraph._difference = lambda _: None  # type: ignore[method-assign]
    engine = make_engine(config, device, stage=request["stage"])
    _make_finite(engine)
    batches = [random_batch(config, seed) for seed in range(3)]
    count = config.batch.accumulation_steps(ranks)
    work = [batches[i % len(batches)] for i in range(count)]
    for _ in range(2):
        train_step(engine, work, graph=graph)
    torch.cuda.reset_peak_memory_stats()
    counts = Counts()
    counts.reset()
    train_step(engine, work, graph=graph)
    calls = counts.read()
    kernels = {name.removeprefix("kernel:"): n for name, n in calls.items() if name.startswith("kernel:")}
    graphs = _graphs()
    found = {
        **request,
        "launches": sum(kernels.values()),
        "most_launched": dict(sorted(kernels.items(), key=lambda item: -item[1])[:12]),
        "waits": _waits(lambda: train_step(engine, work, graph=graph)),
        "other_calls": {name: n for name, n in calls.items() if not name.startswith("kernel:")},
        "peak_bytes": torch.cuda.max_memory_allocated(),
        "graphs": graphs,
        "host_milliseconds": 1_000 * _host_seconds(lambda: train_step(engine, work, graph=graph)),
    }
    for seed in range(3, 3 + request.get("more_packs", 0)):
        train_step(engine, [random_batch(config, seed)] * count, graph=graph)
    from torch._dynamo.utils import counters

    return {**found, "graphs_later": _graphs() - graphs, "breaks": sum(counters["graph_break"].values())}


def _host_seconds(work: Callable[[], object]) -> float:
    """Measure the CPU time of a step, the least of several: that of one thread, for the device takes no time."""
    times = []
    for _ in range(_TIMED):
        started = time.process_time()
        work()
        times.append(time.process_time() - started)
    return min(times)


def _make_finite(engine: Engine) -> None:
    """The null GPU computes nothing, so that a norm may be anything: it is 1."""
    if engine.stage:
        engine.ds.optimizer.scaled_global_norm = lambda *_, **__: torch.ones((), device=engine.device)


def _graphs() -> int:
    from torch._dynamo.utils import counters

    return int(counters["stats"]["unique_graphs"])


def _waits(work: Any) -> dict[str, int]:
    """Count where the host waits for the device: operations that torch knows to wait, and explicit waits."""
    seen: collections.Counter[str] = collections.Counter()

    def place() -> str:
        frames = [f for f in traceback.extract_stack() if "warnings" not in f.filename and f.filename != __file__]
        return "; ".join(f"{Path(f.filename).name}:{f.lineno}" for f in frames[-4:])

    def noted(message: Any, *_: Any) -> None:
        if "synchroniz" in str(message):
            seen[place()] += 1

    real = torch.cuda.synchronize, warnings.showwarning
    torch.cuda.synchronize = lambda *_, **__: seen.update([place()])  # type: ignore[assignment]
    torch.cuda.set_sync_debug_mode("warn")
    warnings.showwarning = noted
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("always")
            warnings.showwarning = noted
            work()
    finally:
        torch.cuda.set_sync_debug_mode("default")
        torch.cuda.synchronize, warnings.showwarning = real
    return dict(seen)


if __name__ == "__main__":
    main()
