"""The model of a step, against figures worked out by hand."""

import dataclasses
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from dist_transformer.config.presets import PRESETS
from dist_transformer.config.settings import BatchConfig, TrainConfig
from dist_transformer.cost.hardware import ENOUGH, GPUS, Cluster, GpuKind
from dist_transformer.cost.memory import ModelSizes, ZeroSettings, model_sizes
from dist_transformer.cost.speed import (
    StepTime,
    Traffic,
    choose_nodes,
    communication_seconds,
    fewer_nodes,
    graph_problem,
    launches_of_step,
    predict_step,
    traffic,
    uses_graphs,
)
from dist_transformer.model.transformer import Transformer
from dist_transformer.training.engine.muon import orthogonalised

# Round rates: 100 and 10 TFLOP/s, 1,000 GB/s of memory, 100 GB/s between GPUs.
GPU = GpuKind(
    memory_gib=80, bf16_tflops=100, fp32_tflops=10, memory_gb_per_second=1000, link_gb_per_second=100, node_gbit=400
)
# Of 200 million parameters, one million is in a hundred small tensors.
SIZES = ModelSizes(
    parameters=200_000_000,
    trained=200_000_000,
    matrices=0,
    muon_flops=0,
    persistent=1_000_000,
    persistent_tensors=100,
    constants=0,
)


def preset(name: str, **settings: Any) -> TrainConfig:
    config = PRESETS[name].changed(**{"precision": "bf16", **settings})
    return dataclasses.replace(config, model=dataclasses.replace(config.model, vocab_size=37_000))


BIG = preset("big")
PARAMETERS = model_sizes(BIG.model, ZeroSettings(stage=1)).parameters


@pytest.fixture(autouse=True)
def round_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(GPUS, "round", GPU)


def step(stage: int, config: TrainConfig = BIG, *, tokens: int = 1000, **machines: Any) -> StepTime:
    """A step in which each GPU computes one pack of so many source and target tokens."""
    cluster = Cluster(**{"gpu": "round", "gpus": 4, "mfu": 0.5, **machines})
    batch = BatchConfig(max_target_tokens=tokens, packs_per_step=cluster.world_size)
    config = dataclasses.replace(config, batch=batch)
    return predict_step(config, ZeroSettings(stage=stage), cluster, source_budget=tokens)


def test_operations_are_the_papers_model() -> None:
    """A source and a target token of big cost 1.289 GFLOP; a thousand of them at half of 100 TFLOP/s.

    0.4% of that is attention, which is left out.
    """
    assert step(1).compute == pytest.approx(1.289e12 / 50e12, rel=5e-3)
    assert step(1, preset("big", precision="fp32")).compute == pytest.approx(10 * step(1).compute)


def test_a_small_model_waits_for_the_launches_of_its_kernels() -> None:
    """The null GPU counts 979 launches of `big` in one micro-batch and 7,321 in eight; each takes the host 50 µs."""
    assert launches_of_step(BIG.model, accumulation=1) == pytest.approx(979, rel=0.01)
    assert launches_of_step(BIG.model, accumulation=8) == pytest.approx(7321, rel=0.01)
    found = step(1, preset("tiny"), tokens=2048, gpus=1)
    # (2 · 2 + 3 · 2) sublayers of 30 launches and 73 of the update.
    assert found.total == found.launches == pytest.approx(373 * 50e-6)
    assert found.compute + found.update < found.total / 10


def test_graphs_leave_the_launches_of_the_update() -> None:
    """At stages 0 and 1: 15 launches of the inputs, sums, hash and graph, and 73 of the update."""
    config = preset("tiny").changed(cuda_graphs="yes")
    launches = {stage: step(stage, config, tokens=2048, gpus=1).launches for stage in range(3)}
    assert launches == pytest.approx({0: 88 * 50e-6, 1: 88 * 50e-6, 2: 373 * 50e-6})


@pytest.mark.parametrize(
    ("stage", "offload", "precision", "alpha", "problem"),
    [
        (0, False, "fp32", 0.0, None),
        (1, False, "bf16", 0.0, None),
        (1, False, "fp32", 0.0, "ZeRO-1 in fp32 has other sums"),
        (1, True, "bf16", 0.0, "the optimizer is offloaded"),
        (1, False, "bf16", 5.0, "R-Drop has two passes"),
        (2, False, "bf16", 0.0, "ZeRO-2 communicates in each micro-batch"),
        (3, True, "bf16", 0.0, "ZeRO-3 communicates in each micro-batch"),
    ],
)
def test_what_a_graph_cannot_hold(stage: int, offload: bool, precision: str, alpha: float, problem: str | None) -> None:
    config = preset("tiny", precision=precision, cuda_graphs="yes")
    config = config.changed(optimizer=dataclasses.replace(config.optimizer, rdrop_alpha=alpha))
    zero = ZeroSettings(stage=stage, offload_optimizer=offload)
    assert graph_problem(config, zero) == problem
    assert uses_graphs(config, zero) == (problem is None)
    assert not uses_graphs(config.changed(cuda_graphs="auto"), zero)


def test_the_update_moves_thirty_bytes_a_parameter() -> None:
    assert step(0).update == pytest.approx(PARAMETERS * 30 / 1000e9)
    assert step(1).update == pytest.approx(PARAMETERS * 30 / 4 / 1000e9)


def muon(config: TrainConfig) -> TrainConfig:
    return dataclasses.replace(config, optimizer=dataclasses.replace(config.optimizer, kind="muon"))


@pytest.mark.parametrize(("stage", "ranks"), [(0, 1), (1, 4), (2, 4), (3, 1)])
@pytest.mark.parametrize(("precision", "teraflops"), [("bf16", 50), ("fp32", 5)])
def test_muons_products_are_counted_by_hand(stage: int, ranks: int, precision: str, teraflops: int) -> None:
    """`big` has matrices of 1024 · 3072 and 1024 · 1024 in 18 attentions, and 2 of 1024 · 4096 in 12 feed-forwards.

    An iteration has two products of 2 m² n and one of 2 m³. At stages 1 and 2 four ranks share the matrices.
    """
    attention = 4 * 1024**2 * (3072 + 1024) + 2 * 2 * 1024**3
    feed_forward = 2 * (4 * 1024**2 * 4096 + 2 * 1024**3)
    config = preset("big", precision=precision)
    more = step(stage, muon(config)).update - step(stage, config).update
    assert more == pytest.approx(5 * (18 * attention + 12 * feed_forward) / ranks / (teraflops * 1e12))
    sizes = model_sizes(BIG.model, ZeroSettings(stage=stage), ("encoder",))
    assert sizes.muon_flops == 5 * (12 * attention + 6 * feed_forward)


def test_muons_products_are_those_of_the_engine() -> None:
    """They are counted by torch in a real update of matrices that lie and stand."""
    model = Transformer(dataclasses.replace(PRESETS["tiny"].model, vocab_size=50))
    with FlopCounterMode(display=False) as counter:
        orthogonalised([*model.hidden_matrices().values()], torch.float32)
    assert counter.get_total_flops() == model_sizes(model.config, ZeroSettings(stage=0)).muon_flops


def sent(stage: int, accumulation: int, precision: str, **keys: int) -> Traffic:
    zero = ZeroSettings(stage=stage, reduce_bucket_size=50_000_000, **keys)
    return traffic(zero, SIZES, precision=precision, accumulation=accumulation)


@pytest.mark.parametrize(
    ("stage", "accumulation", "precision", "millions"),
    [
        # An all-reduce of fp32 gradients is 8 bytes per parameter on a ring, a gathered bf16 weight 2.
        (0, 1, "bf16", 200 * 8),
        (0, 8, "bf16", 200 * 8),
        (1, 1, "bf16", 200 * 10),
        (1, 8, "bf16", 200 * 10),
        (1, 8, "fp32", 200 * 12),
        (2, 1, "bf16", 200 * 10),
        (2, 8, "bf16", 200 * 66),
        # Sums are scattered, 4 bytes, and the weights gathered, 199 of 200 million for each micro-batch.
        (3, 1, "bf16", 200 * 6),
        (3, 8, "bf16", 8 * (200 * 4 + 199 * 2) + 2),
        (3, 1, "fp32", 200 * 8),
    ],
)
def test_bytes_that_go_round(stage: int, accumulation: int, precision: str, millions: int) -> None:
    assert sent(stage, accumulation, precision).bytes == millions * 10**6


@pytest.mark.parametrize(("stage", "millions"), [(0, 150 * 8), (1, 150 * 10), (2, 150 * 10), (3, 150 * 4 + 200 * 2)])
def test_frozen_weights_have_no_gradients_to_send(stage: int, millions: int) -> None:
    """A quarter of 200 million is frozen; stage 3 gathers all."""
    sizes = dataclasses.replace(SIZES, trained=150_000_000)
    found = traffic(ZeroSettings(stage=stage), sizes, precision="bf16", accumulation=1)
    assert found.bytes == millions * 10**6
    frozen, whole = step(stage, preset("big", freeze=("encoder",))), step(stage)
    trained = model_sizes(BIG.model, ZeroSettings(stage=stage), ("encoder",)).trained
    assert frozen.update == pytest.approx(trained / PARAMETERS * whole.update)
    assert frozen.communication < whole.communication


def test_ways_around_the_ring() -> None:
    """An all-reduce goes round twice. Stages 2 and 3, and 1 in fp32, send four buckets of gradients, and the norm."""
    assert sent(0, 8, "bf16").passes == 2
    assert sent(1, 8, "bf16").passes == 2 + 1
    assert sent(1, 8, "fp32").passes == 2 * 4 + 1 + 2
    assert sent(2, 8, "bf16").passes == 8 * 2 * 4 + 1 + 2
    # The first layer is gathered on its own, then four pieces of 50 million; a hundred small tensors come one by one.
    assert sent(3, 8, "bf16").passes == 8 * (1 + 4 + 4) + 100 + 2


def test_weights_that_cannot_be_kept_are_gathered_twice() -> None:
    limits = {"stage3_max_live_parameters": 100_000_000, "stage3_max_reuse_distance": 100_000_000}
    once, twice = sent(3, 1, "bf16"), sent(3, 1, "bf16", **limits)
    assert twice.bytes - once.bytes == 199 * 10**6 * 2
    assert all(sent(3, 1, "bf16", **{name: limit}) == once for name, limit in limits.items())


def test_between_nodes_the_slower_of_both_links_counts() -> None:
    """Three quarters of the bytes pass each of 4 GPUs, seven eighths each of 8. Three passes: sums, weights."""
    passes = 2 + 1
    assert step(1).communication == pytest.approx(10 * 0.75 * PARAMETERS / 100e9 + passes * 3 * 5e-6)
    hops = passes * (15e-6 + 6 * 5e-6)
    assert step(1, nodes=2, network_gbit=400).communication == pytest.approx(10 * 7 / 8 * PARAMETERS / 50e9 + hops)
    assert step(1, nodes=2, network_gbit=8000).communication == pytest.approx(10 * 7 / 8 * PARAMETERS / 100e9 + hops)


def test_on_a_slow_network_messages_wait_for_each_other() -> None:
    """10 Mbit/s: 1.6 GB on two nodes are 640 s, and two passes of one message of 15 µs."""
    nodes = Cluster(gpu="round", nodes=2, network_gbit=0.01)
    found = communication_seconds(ZeroSettings(stage=0), SIZES, nodes, precision="fp32", accumulation=1)
    assert found == pytest.approx(1.6e9 / 2 * 8 / 10e6 + 2 * 15e-6, rel=1e-9)


def test_alone_nothing_is_sent() -> None:
    assert step(3, gpus=1).communication == 0


LARGE = preset("big_large_batch")
ZERO_1 = ZeroSettings(stage=1, reduce_bucket_size=25_000_000)


def nodes_of(count: int, **changes: Any) -> Cluster:
    return Cluster(gpus=8, nodes=count, **changes)


def with_batch(**changes: Any) -> TrainConfig:
    return dataclasses.replace(LARGE, batch=dataclasses.replace(LARGE.batch, **changes))


def test_the_host_limits_the_number_of_nodes() -> None:
    """128 packs: 4 nodes compute 4 packs per GPU in 56 ms, 6 compute 3 in 42 ms, which is below the host's 49 ms.

    Numbers with the same packs per GPU as fewer nodes, such as 5, are left out.
    """
    found = choose_nodes(LARGE, ZERO_1, nodes_of(16), source_budget=3584)
    assert list(found.seconds) == [1, 2, 3, 4, 6, 8, 16]
    assert found.nodes == 6
    assert min(found.seconds, key=found.seconds.__getitem__) == 6
    # Three passes of 127 messages more.
    assert found.seconds[16] > found.seconds[8] > found.seconds[6] > ENOUGH * found.seconds[16]


def test_stage_2_needs_one_micro_batch() -> None:
    """A node has 16 packs of 3,584 tokens per GPU, in two micro-batches; two nodes have 8, in one."""
    assert choose_nodes(LARGE, ZERO_1, nodes_of(1), source_budget=3584).stage == 1
    assert choose_nodes(LARGE, ZERO_1, nodes_of(2), source_budget=3584).stage == 2
    assert choose_nodes(with_batch(packs_per_micro_batch=1), ZERO_1, nodes_of(2), source_budget=3584).stage == 1
    # Stage 2 has no graphs.
    assert choose_nodes(LARGE.changed(cuda_graphs="yes"), ZERO_1, nodes_of(2), source_budget=3584).stage == 1


def test_a_slow_network_wants_fewer_nodes() -> None:
    assert choose_nodes(LARGE, ZERO_1, nodes_of(16, network_gbit=10), source_budget=3584).nodes == 1


@pytest.mark.parametrize(("packs", "nodes", "fewer"), [(128, 16, 6), (128, 5, 4), (128, 4, None), (256, 4, None)])
def test_fewer_nodes_are_named_where_they_are_as_fast(packs: int, nodes: int, fewer: int | None) -> None:
    found = fewer_nodes(with_batch(packs_per_step=packs), ZERO_1, nodes_of(nodes), source_budget=3584)
    assert (
        (found is None) if fewer is None else found is not None and found.startswith(f"{fewer} node(s) would have 10")
    )
