"""The graph of a micro-batch on a CPU, where a stand-in for the recording runs the same work again.

That a GPU can record it is tested on the null GPU, and what a GPU computes by the graph's own check.
"""

import dataclasses
from collections.abc import Callable, Iterator
from importlib import import_module
from typing import Any

import pytest
import torch

from benchmarks.training.random_packs import make_engine, random_batch, random_config
from dist_transformer.runtime.process_group import process_group
from dist_transformer.runtime.world import World
from dist_transformer.training.engine import graphs
from dist_transformer.training.engine.deepspeed_engine import Engine

CONFIG = random_config("tiny", packs=2, at_once=1, compile=False).changed(precision="bf16", max_steps=3)
CONFIG = dataclasses.replace(
    CONFIG,
    model=dataclasses.replace(CONFIG.model, width=32, heads=2, ffn_width=64, vocab_size=300, dropout=0.1),
    batch=dataclasses.replace(CONFIG.batch, max_target_tokens=384),
)


@pytest.fixture(scope="module")
def device() -> Iterator[torch.device]:
    # DeepSpeed keeps that of an earlier test.
    import_module("deepspeed.utils.groups")._WORLD_GROUP = None  # type: ignore[attr-defined]
    with process_group(World(), single=True) as device:
        yield device


@pytest.fixture(params=[0, 1])
def engine(request: pytest.FixtureRequest, device: torch.device) -> Callable[[], Engine]:
    return lambda: make_engine(CONFIG, device, stage=request.param)


def honest(graph: graphs.MicroBatchGraph, work: Callable[[], Any]) -> Callable[[], Any]:
    return work


def frozen_mask(graph: graphs.MicroBatchGraph, work: Callable[[], Any]) -> Callable[[], Any]:
    # That of the first trial's first pass.
    state = torch.manual_seed(1).get_state()

    def replay() -> Any:
        torch.set_rng_state(state)
        return work()

    return replay


def stale_buffer(graph: graphs.MicroBatchGraph, work: Callable[[], Any]) -> Callable[[], Any]:
    buffer = graph._buffers.source.tokens_T
    old = buffer.clone()

    def replay() -> Any:
        new = buffer.clone()
        buffer.copy_(old)
        result = work()
        buffer.copy_(new)
        return result

    return replay


def missed_sum(graph: graphs.MicroBatchGraph, work: Callable[[], Any]) -> Callable[[], Any]:
    total = graph._sums.tensors()["encoder.1.feed_forward.inner.weight"]

    def replay() -> Any:
        before = total.clone()
        result = work()
        total.copy_(before)
        return result

    return replay


def refused(graph: graphs.MicroBatchGraph, work: Callable[[], Any]) -> Callable[[], Any]:
    raise RuntimeError("operation not permitted when stream is capturing\nmore")


def graph_of(engine: Engine, way: Any, monkeypatch: pytest.MonkeyPatch) -> tuple[graphs.MicroBatchGraph, str | None]:
    """The engine's graph before it is used, and the problem that its check finds."""
    monkeypatch.setattr(graphs.MicroBatchGraph, "prepare", lambda _: None)
    graph = engine._make_graph(random_batch(CONFIG, 0).to(engine.device))
    assert graph is not None
    monkeypatch.undo()
    monkeypatch.setattr(graphs, "record", lambda work: way(graph, work))
    return graph, graph.prepare()


@pytest.mark.parametrize(
    ("way", "said"),
    [
        (honest, ""),
        (frozen_mask, "the "),
        (stale_buffer, "the loss is "),
        (missed_sum, "the gradient of encoder.1.feed_forward.inner.weight is "),
        (refused, "RuntimeError: operation not permitted when stream is capturing"),
    ],
)
def test_a_graph_that_computes_otherwise_is_found(
    way: Any, said: str, engine: Callable[[], Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, problem = graph_of(engine(), way, monkeypatch)
    assert (problem or "").startswith(said)
    assert bool(problem) == bool(said)
    assert "more" not in (problem or "")


def test_training_with_a_graph_is_training_without(
    engine: Callable[[], Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three steps of two micro-batches, of which one has another shape."""
    other = dataclasses.replace(CONFIG, batch=dataclasses.replace(CONFIG.batch, max_target_tokens=200))
    weights, losses, uses = [], [], []
    for way in (None, honest, refused):
        one = engine()
        if way is not None:
            graph, problem = graph_of(one, way, monkeypatch)
            one._graph = None if problem else graph
        seen = []
        for number in range(6):
            batch = one.on_device(random_batch(other if number == 2 else CONFIG, number))
            uses.append(one._graph is not None and one._graph.holds(batch))
            torch.manual_seed(number)
            seen.append(one.forward_backward(batch, step_tokens=700).loss.item())
            one.end_micro_batch()
        losses.append(seen)
        weights.append({state.name: state.weight.clone() for state in one.parameter_states()})
    assert uses == [False] * 6 + [True, True, False, True, True, True] + [False] * 6
    assert losses[0] == losses[1] == losses[2]
    for name, weight in weights[0].items():
        assert weight.equal(weights[1][name]), name
        assert weight.equal(weights[2][name]), name


def test_a_graph_that_cannot_be_used_is_one_line(
    engine: Callable[[], Engine], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    graph, _ = graph_of(engine(), refused, monkeypatch)
    assert graphs.make_graph(graph) is None
    assert "no CUDA graphs are used (RuntimeError: operation not permitted when stream is capturing)" in caplog.text


def test_no_node_of_a_parameter_outlives_a_micro_batch(engine: Callable[[], Engine]) -> None:
    """A node that accumulates a gradient works on the stream on which it was made, and CUDA cannot record two."""
    one = engine()

    def node(p: torch.nn.Parameter) -> Any:
        return p.view_as(p).grad_fn.next_functions[0][0]  # type: ignore[union-attr]

    for micro_batch in range(2):
        if micro_batch:
            sums = one.forward_backward(random_batch(CONFIG, 0), step_tokens=700)
            assert not sums.loss.requires_grad
        for p in one.module.parameters():
            node(p).metadata["made"] = True
            assert "made" not in node(p).metadata
