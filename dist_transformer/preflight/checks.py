"""Judgement of the facts of all ranks: one line per check, with a remedy if the job is not fit to start."""

from collections.abc import Callable, Iterator, Sequence
from statistics import median_high

from dist_transformer.base.checks import Check
from dist_transformer.preflight.facts import CACHE, RUN_FOLDER, SHARED_MEMORY, TEMPORARY_FOLDER, Facts, Volume
from dist_transformer.preflight.network import by_value, differences, hosts_of, judge_network
from dist_transformer.runtime.rendezvous import as_ranges

_GIB = 2**30
# Memory of one process without its model: Python, torch and DeepSpeed take about half a GiB.
_LEAST_MEMORY, _GOOD_MEMORY = 1 * _GIB, 4 * _GIB
# Open files of rank 0, which has a connection to every rank: 165 were measured at 64 ranks, and 293 at 128, without
# those of data and libraries.
_FILES, _FILES_PER_RANK = 200, 2
_LEAST_SCRATCH, _GOOD_SCRATCH = _GIB // 4, 2 * _GIB
# Containers have 64 MiB of /dev/shm by default, and NCCL needs more.
_GOOD_SHARED_MEMORY = _GIB // 2
# A CUDA context takes about half a GiB.
_CONTEXT = _GIB
# Share of the median rate that every GPU must reach. Equal cards in one room differ by a few percent.
_EVEN_RATES = 0.9


def judge(facts: Sequence[Facts], *, run_gib: float, verified: bool = False) -> list[Check]:
    """Check whether the job is fit to start.

    Args:
        facts: facts of all ranks, in order.
        run_gib: free GiB that the run folder must have.
        verified: the hashes of the data were checked.
    """
    return [
        _ranks(facts),
        _versions(facts),
        _code(facts),
        _gpus(facts),
        *_gpu_memory(facts),
        *_gpu_rates(facts),
        _cpus(facts),
        *_load(facts),
        _memory(facts),
        _open_files(facts),
        *judge_network(facts),
        *_volumes(facts, run_gib),
        *_shared_folder(facts),
        *_data(facts, verified=verified),
    ]


def _ranks(facts: Sequence[Facts]) -> Check:
    nodes = by_value(facts, lambda fact: fact.host)
    where = ", ".join(f"{host} ({as_ranges([fact.rank for fact in group])})" for host, group in nodes.items())
    found = f"{len(facts)} on {len(nodes)} node{'s' * (len(nodes) > 1)}: {where}"
    if len({len(group) for group in nodes.values()}) > 1:
        remedy = "start the same number of processes on each node: the node with most sets the pace"
        return Check(name="ranks", found=found, state="warn", remedy=remedy)
    return Check(name="ranks", found=found)


def _versions(facts: Sequence[Facts]) -> Check:
    names = dict.fromkeys(name for fact in facts for name in fact.versions)

    def versions_of(name: str) -> str:
        return f"{name} {differences(facts, lambda fact: fact.versions.get(name, 'not installed'))}"

    apart = [versions_of(name) for name in names if len({fact.versions.get(name) for fact in facts}) > 1]
    if apart:
        remedy = "install the same versions on all nodes; one environment on a shared disk is best"
        return Check(name="versions", found="; ".join(apart), state="fail", remedy=remedy)
    missing = [name for name, found in facts[0].versions.items() if found == "not installed"]
    found = ", ".join(f"{name} {facts[0].versions[name]}" for name in names)
    if missing:
        remedy = f"install {missing[0]} in the environment that the job uses: pip install -e ."
        return Check(name="versions", found=found, state="fail", remedy=remedy)
    return Check(name="versions", found=found)


def _code(facts: Sequence[Facts]) -> Check:
    if len({fact.code for fact in facts}) > 1:
        found = differences(facts, lambda fact: fact.code)
        remedy = "bring all nodes to the same revision; one checkout on a shared disk is best"
        return Check(name="code", found=found, state="fail", remedy=remedy)
    return Check(name="code", found=f"{facts[0].code} (hash of the package's files)")


def _gpus(facts: Sequence[Facts]) -> Check:
    if not any(fact.gpus_visible or fact.gpus_present for fact in facts):
        return Check(name="GPUs", found="none: training runs on CPU cores")
    for found, remedy in _gpu_problems(facts):
        return Check(name="GPUs", found=found, state="fail", remedy=remedy)
    return _gpu_kinds(facts)


def _gpu_problems(facts: Sequence[Facts]) -> Iterator[tuple[str, str]]:
    """Yield findings and their remedies. The first one causes those after it."""
    if blind := [fact for fact in facts if fact.gpus_present and not fact.gpus_visible]:
        build = f"CUDA {blind[0].built_for}" if blind[0].built_for else "CPUs"
        yield (
            f"{blind[0].gpus_present} in {hosts_of(blind)}, but torch sees none: it is built for {build}, and the "
            f"driver is {blind[0].driver or 'not known'}",
            "install a torch built for a CUDA version that the driver supports (nvidia-smi): CUDA 13 needs driver 580 "
            "or newer, CUDA 12 needs 525; also check CUDA_VISIBLE_DEVICES, and ask the scheduler for GPUs",
        )
    if len({fact.gpus_visible for fact in facts}) > 1:
        found = differences(facts, lambda fact: f"{fact.gpus_visible} visible")
        yield found, "exclude the node with missing GPUs, or repair it"
    if without := [fact for fact in facts if fact.gpu is None]:
        yield (
            f"local rank {without[0].local_rank} on {without[0].host} has none of {without[0].gpus_visible}",
            "start one process per GPU, and let each see all GPUs of its node (srun: --gpus-per-node, no --gpu-bind)",
        )
    for fact in facts:
        if fact.gpu is not None and fact.gpu.problem:
            yield f"rank {fact.rank} on {fact.host}: {fact.gpu.problem}", f"exclude {fact.host}, and have it checked"
    for group in by_value(facts, lambda fact: fact.gpu and fact.gpu.uuid).values():
        if len(group) > 1:
            ranks = as_ranges([fact.rank for fact in group])
            yield f"ranks {ranks} on {group[0].host} use the same GPU", "start one process per GPU"


def _gpu_kinds(facts: Sequence[Facts]) -> Check:
    def describe(fact: Facts) -> str:
        assert fact.gpu is not None
        bf16 = "bf16" if fact.gpu.has_bf16 else "no bf16"
        return f"{fact.gpu.name}, {fact.gpu.total_bytes / _GIB:.0f} GiB, {bf16}, driver {fact.driver or 'not known'}"

    found = differences(facts, describe) if len(by_value(facts, describe)) > 1 else describe(facts[0])
    per_node = f"{facts[0].gpus_visible} per node, one per rank: {found}"
    if any(fact.gpu and not fact.gpu.has_bf16 for fact in facts):
        remedy = "train with --precision fp32: these GPUs have no bf16"
        return Check(name="GPUs", found=per_node, state="warn", remedy=remedy)
    if len(by_value(facts, describe)) > 1:
        remedy = "use nodes of one kind, with one driver: the slowest GPU sets the pace"
        return Check(name="GPUs", found=per_node, state="warn", remedy=remedy)
    on_node = len([fact for fact in facts if fact.host == facts[0].host])
    if on_node < facts[0].gpus_visible:
        found = f"{found}; {facts[0].gpus_visible} per node, of which {on_node} are used"
        return Check(name="GPUs", found=found, state="warn", remedy="start one process for each GPU")
    return Check(name="GPUs", found=per_node)


def _gpu_memory(facts: Sequence[Facts]) -> Iterator[Check]:
    gpus = [(fact, fact.gpu) for fact in facts if fact.gpu is not None]
    if not gpus:
        return
    fact, gpu = max(gpus, key=lambda pair: pair[1].used_bytes)
    found = f"at most {gpu.used_bytes / _GIB:.1f} GiB in use before training"
    if gpu.used_bytes > _CONTEXT:
        yield Check(
            name="GPU memory",
            found=f"{found}: rank {fact.rank} on {fact.host}",
            state="warn",
            remedy=f"find its users on {fact.host} (nvidia-smi), and end processes that were left running",
        )
    else:
        yield Check(name="GPU memory", found=found)


def _gpu_rates(facts: Sequence[Facts]) -> Iterator[Check]:
    """Report the slowest GPU, which sets the pace of all."""
    rates = [(fact.gpu.tflops, fact) for fact in facts if fact.gpu is not None and fact.gpu.tflops is not None]
    if not rates:
        return
    middle = median_high(rate for rate, _ in rates)
    slowest, fact = min(rates, key=lambda pair: pair[0])
    yield Check(
        name="GPU speed",
        found=f"at least {slowest:,.0f} TFLOP/s in products (rank {fact.rank} on {fact.host}), median {middle:,.0f}",
        state="warn" if slowest < _EVEN_RATES * middle else "ok",
        remedy=f"it slows all ranks down: look at its clocks, temperature and users (nvidia-smi -q -d PERFORMANCE), or "
        f"exclude {fact.host}",
    )


def _cpus(facts: Sequence[Facts]) -> Check:
    lowest = min(facts, key=lambda fact: fact.cpus)
    found = f"at least {lowest.cpus} per process ({lowest.host})"
    gpus = [(fact, fact.gpu) for fact in facts if fact.gpu is not None]
    known = [(fact, gpu.cpus_beside) for fact, gpu in gpus if gpu.cpus_beside is not None]
    if not known:
        return Check(name="CPUs", found=found)
    far = [fact for fact, count in known if count == 0]
    if not far:
        return Check(name="CPUs", found=f"{found}, {min(count for _, count in known)} of them close to its GPU")
    return Check(
        name="CPUs",
        found=f"{found}; none close to the GPU of rank {as_ranges([fact.rank for fact in far])} on {hosts_of(far)}",
        state="warn",
        remedy="let each process use all CPUs of the job (srun --cpu-bind=none), and ask for whole nodes (--exclusive)",
    )


def _load(facts: Sequence[Facts]) -> Iterator[Check]:
    """Report the load of the busiest node."""
    known = [(fact, fact.load) for fact in facts if fact.load is not None]
    if not known:
        return
    busiest, (load, cores) = max(known, key=lambda each: each[1][0] / each[1][1])
    found = f"at most {load:.1f} on {cores} core(s) ({busiest.host})"
    if load <= cores:
        yield Check(name="load", found=found)
        return
    remedy = (
        f"other work slows {busiest.host} down: let it end, use another machine, or train on CPUs with fewer threads "
        "(OMP_NUM_THREADS)"
    )
    yield Check(name="load", found=found, state="warn", remedy=remedy)


def _least(facts: Sequence[Facts], value: Callable[[Facts], float], least: float, good: float) -> tuple[Facts, str]:
    lowest = min(facts, key=value)
    state = "fail" if value(lowest) < least else "warn" if value(lowest) < good else "ok"
    return lowest, state


def _memory(facts: Sequence[Facts]) -> Check:
    lowest, state = _least(facts, lambda fact: fact.available_bytes, _LEAST_MEMORY, _GOOD_MEMORY)
    found = f"at least {lowest.available_bytes / _GIB:.1f} GiB free per process ({lowest.host})"
    remedy = "ask for more memory (sbatch --mem), start fewer processes, or end other programs there"
    return Check(name="memory", found=found, state=state, remedy=remedy)  # type: ignore[arg-type]


def _open_files(facts: Sequence[Facts]) -> Check:
    needed = _FILES + _FILES_PER_RANK * len(facts)
    lowest, state = _least(facts, lambda fact: fact.open_files, needed, 2 * needed)
    found = f"at least {lowest.open_files:,} per process ({lowest.host}), and about {needed:,} are needed"
    remedy = f"raise the hard limit to {4 * needed} (ulimit -Hn; LimitNOFILE for slurmd, Docker: --ulimit nofile)"
    return Check(name="open files", found=found, state=state, remedy=remedy)  # type: ignore[arg-type]


def _volumes(facts: Sequence[Facts], run_gib: float) -> Iterator[Check]:
    remedies = {
        RUN_FOLDER: "free space, or choose another --run-dir; dist-transformer plan prints what a run needs",
        TEMPORARY_FOLDER: "free space, or set TMPDIR to a folder with more space",
        CACHE: "free space, or choose another --cache-dir",
        SHARED_MEMORY: "remove files of ended jobs there; in a container: --shm-size=8g, or mount the host's",
    }
    limits = {
        RUN_FOLDER: (run_gib * _GIB, run_gib * _GIB),
        TEMPORARY_FOLDER: (_LEAST_SCRATCH, _GOOD_SCRATCH),
        CACHE: (_LEAST_SCRATCH, _GOOD_SCRATCH),
        SHARED_MEMORY: (0, _GOOD_SHARED_MEMORY),
    }
    for name in (RUN_FOLDER, TEMPORARY_FOLDER, CACHE, SHARED_MEMORY):
        if name in facts[0].volumes:
            yield _volume(name, [(fact, fact.volumes[name]) for fact in facts], limits[name], remedies[name])


def _volume(name: str, seen: Sequence[tuple[Facts, Volume]], limits: tuple[float, float], remedy: str) -> Check:
    bad = [(fact, volume) for fact, volume in seen if volume.problem]
    if bad:
        fact, volume = bad[0]
        found = f"{volume.problem}; rank {fact.rank} on {fact.host}"
        return Check(name=name, found=found, state="fail", remedy=f"correct the path or its permissions; {remedy}")
    free = {fact.rank: volume.free_bytes for fact, volume in seen}
    lowest, state = _least([fact for fact, _ in seen], lambda fact: free[fact.rank], *limits)
    found = f"{free[lowest.rank] / _GIB:,.1f} GiB free in {seen[0][1].path} ({lowest.host})"
    if state == "fail":
        found += f", and {limits[0] / _GIB:g} are needed"
    return Check(name=name, found=found, state=state, remedy=remedy)  # type: ignore[arg-type]


def _shared_folder(facts: Sequence[Facts]) -> Iterator[Check]:
    seen = [(fact, fact.shared) for fact in facts if fact.shared is not None]
    if not seen:
        return
    blind = [fact for fact, shared in seen if not shared.sees_rank_0 or not shared.seen_by_rank_0]
    if blind:
        yield Check(
            name="run folder shared",
            state="fail",
            found=f"rank 0 does not share files with rank {as_ranges([fact.rank for fact in blind])} "
            f"on {hosts_of(blind)}",
            remedy="choose a --run-dir on a disk that all nodes mount at the same path and can write to",
        )
        return
    yield Check(name="run folder shared", found="rank 0 and all other ranks see each other's files")
    loose = [(fact, shared) for fact, shared in seen if shared.lock != "held"]
    if not loose:
        yield Check(name="file locks", found="hold between all ranks")
        return
    fact, shared = loose[0]
    near = fact.host == facts[0].host
    what = "rank 0's lock did not hold" if shared.lock == "free" else f"locks fail ({shared.lock})"
    yield Check(
        name="file locks",
        state="fail" if near else "warn",
        found=f"{what} for rank {fact.rank} on {fact.host}",
        remedy="mount the run folder with locks (NFS: without nolock or local_lock), or choose another --run-dir",
    )


def _data(facts: Sequence[Facts], *, verified: bool) -> Iterator[Check]:
    for number, first in enumerate(facts[0].data):
        seen = [(fact, fact.data[number]) for fact in facts]
        bad = [(fact, data) for fact, data in seen if data.problem]
        hashes = {data.index_sha256[:12]: fact.host for fact, data in seen}
        if bad:
            fact, data = bad[0]
            yield Check(
                name="data",
                state="fail",
                found=f"rank {fact.rank} on {fact.host}: {data.problem}",
                remedy="use a folder made by dist-transformer prepare, at a path that all nodes see",
            )
        elif len(hashes) > 1:
            yield Check(
                name="data",
                state="fail",
                found=f"{first.place}: index " + "; ".join(f"{found} on {host}" for found, host in hashes.items()),
                remedy="copy the folder again to the nodes where it differs",
            )
        else:
            total = sum(data.verified_files for _, data in seen)
            text = f"; hashes of {total:,} files are right" if verified and total else ""
            yield Check(name="data", found=f"{first.place}: index {first.index_sha256[:12]}{text}")
