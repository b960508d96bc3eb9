"""Kernels of a training step on a GPU, each alone: milliseconds, and operations or bytes per second.

Sizes are those of a preset on 25k tokens, in sentences of two mean lengths. Inputs are random and rotate among several
sets, so that caches do not hold them.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch

from benchmarks.measure import Measured, Part, columns, say, spread
from dist_transformer.base.errors import UserError
from dist_transformer.config.presets import PRESETS
from dist_transformer.config.settings import ModelConfig
from dist_transformer.model.loss import smoothed_cross_entropy
from dist_transformer.runtime.process_group import process_group
from dist_transformer.runtime.world import World

_SETS = 3
_MEAN_LENGTHS = (13, 29)
_REPEATS = 10


@dataclass(frozen=True, kw_only=True, slots=True)
class KernelBenchmark(Part):
    """The kernels of a training step on a GPU, each alone."""

    preset: str = "big"
    """Model."""
    vocab_size: int = 37_000
    """Size of the vocabulary."""
    tokens: int = 25_088
    """Tokens at once."""

    def measure(self) -> Measured:
        with process_group(World(), single=True) as device:
            figures = {"preset": self.preset, **run_kernel_benchmark(self, device)}
        return Measured(
            what="the kernels of a training step, each alone, forward and backward; medians",
            figures=figures,
            table=kernel_table(figures),
            seeds=[1],
        )


def run_kernel_benchmark(settings: KernelBenchmark, device: torch.device) -> dict[str, Any]:
    if device.type != "cuda":
        raise UserError("kernels cannot be measured here, because there is no GPU: run it on a machine with one")
    torch.manual_seed(1)
    config = dataclasses.replace(PRESETS[settings.preset].model, vocab_size=settings.vocab_size)
    found: dict[str, dict[str, Any]] = {}
    for name, make in _works(config, settings.tokens, device).items():
        found[name] = _time(make)
        say(f"{name}: {found[name]['milliseconds']['median']:.3f} ms")
        torch.cuda.empty_cache()
    return {"unit": "milliseconds", "tokens": settings.tokens, "width": config.width, "kernels": found}


@dataclass(frozen=True, slots=True)
class Work:
    run: Callable[[], object]
    operations: float = 0.0
    bytes_moved: float = 0.0
    """Lower bound: each input read once, each output written once."""


def _works(config: ModelConfig, tokens: int, device: torch.device) -> dict[str, Callable[[], Work]]:
    width, ffn, vocabulary = config.width, config.ffn_width, config.vocab_size
    works: dict[str, Callable[[], Work]] = {
        "copy of 1 GiB": lambda: _copy(device),
        "products of qkv": lambda: _product(tokens, width, 3 * width, device),
        "products of output": lambda: _product(tokens, width, width, device),
        "products of feed-forward, inner": lambda: _product(tokens, width, ffn, device),
        "products of feed-forward, outer": lambda: _product(tokens, ffn, width, device),
        "product of logits": lambda: _product(tokens, width, vocabulary, device),
        "loss, eager": lambda: _loss(config, tokens, device, compiled=False),
        "loss, compiled": lambda: _loss(config, tokens, device, compiled=True),
    }
    for mean in _MEAN_LENGTHS:
        for kernel in ("packed", "varlen"):
            works[f"attention ({kernel}), {mean} tokens per sentence"] = functools.partial(
                _attention, config, tokens, mean, device, kernel=kernel
            )
    return works


def _time(make: Callable[[], Work]) -> dict[str, Any]:
    """Time a kernel, with its backward pass if it has one; the median over turns through the sets of inputs."""
    works = [make() for _ in range(_SETS)]
    for work in works:
        work.run()
    times = []
    for work in itertools.islice(itertools.cycle(works), _REPEATS):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        start.record()
        for _ in range(5):
            work.run()
        stop.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(stop) / 5)
    found: dict[str, Any] = {"milliseconds": spread(times)}
    seconds = found["milliseconds"]["median"] / 1e3
    if works[0].operations:
        found["tera_operations_per_second"] = works[0].operations / seconds / 1e12
    if works[0].bytes_moved:
        found["terabytes_per_second"] = works[0].bytes_moved / seconds / 1e12
    return found


def _normal(*shape: int, device: torch.device) -> torch.Tensor:
    return torch.randn(*shape, device=device, dtype=torch.bfloat16)


def _copy(device: torch.device) -> Work:
    source = torch.empty(2**30, dtype=torch.uint8, device=device).random_()
    target = torch.empty_like(source)
    return Work(lambda: target.copy_(source), bytes_moved=2 * 2**30)


def _product(rows: int, inner: int, columns: int, device: torch.device) -> Work:
    """Make x W^T and the two products of its backward pass."""
    x, w, g = (_normal(*shape, device=device) for shape in ((rows, inner), (columns, inner), (rows, columns)))
    return Work(lambda: (x @ w.t(), g @ w, g.t() @ x), operations=6.0 * rows * inner * columns)


def _loss(config: ModelConfig, tokens: int, device: torch.device, *, compiled: bool) -> Work:
    hidden, weight = (_normal(rows, config.width, device=device) for rows in (tokens, config.vocab_size))
    labels = torch.randint(config.vocab_size, (tokens,), device=device)
    hidden.requires_grad_()
    weight = (0.02 * weight).requires_grad_()

    def run() -> None:
        torch.autograd.grad(
            smoothed_cross_entropy(hidden, weight, labels, 0.1, compiled=compiled).loss, (hidden, weight)
        )

    return Work(run, operations=6.0 * tokens * config.width * config.vocab_size)


def _attention(config: ModelConfig, tokens: int, mean: int, device: torch.device, *, kernel: str) -> Work:
    """Make decoder self-attention as the model calls it: from a projection's output to the gradient of that output."""
    from torch.nn.attention.varlen import varlen_attn

    from dist_transformer.model.packed_attention import self_attention

    lengths = sentence_lengths(tokens, mean)
    offsets = torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32, device=device)
    heads, width, longest = config.heads, config.attention_head_width, int(max(lengths))
    qkv = _normal(tokens, 3, heads, width, device=device).requires_grad_()
    gradient = _normal(tokens, heads, width, device=device)

    def run() -> None:
        if kernel == "packed":
            mixed = self_attention(qkv, offsets, causal=True)
        else:
            q, k, v = qkv.unbind(1)
            mixed = cast(torch.Tensor, varlen_attn(q, k, v, offsets, offsets, longest, longest, window_size=(-1, 0)))
        torch.autograd.grad(mixed, qkv, gradient)

    squares = 0.5 * float(sum(length**2 for length in lengths))
    # Two products forward, five backward; four tensors forward, eight backward.
    return Work(run, operations=14.0 * squares * heads * width, bytes_moved=24.0 * tokens * heads * width)


def sentence_lengths(tokens: int, mean: int) -> Sequence[int]:
    """Draw lengths of sentences that together have `tokens` tokens; they are log-normal, as in real text."""
    random = np.random.default_rng(1)
    drawn = np.clip(np.exp(random.normal(np.log(mean) - 0.18, 0.6, size=2 * tokens // mean)), 1, 256).astype(int)
    ends = np.cumsum(drawn)
    count = int(np.searchsorted(ends, tokens))
    kept = drawn[:count].tolist()
    return [*kept, tokens - sum(kept)] if sum(kept) < tokens else kept


def kernel_table(figures: dict[str, Any]) -> str:
    """Format the figures in lines of at most 80 characters."""
    rows = [("", "ms", "TFLOP/s", "TB/s")]
    for name, kernel in figures["kernels"].items():
        operations, moved = kernel.get("tera_operations_per_second"), kernel.get("terabytes_per_second")
        milliseconds = f"{kernel['milliseconds']['median']:.3f}"
        rows.append((name, milliseconds, f"{operations:.0f}" if operations else "", f"{moved:.2f}" if moved else ""))
    return "\n".join(columns(rows))
