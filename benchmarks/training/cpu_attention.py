"""Our attention kernel on a CPU, compared with groups of padded sentences: whole training steps, in turns.

A step is forward and backward of the model on one micro-batch of random tokens; the optimizer is left out.
"""

import dataclasses
from collections.abc import Callable
from typing import Any
from unittest import mock

import numpy as np
import torch

from benchmarks.kernels import sentence_lengths
from benchmarks.measure import Measure, now
from dist_transformer.base.errors import UserError
from dist_transformer.config.presets import PRESETS
from dist_transformer.model import cpu_kernels
from dist_transformer.model.packed import PackedBatch, pack_side
from dist_transformer.model.transformer import Transformer

KERNELS = ("packed", "groups")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class AttentionBenchmark:
    preset: str
    vocab_size: int
    tokens: int
    """Tokens per side of the micro-batch."""
    mean_length: int
    rounds: int
    precision: str = "fp32"


def run_attention_benchmark(settings: AttentionBenchmark, report: Callable[[str], None]) -> dict[str, Any]:
    torch.manual_seed(1)
    config = dataclasses.replace(PRESETS[settings.preset].model, vocab_size=settings.vocab_size)
    model = Transformer(config).train()
    if settings.precision == "bf16":
        model.cast_parameters(torch.bfloat16)
    if not cpu_kernels.takes(model.embedding.dtype):
        raise UserError("the kernel cannot be compiled here: install a C++ compiler (apt-get install g++)")
    batch = _batch(settings)
    seconds: dict[str, list[float]] = {kernel: [] for kernel in KERNELS}
    for number in range(settings.rounds + 1):
        for kernel in KERNELS:
            with mock.patch.object(Transformer, "_kernel", lambda *_, kernel=kernel: kernel):
                started = now()
                model.zero_grad()
                model(batch, 0.1).loss.backward()
                taken = now() - started
            # The first round, which is not counted, compiles and allocates.
            if number:
                seconds[kernel].append(taken)
        report(f"round {number} of {settings.rounds}")
    ratios = tuple(groups / packed for packed, groups in zip(*(seconds[kernel] for kernel in KERNELS), strict=True))
    return {
        "unit": "CPU seconds per step",
        **dataclasses.asdict(settings),
        "seconds": {kernel: Measure(tuple(values)).to_json() for kernel, values in seconds.items()},
        "times_as_fast": Measure(ratios).to_json(),
    }


def _batch(settings: AttentionBenchmark) -> PackedBatch:
    random, lengths = np.random.default_rng(1), np.array(sentence_lengths(settings.tokens, settings.mean_length))
    source, target, labels = (random.integers(4, settings.vocab_size, settings.tokens) for _ in range(3))
    sizes = {"size": settings.tokens, "offset_count": len(lengths) + 1, "max_length": int(lengths.max())}
    return PackedBatch(
        source=pack_side(source, lengths, **sizes),
        target=pack_side(target, lengths, **sizes),
        labels_T=torch.from_numpy(labels),
    )


def attention_table(figures: dict[str, Any]) -> str:
    lines = [f"{kernel:8} {figures['seconds'][kernel]['median']:8.3f} {figures['unit']}" for kernel in KERNELS]
    ratio = figures["times_as_fast"]
    return "\n".join([*lines, f"{ratio['median']:.2f} times as fast ({ratio['lowest']:.2f} to {ratio['highest']:.2f})"])
