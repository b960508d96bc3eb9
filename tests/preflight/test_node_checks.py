"""Verdicts on facts that are written by hand: two nodes, of which one has something wrong."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from dist_transformer.base.checks import Check, check_table
from dist_transformer.preflight.facts import (
    CACHE,
    RUN_FOLDER,
    SHARED_MEMORY,
    TEMPORARY_FOLDER,
    DataFacts,
    Facts,
    Gpu,
    Reduction,
    SharedFolder,
    Volume,
)
from dist_transformer.preflight.nccl import Port
from dist_transformer.preflight.network_checks import names_an_interface
from dist_transformer.preflight.node_checks import judge

GIB = 2**30


VERSIONS = {"python": "3.11.7", "torch": "2.11.0", "deepspeed": "0.19.8", "dist_transformer": "0.1.0"}
SHARED = SharedFolder(sees_rank_0=True, seen_by_rank_0=True)
VOLUMES = {
    name: Volume(path=f"/{name}", free_bytes=100 * GIB) for name in (RUN_FOLDER, TEMPORARY_FOLDER, CACHE, SHARED_MEMORY)
}


def port(name: str, *, is_active: bool = True) -> Port:
    return Port(name=name, is_active=is_active, rate="400 Gb/sec (4X NDR)")


def facts_of(rank: int) -> Facts:
    """Two nodes with two H100 each, all well."""
    gpu = Gpu(
        name="NVIDIA H100",
        uuid=f"GPU-{rank}",
        total_bytes=79 * GIB,
        used_bytes=GIB // 2,
        has_bf16=True,
        near_cpus=32,
        tflops=650.0 + rank,
    )
    return Facts(
        rank=rank,
        local_rank=rank % 2,
        host="n1" if rank < 2 else "n2",
        versions=VERSIONS,
        code="abc",
        gpus_present=2,
        gpus_visible=2,
        gpu=gpu,
        driver="570.86.15",
        built_for="13.0",
        cpus=64,
        load=(3.5, 128),
        available_bytes=50 * GIB,
        open_files=65_536,
        volumes=VOLUMES,
        interfaces=("lo", "eth0", "ib0"),
        nccl_settings=("NCCL_DEBUG=WARN", "NCCL_SOCKET_IFNAME=ib0"),
        ports=(port("mlx5_0:1"), port("mlx5_1:1")),
        master="n1",
        master_addresses=("10.0.0.1",),
        shared=SHARED,
        data=(DataFacts(place="data", index_sha256="0123456789abcdef"),),
        reductions=(Reduction(backend="nccl", bytes=2**28, seconds=0.004 + 0.0001 * rank, exact=True, network="IB"),),
    )


def judged(change: Callable[[Facts], dict[str, Any]] = lambda _: {}, **settings: Any) -> dict[str, Check]:
    facts = [replace(fact, **change(fact)) for fact in map(facts_of, range(4))]
    return {verdict.name: verdict for verdict in judge(facts, **{"run_gib": 20.0, **settings})}


def on_rank(rank: int, **changes: Any) -> Callable[[Facts], dict[str, Any]]:
    return lambda fact: changes if fact.rank == rank else {}


def on_n2(**changes: Any) -> Callable[[Facts], dict[str, Any]]:
    return lambda fact: changes if fact.host == "n2" else {}


def volume_on_n2(name: str, **changes: Any) -> Callable[[Facts], dict[str, Any]]:
    return on_n2(volumes={**VOLUMES, name: replace(VOLUMES[name], **changes)})


def gpu_on_rank(rank: int, **changes: Any) -> Callable[[Facts], dict[str, Any]]:
    return lambda fact: {"gpu": replace(fact.gpu, **changes)} if fact.rank == rank and fact.gpu else {}


def test_two_equal_nodes_are_fit() -> None:
    found = judged()
    assert {verdict.state for verdict in found.values()} == {"ok"}
    assert found["ranks"].found == "4 on 2 nodes: n1 (0-1), n2 (2-3)"
    assert found["GPUs"].found == "2 per node, one per rank: NVIDIA H100, 79 GiB, bf16, driver 570.86.15"
    assert found["CPUs"].found == "at least 64 per process (n1), 32 of them close to its GPU"
    assert found["NCCL settings"].found == "NCCL_DEBUG=WARN NCCL_SOCKET_IFNAME=ib0"
    assert found["InfiniBand"].found == "2 x 400 Gb/sec (4X NDR)"
    assert found["locked memory"].found == "no limit"
    # The slowest of the ranks: 2^28 bytes in 4.3 ms. One and a half times as much goes through the ports.
    assert found["all-reduce 256 MiB"].found == (
        "nccl: 62.43 GB/s algorithm bandwidth, 4.3 ms, 94% of the ports' 100 GB/s"
    )
    assert found["NCCL network"].found == "IB"
    assert found["GPU speed"].found == "at least 650 TFLOP/s in products (rank 0 on n1), median 652"


LATE = Reduction(backend="nccl", bytes=2**28, seconds=0.5, exact=True)
FAST = Reduction(backend="nccl", bytes=2**28, seconds=0.004, exact=True)
WRONG = Reduction(backend="nccl", bytes=2**28, seconds=0.002, exact=False)


@pytest.mark.parametrize(
    ("change", "problem", "found", "remedy"),
    [
        (on_rank(3, host="n3"), "ranks: warn", "n2 (2), n3 (3)", "the same number of processes"),
        (
            on_n2(versions={**VERSIONS, "torch": "2.13.0"}),
            "versions: fail",
            "torch 2.11.0 on n1; 2.13.0 on n2",
            "the same versions on all nodes",
        ),
        (
            lambda _: {"versions": {**VERSIONS, "deepspeed": "not installed"}},
            "versions: fail",
            "deepspeed not installed",
            "install deepspeed",
        ),
        (on_n2(code="def"), "code: fail", "abc on n1; def on n2", "the same revision"),
        (
            on_n2(gpus_visible=0, gpu=None),
            "GPUs: fail",
            "2 in n2, but torch sees none: it is built for CUDA 13.0, and the driver is 570.86.15",
            "CUDA 13 needs driver 580 or newer",
        ),
        (on_n2(gpus_visible=1), "GPUs: fail", "2 visible on n1; 1 visible on n2", "exclude the node"),
        (
            lambda fact: {"gpus_visible": 1, "gpu": fact.gpu if fact.local_rank == 0 else None},
            "GPUs: fail",
            "local rank 1 on n1 has none of 1",
            "let each see all GPUs of its node",
        ),
        (gpu_on_rank(3, uuid="GPU-2"), "GPUs: fail", "ranks 2-3 on n2 use the same GPU", "one process per GPU"),
        (gpu_on_rank(1, problem="CUDA error: ECC"), "GPUs: fail", "rank 1 on n1: CUDA error: ECC", "exclude n1"),
        (gpu_on_rank(1, has_bf16=False), "GPUs: warn", "no bf16", "--precision fp32"),
        (
            lambda _: {"gpus_visible": 8, "gpus_present": 8},
            "GPUs: warn",
            "8 per node, of which 2 are used",
            "for each GPU",
        ),
        (gpu_on_rank(2, used_bytes=9 * GIB), "GPU memory: warn", "9.0 GiB in use before training: rank 2", "nvidia"),
        (on_rank(1, available_bytes=GIB // 2), "memory: fail", "at least 0.5 GiB free per process (n1)", "--mem"),
        (on_rank(1, available_bytes=2 * GIB), "memory: warn", "at least 2.0 GiB free per process (n1)", "--mem"),
        (
            on_n2(open_files=300),
            "open files: warn",
            "at least 300 per process (n2), and about 208 are needed",
            "ulimit -Hn",
        ),
        (on_n2(master_addresses=()), "MASTER_ADDR: fail", "n1 does not resolve on n2", "name resolution"),
        (on_n2(master_addresses=("127.0.1.1",)), "MASTER_ADDR: warn", "n1 is n2 itself on n2", "/etc/hosts"),
        (
            on_n2(nccl_settings=("NCCL_DEBUG=INFO",)),
            "NCCL settings: warn",
            "NCCL_DEBUG=WARN NCCL_SOCKET_IFNAME=ib0 on n1; NCCL_DEBUG=INFO on n2",
            "slurm/cluster.env",
        ),
        (
            lambda _: {"nccl_settings": ("NCCL_SOCKET_IFNAME=ib7",)},
            "NCCL settings: fail",
            "NCCL_SOCKET_IFNAME=ib7 names none of lo, eth0, ib0 on n1",
            "unset it",
        ),
        (
            on_n2(ports=(port("mlx5_0:1"), port("mlx5_1:1", is_active=False))),
            "InfiniBand: warn",
            "2 x 400 Gb/sec (4X NDR) on n1; 1 x 400 Gb/sec (4X NDR) on n2",
            "exclude the node",
        ),
        (lambda _: {"ports": ()}, "InfiniBand: warn", "no active port", "open /dev/infiniband to the container"),
        (on_n2(loads_verbs=False), "InfiniBand: fail", "cannot be loaded on n2", "install libibverbs1"),
        (on_n2(locked_bytes=GIB), "locked memory: warn", "at most 1,024 MiB per process (n2)", "LimitMEMLOCK"),
        (on_n2(driver="535.104.05"), "GPUs: warn", "driver 570.86.15 on n1; NVIDIA H100", "with one driver"),
        (on_n2(load=(140.0, 128)), "load: warn", "at most 140.0 on 128 core(s) (n2)", "OMP_NUM_THREADS"),
        (gpu_on_rank(3, near_cpus=0), "CPUs: warn", "none close to the GPU of rank 3 on n2", "--cpu-bind=none"),
        (on_rank(3, reductions=(WRONG,)), "all-reduce 256 MiB: fail", "WRONG SUMS on rank 3", "NCCL_P2P_DISABLE"),
        (on_rank(3, reductions=(LATE,)), "all-reduce 256 MiB: warn", "nccl: 0.54 GB/s", "NCCL_DEBUG=INFO"),
        (
            on_n2(reductions=(replace(FAST, network="Socket"),)),
            "NCCL network: warn",
            "TCP sockets on n2, although mlx5_0:1 (400 Gb/sec (4X NDR)) is there",
            "NCCL_IB_DISABLE",
        ),
        (
            lambda _: {
                "ports": (Port(name="rdmap0s6:1", is_active=True, rate="100 Gb/sec (4X EDR)", is_efa=True),),
                "reductions": (replace(FAST, network="Socket"),),
            },
            "NCCL network: warn",
            "TCP sockets on n1, n2, although rdmap0s6:1",
            "aws-ofi-nccl",
        ),
        (gpu_on_rank(3, tflops=580.0), "GPU speed: warn", "at least 580 TFLOP/s in products (rank 3 on n2)", "n2"),
        (
            volume_on_n2(RUN_FOLDER, free_bytes=5 * GIB),
            "run folder: fail",
            "5.0 GiB free in /run folder (n2), and 20 are needed",
            "dist-transformer plan",
        ),
        (volume_on_n2(RUN_FOLDER, problem="/run is full"), "run folder: fail", "/run is full; rank 2 on n2", "correct"),
        (volume_on_n2(TEMPORARY_FOLDER, free_bytes=GIB // 8), "temporary folder: fail", "0.1 GiB free", "TMPDIR"),
        (volume_on_n2(CACHE, free_bytes=GIB), "cache: warn", "1.0 GiB free in /cache (n2)", "--cache-dir"),
        (volume_on_n2(SHARED_MEMORY, free_bytes=64 * 2**20), "/dev/shm: warn", "0.1 GiB free", "--shm-size"),
        (
            on_rank(3, shared=replace(SHARED, seen_by_rank_0=False)),
            "run folder shared: fail",
            "rank 0 does not share files with rank 3 on n2",
            "can write to",
        ),
        (
            on_rank(1, shared=replace(SHARED, lock="free")),
            "file locks: fail",
            "rank 0's lock did not hold for rank 1 on n1",
            "nolock",
        ),
        (
            on_rank(3, shared=replace(SHARED, lock="No locks available")),
            "file locks: warn",
            "locks fail (No locks available) for rank 3 on n2",
            "nolock",
        ),
        (
            on_n2(data=(DataFacts(place="data", index_sha256="ffff"),)),
            "data: fail",
            "data: index 0123456789ab on n1; ffff on n2",
            "copy the folder again",
        ),
        (
            on_rank(3, data=(DataFacts(place="data", problem="data/index.json cannot be read (gone)"),)),
            "data: fail",
            "rank 3 on n2: data/index.json cannot be read (gone)",
            "dist-transformer prepare",
        ),
    ],
)
def test_what_is_wrong_on_one_node_is_named_with_its_remedy(
    change: Callable[[Facts], dict[str, Any]], problem: str, found: str, remedy: str
) -> None:
    (wrong,) = (verdict for verdict in judged(change).values() if verdict.state != "ok")
    assert f"{wrong.name}: {wrong.state}" == problem
    assert found in wrong.found
    assert remedy in wrong.remedy


def test_only_problems_are_shown_with_a_remedy() -> None:
    checks = [Check(name=state, found="a fact", state=state, remedy=f"fix {state}") for state in ("ok", "warn", "fail")]
    assert check_table(checks).split("\n") == [
        "ok    ok    a fact",
        "warn  WARN  a fact",
        "            remedy: fix warn",
        "fail  FAIL  a fact",
        "            remedy: fix fail",
    ]


def test_nodes_without_gpus_are_fit() -> None:
    verdicts = judged(lambda _: {"gpus_present": 0, "gpus_visible": 0, "gpu": None})
    assert verdicts["GPUs"] == Check(name="GPUs", found="none: training runs on CPU cores")
    assert verdicts["CPUs"].found == "at least 64 per process (n1)"
    assert not {"GPU memory", "GPU speed", "InfiniBand", "locked memory"} & verdicts.keys()


def test_cpus_that_are_not_known_are_no_problem() -> None:
    verdicts = judged(lambda fact: {"gpu": fact.gpu and replace(fact.gpu, near_cpus=None)})
    assert verdicts["CPUs"] == Check(name="CPUs", found="at least 64 per process (n1)")


def test_one_node_needs_no_infiniband() -> None:
    found = judged(lambda _: {"host": "n1"})
    assert not {"InfiniBand", "locked memory", "NCCL network"} & found.keys()
    assert "of the ports" not in found["all-reduce 256 MiB"].found


def test_without_infiniband_the_fastest_link_is_the_measure() -> None:
    """10 Gb/s are 1.25 GB/s, of which 0.54 GB/s take two thirds; NCCL may use TCP, but it is slow."""
    links = tuple(
        Port(name=name, is_active=True, rate=rate) for name, rate in (("e0", "1 Gb/sec"), ("e1", "10 Gb/sec"))
    )
    tcp = replace(LATE, network="Socket")
    found = judged(lambda _: {"ports": (), "links": links, "reductions": (tcp,)})
    assert found["all-reduce 256 MiB"].found.endswith("64% of the ports' 1.25 GB/s")
    assert found["NCCL network"] == Check(name="NCCL network", found="Socket")


def test_the_first_node_may_know_itself_by_a_local_address() -> None:
    verdicts = judged(lambda fact: {"master_addresses": ("127.0.1.1",)} if fact.host == "n1" else {})
    assert verdicts["MASTER_ADDR"].state == "ok"


def test_the_threshold_of_the_run_folder_is_the_callers() -> None:
    assert judged(run_gib=100.0)[RUN_FOLDER].state == "ok"
    assert judged(run_gib=100.1)[RUN_FOLDER].state == "fail"


def test_verified_files_are_counted() -> None:
    data = DataFacts(place="data", index_sha256="0123456789abcdef", verified_files=3)
    found = judged(lambda _: {"data": (data,)})["data"].found
    assert found == "data: index 0123456789ab; hashes of 12 files are right"


@pytest.mark.parametrize(
    ("setting", "found"),
    [
        ("eth", True),
        ("=eth", False),
        ("mlx,eth", True),
        ("mlx", False),
        ("^lo,eth,ib", False),
        ("^=eth", True),
        ("^=lo,eth0,ib0", False),
    ],
)
def test_interfaces_as_nccl_reads_them(setting: str, found: bool) -> None:
    assert names_an_interface(setting, ("lo", "eth0", "ib0")) is found
