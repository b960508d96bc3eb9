"""Verdicts on facts that are written by hand: two nodes, of which one has something wrong."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from dist_transformer.base.checks import Check, check_table
from dist_transformer.preflight.checks import judge, names_an_interface
from dist_transformer.preflight.facts import (
    CACHE,
    RUN_FOLDER,
    SHARED_MEMORY,
    TEMPORARY_FOLDER,
    DataFacts,
    Facts,
    Gpu,
    Port,
    Reduction,
    Volume,
)

GIB = 2**30
Change = Callable[[Facts], dict[str, Any]]

VERSIONS = {"python": "3.11.7", "torch": "2.11.0", "deepspeed": "0.19.8", "dist_transformer": "0.1.0", "code": "abc"}
VOLUMES = {
    name: Volume(path=f"/{name}", free_bytes=100 * GIB) for name in (RUN_FOLDER, TEMPORARY_FOLDER, CACHE, SHARED_MEMORY)
}
GPU = Gpu(name="NVIDIA H100", uuid="GPU-0", total_bytes=79 * GIB, used_bytes=GIB // 2, has_bf16=True)
UP = Port(name="mlx5_0:1", is_active=True, rate="400 Gb/sec (4X NDR)")
DOWN = replace(UP, name="mlx5_1:1", is_active=False)
SUM = Reduction(backend="nccl", bytes=2**28, seconds=0.004, exact=True)
DATA = DataFacts(place="data", index_sha256="0123456789abcdef")


def facts_of(rank: int) -> Facts:
    """Two nodes with two H100 each, all well."""
    return Facts(
        rank=rank,
        local_rank=rank % 2,
        host="n1" if rank < 2 else "n2",
        versions=VERSIONS,
        gpus_present=2,
        gpus_visible=2,
        gpu=replace(GPU, uuid=f"GPU-{rank}"),
        driver="570.86.15",
        built_for="13.0",
        available_bytes=50 * GIB,
        locked_bytes=None,
        volumes=VOLUMES,
        interfaces=("lo", "eth0", "ib0"),
        nccl_settings=("NCCL_DEBUG=WARN", "NCCL_SOCKET_IFNAME=ib0"),
        ports=(UP, UP),
        master="n1",
        master_addresses=("10.0.0.1",),
        run_folder_lock="held",
        data=(DATA,),
        reductions=(replace(SUM, seconds=0.004 + 0.0001 * rank),),
        network="IB",
    )


def judged(change: Change = lambda _: {}, run_gib: float = 20.0) -> dict[str, Check]:
    facts = [replace(fact, **change(fact)) for fact in map(facts_of, range(4))]
    return {verdict.name: verdict for verdict in judge(facts, run_gib=run_gib)}


def everywhere(**changes: Any) -> Change:
    return lambda _: changes


def on_rank(rank: int, **changes: Any) -> Change:
    return lambda fact: changes if fact.rank == rank else {}


def on_n2(**changes: Any) -> Change:
    return lambda fact: changes if fact.host == "n2" else {}


def volume_on_n2(name: str, **changes: Any) -> Change:
    return on_n2(volumes={**VOLUMES, name: replace(VOLUMES[name], **changes)})


def gpu_on_rank(rank: int, **changes: Any) -> Change:
    return lambda fact: {"gpu": replace(fact.gpu, **changes)} if fact.rank == rank and fact.gpu else {}


def without_second_gpu(fact: Facts) -> dict[str, Any]:
    return {"gpus_visible": 1, "gpu": fact.gpu if fact.local_rank == 0 else None}


def test_two_equal_nodes_are_fit() -> None:
    found = judged()
    assert {verdict.state for verdict in found.values()} == {"ok"}
    assert {name: verdict.found for name, verdict in found.items()} == {
        "ranks": "4 on 2 nodes: n1 (0-1), n2 (2-3)",
        "versions": "python 3.11.7, torch 2.11.0, deepspeed 0.19.8, dist_transformer 0.1.0, code abc (hash of the "
        "package's files)",
        "GPUs": "2 per node, one per rank: NVIDIA H100, 79 GiB, bf16, driver 570.86.15",
        "GPU memory": "at most 0.5 GiB in use before training",
        "memory": "at least 50.0 GiB free per process (n1)",
        "MASTER_ADDR": "n1: 10.0.0.1",
        "NCCL settings": "NCCL_DEBUG=WARN NCCL_SOCKET_IFNAME=ib0",
        "InfiniBand": "2 x 400 Gb/sec (4X NDR)",
        "locked memory": "no limit",
        "NCCL network": "IB",
        # The slowest of the ranks: 2^28 bytes in 4.3 ms. One and a half times as much goes through the ports.
        "all-reduce 256 MiB": "nccl: 62.43 GB/s algorithm bandwidth, 4.3 ms, 94% of the ports' 100 GB/s",
        **{name: f"100.0 GiB free in /{name} (n1)" for name in VOLUMES},
        "run folder shared": "all other ranks see the files of rank 0",
        "file locks": "hold between all ranks",
        "data": "data: index 0123456789ab",
    }


PROBLEMS = {
    "ranks: warn | n2 (2), n3 (3) | the same number of processes": on_rank(3, host="n3"),
    "versions: fail | torch 2.11.0 on n1; 2.13.0 on n2 | the same versions and code on all nodes": on_n2(
        versions={**VERSIONS, "torch": "2.13.0"}
    ),
    "versions: fail | code abc on n1; def on n2 | the same versions": on_n2(versions={**VERSIONS, "code": "def"}),
    "versions: fail | deepspeed not installed | install deepspeed": everywhere(
        versions={**VERSIONS, "deepspeed": "not installed"}
    ),
    "GPUs: fail | 2 in n2, but torch sees none: it is built for CUDA 13.0, and the driver is 570.86.15 | 580": on_n2(
        gpus_visible=0, gpu=None
    ),
    "GPUs: fail | 2 visible on n1; 1 visible on n2 | exclude the node": on_n2(gpus_visible=1),
    "GPUs: fail | local rank 1 on n1 has none of 1 | let each see all GPUs of its node": without_second_gpu,
    "GPUs: fail | ranks 2-3 on n2 use the same GPU | one process per GPU": gpu_on_rank(3, uuid="GPU-2"),
    "GPUs: fail | rank 1 on n1: CUDA error: ECC | exclude n1": gpu_on_rank(1, problem="CUDA error: ECC"),
    "GPUs: warn | no bf16 | --precision fp32": gpu_on_rank(1, has_bf16=False),
    "GPUs: warn | 8 per node, of which 2 are used | each GPU": everywhere(gpus_visible=8, gpus_present=8),
    "GPUs: warn | driver 570.86.15 on n1; NVIDIA H100 | with one driver": on_n2(driver="535.104.05"),
    "GPU memory: warn | 9.0 GiB in use before training: rank 2 | nvidia": gpu_on_rank(2, used_bytes=9 * GIB),
    "memory: fail | at least 0.5 GiB free per process (n1) | --mem": on_rank(1, available_bytes=GIB // 2),
    "memory: warn | at least 2.0 GiB free per process (n1) | --mem": on_rank(1, available_bytes=2 * GIB),
    "MASTER_ADDR: fail | n1 does not resolve on n2 | name resolution": on_n2(master_addresses=()),
    "MASTER_ADDR: warn | n1 is n2 itself on n2 | /etc/hosts": on_n2(master_addresses=("127.0.1.1",)),
    "NCCL settings: warn | NCCL_DEBUG=WARN NCCL_SOCKET_IFNAME=ib0 on n1; NCCL_DEBUG=INFO on n2 | cluster.env": on_n2(
        nccl_settings=("NCCL_DEBUG=INFO",)
    ),
    "NCCL settings: fail | NCCL_SOCKET_IFNAME=ib7 names none of lo, eth0, ib0 on n1 | unset it": everywhere(
        nccl_settings=("NCCL_SOCKET_IFNAME=ib7",)
    ),
    "InfiniBand: warn | 2 x 400 Gb/sec (4X NDR) on n1; 1 x 400 Gb/sec (4X NDR) on n2 | exclude the node": on_n2(
        ports=(UP, DOWN)
    ),
    "InfiniBand: warn | no active port | open /dev/infiniband to the container": everywhere(ports=()),
    "locked memory: warn | at most 1,024 MiB per process (n2) | LimitMEMLOCK": on_n2(locked_bytes=GIB),
    "locked memory: fail | at most 8 MiB per process (n2) | LimitMEMLOCK": on_n2(locked_bytes=2**23),
    "NCCL network: warn | TCP sockets on n2, although mlx5_0:1 (400 Gb/sec (4X NDR)) is there | libibverbs1": on_n2(
        network="Socket"
    ),
    "all-reduce 256 MiB: fail | WRONG SUMS on rank 3 | NCCL_P2P_DISABLE": on_rank(
        3, reductions=(replace(SUM, exact=False),)
    ),
    "all-reduce 256 MiB: warn | nccl: 0.54 GB/s | NCCL_DEBUG=INFO": on_rank(3, reductions=(replace(SUM, seconds=0.5),)),
    # 17.9 GB/s, of which a ring of four sends one and a half times as much: 27% of 100 GB/s.
    "all-reduce 256 MiB: warn | 27% of the ports' 100 GB/s | NCCL_IB_HCA": on_rank(
        3, reductions=(replace(SUM, seconds=0.015),)
    ),
    "run folder: fail | 5.0 GiB free in /run folder (n2), and 20 are needed | dist-transformer plan": volume_on_n2(
        RUN_FOLDER, free_bytes=5 * GIB
    ),
    "run folder: fail | /run is full; rank 2 on n2 | correct": volume_on_n2(RUN_FOLDER, problem="/run is full"),
    "temporary folder: fail | 0.1 GiB free | TMPDIR": volume_on_n2(TEMPORARY_FOLDER, free_bytes=GIB // 8),
    "cache: warn | 1.0 GiB free in /cache (n2) | --cache-dir": volume_on_n2(CACHE, free_bytes=GIB),
    "/dev/shm: warn | 0.1 GiB free | --shm-size": volume_on_n2(SHARED_MEMORY, free_bytes=64 * 2**20),
    "run folder shared: fail | rank 0 does not share files with rank 3 on n2 | can write to": on_rank(
        3, run_folder_lock="unseen"
    ),
    "file locks: fail | rank 0's lock did not hold for rank 1 on n1 | nolock": on_rank(1, run_folder_lock="free"),
    "file locks: warn | locks fail (No locks available) for rank 3 on n2 | nolock": on_rank(
        3, run_folder_lock="No locks available"
    ),
    "data: fail | data: index 0123456789ab on n1; ffff on n2 | copy the folder again": on_n2(
        data=(replace(DATA, index_sha256="ffff"),)
    ),
    "data: fail | rank 3 on n2: data/index.json cannot be read (gone) | dist-transformer prepare": on_rank(
        3, data=(replace(DATA, problem="data/index.json cannot be read (gone)"),)
    ),
}


@pytest.mark.parametrize(("problem", "change"), PROBLEMS.items())
def test_what_is_wrong_on_one_node_is_named_with_its_remedy(problem: str, change: Change) -> None:
    """Each problem is the name and state of a check, a part of what it finds, and a part of its remedy."""
    expected, found, remedy = problem.split(" | ")
    (wrong,) = (verdict for verdict in judged(change).values() if verdict.state != "ok")
    assert f"{wrong.name}: {wrong.state}" == expected
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
    verdicts = judged(everywhere(gpus_present=0, gpus_visible=0, gpu=None))
    assert verdicts["GPUs"] == Check(name="GPUs", found="none: training runs on CPU cores")
    assert not {"GPU memory", "InfiniBand", "locked memory"} & verdicts.keys()


def test_one_node_needs_no_infiniband() -> None:
    found = judged(everywhere(host="n1"))
    assert not {"InfiniBand", "locked memory", "NCCL network"} & found.keys()
    assert "of the ports" not in found["all-reduce 256 MiB"].found


def test_without_a_faster_device_nccl_may_use_tcp() -> None:
    found = judged(everywhere(ports=(), network="Socket"))
    assert found["NCCL network"] == Check(name="NCCL network", found="Socket")
    assert "of the ports" not in found["all-reduce 256 MiB"].found


def test_the_first_node_may_know_itself_by_a_local_address() -> None:
    verdicts = judged(lambda fact: {"master_addresses": ("127.0.1.1",)} if fact.host == "n1" else {})
    assert verdicts["MASTER_ADDR"].state == "ok"


def test_the_threshold_of_the_run_folder_is_the_callers() -> None:
    assert judged(run_gib=100.0)[RUN_FOLDER].state == "ok"
    assert judged(run_gib=100.1)[RUN_FOLDER].state == "fail"


def test_interfaces_as_nccl_reads_them() -> None:
    settings = ("eth", "=eth", "mlx,eth", "mlx", "^lo,eth,ib", "^=eth", "^=lo,eth0,ib0")
    found = [setting for setting in settings if names_an_interface(setting, ("lo", "eth0", "ib0"))]
    assert found == ["eth", "mlx,eth", "^=eth"]
