"""CUDA graph of a micro-batch: its kernels are recorded once, and a later micro-batch starts them by one call.

A graph holds forward and backward pass of one shape, and the addition of the gradients to their sums. Communication and
update stay outside. What it computes is compared with the usual way before it is used.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from dist_transformer.base.errors import logger
from dist_transformer.config.settings import TrainConfig
from dist_transformer.cost.memory import ZeroSettings
from dist_transformer.cost.speed import graph_problem
from dist_transformer.model.loss import LossSums
from dist_transformer.model.packed import IGNORED, PackedBatch, PackedTokens, pack_side
from dist_transformer.model.transformer import Transformer
from dist_transformer.training.engine.gradient_sums import GradientSums

# Relative difference of losses and norms: above the rounding of sums in another order, far below that of another mask.
_TOLERANCE = 1e-4
_TRIALS = 3


class MicroBatchGraph:
    """The recorded computation of a micro-batch, with buffers for its input.

    Args:
        compute: runs forward and backward pass of a micro-batch, with the factor of its loss on the device.
        sums: the gradients' sums.
        like: a micro-batch on the device that has the shapes.
    """

    def __init__(
        self,
        compute: Callable[[PackedBatch, torch.Tensor], LossSums],
        sums: GradientSums,
        like: PackedBatch,
        *,
        vocabulary: int,
    ) -> None:
        self._compute, self._sums, self._vocabulary = compute, sums, vocabulary
        self._buffers = like.copied(torch.clone)
        self._factor = torch.ones((), device=like.labels_T.device)
        self._replay: Callable[[], LossSums]

    def prepare(self) -> str | None:
        """Record and check the graph; return what is wrong with it, or None."""
        try:
            self._sums.begin()
            self._replay = record(lambda: self._compute(self._buffers, self._factor))
            return self._difference()
        # torch documents no types of errors of a capture.
        except Exception as error:
            return f"{type(error).__name__}: {(str(error).strip() or 'no message').splitlines()[0]:.120}"
        finally:
            self._sums.forget()

    def filled(self, batch: PackedBatch) -> PackedBatch | None:
        """Copy a micro-batch into the buffers and return them as the micro-batch; None if it has another shape."""
        pairs = list(zip(_tensors(self._buffers), _tensors(batch), strict=True))
        if any(buffer.shape != tensor.shape for buffer, tensor in pairs) or _limits(batch) != _limits(self._buffers):
            return None
        for buffer, tensor in pairs:
            buffer.copy_(tensor, non_blocking=True)
        sides = (
            dataclasses.replace(own, lengths=side.lengths)
            for own, side in ((self._buffers.source, batch.source), (self._buffers.target, batch.target))
        )
        source, target = sides
        return dataclasses.replace(self._buffers, source=source, target=target)

    def holds(self, batch: PackedBatch) -> bool:
        """Return whether this is the micro-batch in the buffers."""
        return batch.labels_T is self._buffers.labels_T

    def run(self, factor: float) -> LossSums:
        """Compute what is in the buffers. The result is in memory that the next run overwrites."""
        self._sums.begin()
        self._factor.fill_(factor)
        return self._replay()

    def _difference(self) -> str | None:
        """Compare with the usual way: other lengths, tokens and masks; sums of two passes; no token at all."""
        for number in range(_TRIALS):
            trial = self.filled(_trial(self._buffers, number, self._vocabulary))
            assert trial is not None
            usual = self._measured(lambda: self._compute(trial, self._factor), number)  # noqa: B023
            replayed = self._measured(self._replay, number)
            for name, value in usual.items():
                # Also if one of them is not a number.
                if not abs(replayed[name] - value) <= _TOLERANCE * abs(value):
                    return f"{name} is {replayed[name]:.6g} and not {value:.6g}"
        return None

    def _measured(self, work: Callable[[], LossSums], number: int) -> dict[str, float]:
        """Return losses and norms of gradients after the same tokens twice, with two masks."""
        self._sums.forget()
        for factor in (1.0, 0.5):
            self._sums.begin()
            self._factor.fill_(factor)
            torch.manual_seed(2 * number + round(factor))
            sums = work()
        found = {"the loss": sums.loss.detach(), "the likelihood": sums.nll}
        found |= {f"the gradient of {name}": total.norm() for name, total in self._sums.tensors().items()}
        return dict(zip(found, torch.stack(list(found.values())).tolist(), strict=True))


def problem_of(config: TrainConfig, zero: ZeroSettings, model: Transformer) -> str | None:
    """Return why a run has no graphs, in a few words; None if it can have them."""
    if model.device.type != "cuda":
        return "no GPU"
    # The work of the host in a micro-batch must not depend on its sentences.
    return graph_problem(config, zero) if model.has_fixed_shapes else "attention has no fixed shapes"


def make_graph(graph: MicroBatchGraph) -> MicroBatchGraph | None:
    """Prepare a graph; report in one line if it cannot be used."""
    problem = graph.prepare()
    if problem is None:
        # Memory of the usual way, which a graph cannot use.
        torch.cuda.empty_cache()
        return graph
    logger.warning(f"note: no CUDA graphs are used ({problem}); training continues without")
    return None


def record(work: Callable[[], Any]) -> Callable[[], Any]:
    """Record what runs on the GPU; return a function that runs it again and returns the same tensors."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        # Libraries allocate, and compile, in their first calls.
        for _ in range(2):
            work()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    # Other threads may wait for events of theirs meanwhile.
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        result = work()

    def replay() -> Any:
        graph.replay()
        return result

    return replay


def _tensors(batch: PackedBatch) -> list[torch.Tensor]:
    sides = (batch.source, batch.target)
    tensors = [*(x for side in sides for x in (side.tokens_T, side.positions_T, side.offsets_N)), batch.labels_T]
    return tensors if batch.links_T is None else [*tensors, batch.links_T]


def _limits(batch: PackedBatch) -> tuple[int, int]:
    return batch.source.max_length, batch.target.max_length


def _trial(like: PackedBatch, seed: int, vocabulary: int) -> PackedBatch:
    """Draw a micro-batch of these shapes; the last one is empty."""
    rng, sides = np.random.default_rng(seed), (like.source, like.target)
    count = min(len(side.tokens_T) // side.max_length for side in sides) if seed < _TRIALS - 1 else 0
    source, target = (_trial_side(side, rng, count, vocabulary) for side in sides)
    labels = np.full(len(target.tokens_T), IGNORED)
    labels[: target.lengths.sum()] = rng.integers(4, vocabulary, target.lengths.sum())
    links_T = None if like.links_T is None else torch.from_numpy(np.where(labels == IGNORED, IGNORED, 0))
    return PackedBatch(source=source, target=target, labels_T=torch.from_numpy(labels), links_T=links_T)


def _trial_side(side: PackedTokens, rng: np.random.Generator, count: int, vocabulary: int) -> PackedTokens:
    lengths = rng.integers(1, side.max_length + 1, count)
    return pack_side(
        rng.integers(4, vocabulary, lengths.sum()),
        lengths,
        size=len(side.tokens_T),
        offset_count=len(side.offsets_N),
        max_length=side.max_length,
    )
