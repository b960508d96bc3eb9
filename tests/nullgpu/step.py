"""Steps of the real engine on the null GPU: launches, waits, memory, graphs. Prints JSON.

python step.py '{"preset": "big", "packs": 64, "packs_per_micro_batch": 64, "compile": true, "stage": 1}'
"""

import collections
import dataclasses
import json
import sys
import traceback
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dist_transformer.config.presets import PRESETS
from dist_transformer.config.settings import TrainConfig
from dist_transformer.model.packed import IGNORED, PackedBatch, pack_side
from dist_transformer.model.transformer import Transformer
from dist_transformer.runtime.process_group import process_group
from dist_transformer.runtime.world import World
from dist_transformer.training.engine import ds_config
from dist_transformer.training.engine.engine import Engine
from tests.nullgpu.counts import Counts

_VOCABULARY = 37_000
_LONGEST = 100


def main(request: dict[str, Any]) -> dict[str, Any]:
    config = _config(request)
    stage = request["stage"]
    with process_group(World(), single=True) as device:
        torch.manual_seed(0)
        model = Transformer(config.model).to(device)
        zero = {**ds_config.DEFAULT_ZERO, "stage": stage} if stage else {"stage": 0}
        engine = Engine(model, config, {"zero_optimization": zero}, world_size=1)
        _make_finite(engine)
        batches = [_batch(config, seed) for seed in range(3)]
        engine.module.train()
        count = config.batch.accumulation_steps(1)
        work = [batches[i % len(batches)] for i in range(count)]
        for _ in range(2):
            _step(engine, work)
        torch.cuda.reset_peak_memory_stats()
        counts = Counts()
        counts.reset()
        _step(engine, work)
        calls = counts.read()
        kernels = {name.removeprefix("kernel:"): n for name, n in calls.items() if name.startswith("kernel:")}
        graphs = _graphs()
        found = {
            **request,
            "launches": sum(kernels.values()),
            "most_launched": dict(sorted(kernels.items(), key=lambda item: -item[1])[:12]),
            "waits": _waits(lambda: _step(engine, work)),
            "other_calls": {name: n for name, n in calls.items() if not name.startswith("kernel:")},
            "peak_bytes": torch.cuda.max_memory_allocated(),
            "graphs": graphs,
        }
        for seed in range(3, 3 + request.get("more_packs", 0)):
            _step(engine, [_batch(config, seed)] * count)
        from torch._dynamo.utils import counters

        return {**found, "graphs_later": _graphs() - graphs, "breaks": sum(counters["graph_break"].values())}


def _config(request: dict[str, Any]) -> TrainConfig:
    config = PRESETS[request["preset"]]
    return dataclasses.replace(
        config,
        compile=request["compile"],
        model=dataclasses.replace(config.model, vocab_size=_VOCABULARY),
        batch=dataclasses.replace(
            config.batch,
            packs_per_step=request["packs"],
            packs_per_micro_batch=request["packs_per_micro_batch"],
        ),
    )


def _batch(config: TrainConfig, seed: int) -> PackedBatch:
    """Random sentences of 5 to 54 tokens that fill 97% of a micro-batch."""
    size = config.batch.max_target_tokens * config.batch.packs_per_micro_batch
    rng = np.random.default_rng(seed)
    lengths = rng.integers(5, 55, size)
    lengths = lengths[: int(np.searchsorted(np.cumsum(lengths), int(size * 0.97)))]
    total = int(lengths.sum())
    ids, labels = rng.integers(4, _VOCABULARY, total), np.full(size, IGNORED)
    labels[:total] = rng.integers(4, _VOCABULARY, total)
    sides = [pack_side(ids, lengths, size=size, offset_count=size // 8 + 40, max_length=_LONGEST) for _ in range(2)]
    return PackedBatch(source=sides[0], target=sides[1], labels_T=torch.from_numpy(labels)).pin_memory()


def _step(engine: Engine, batches: list[PackedBatch]) -> None:
    for batch in batches:
        torch.manual_seed(7)
        engine.forward_backward(batch.to(engine.device), step_tokens=25_000)
        engine.end_micro_batch()


def _make_finite(engine: Engine) -> None:
    """The null GPU computes nothing, so that a norm may be anything: it is 1."""
    if engine.stage:
        engine.ds.optimizer.scaled_global_norm = lambda *_, **__: torch.tensor(1.0)


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
    print(json.dumps(main(json.loads(sys.argv[1]))))
