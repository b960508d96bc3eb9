"""Judgement of the facts of all ranks: one line per check, with a remedy if the job is not fit to start."""

from collections.abc import Callable, Iterator, Sequence
from operator import itemgetter
from statistics import median_high

from dist_transformer.base.checks import Check
from dist_transformer.preflight.facts import CACHE, RUN_FOLDER, SHARED_MEMORY, TEMPORARY_FOLDER, Facts
from dist_transformer.preflight.network_checks import (
    Finding,
    State,
    by_value,
    differ,
    differences,
    hosts_of,
    judge_network,
)
from dist_transformer.runtime.rendezvous import as_ranges

_GIB = 2**30
# GiB of one process without its model: Python, torch and DeepSpeed take about half a GiB.
_LEAST_MEMORY, _GOOD_MEMORY = 1, 4
# Open files of rank 0, which has a connection to every rank: 165 were measured at 64 ranks, and 293 at 128, without
# those of data and libraries.
_FILES, _FILES_PER_RANK = 200, 2
# GiB that a folder must have and should have, and the remedy. The run folder's are a setting.
_VOLUMES = {
    RUN_FOLDER: (0, 0, "free space, or choose another --run-dir; dist-transformer plan prints what a run needs"),
    TEMPORARY_FOLDER: (0.25, 2, "free space, or set TMPDIR to a folder with more space"),
    CACHE: (0.25, 2, "free space, or choose another --cache-dir"),
    # Containers have 64 MiB of /dev/shm by default, and NCCL needs more.
    SHARED_MEMORY: (0, 0.5, "remove files of ended jobs there; in a container: --shm-size=8g, or mount the host's"),
}
# A CUDA context takes about half a GiB.
_CONTEXT = _GIB
# Share of the median rate that every GPU must reach. Equal cards in one room differ by a few percent.
_EVEN_RATES = 0.9


def judge(facts: Sequence[Facts], *, run_gib: float) -> list[Check]:
    """Check whether the job is fit to start.

    Args:
        facts: facts of all ranks, in order.
        run_gib: free GiB that the run folder must have.
    """
    rows: list[tuple[str, Finding | None]] = [
        ("ranks", _ranks(facts)),
        ("versions", _versions(facts)),
        ("code", _code(facts)),
        ("GPUs", _gpus(facts)),
        ("GPU memory", _gpu_memory(facts)),
        ("GPU speed", _gpu_speed(facts)),
        ("CPUs", _cpus(facts)),
        ("load", _load(facts)),
        ("memory", _memory(facts)),
        ("open files", _open_files(facts)),
        *judge_network(facts),
        *((name, _volume(facts, name, run_gib)) for name in _VOLUMES if name in facts[0].volumes),
        *_shared_folder(facts),
        *(("data", _data(facts, number)) for number in range(len(facts[0].data))),
    ]
    return [Check(name=name, state=row[0], found=row[1], remedy=row[2]) for name, row in rows if row]


def _ranks(facts: Sequence[Facts]) -> Finding:
    nodes = by_value(facts, lambda fact: fact.host)
    where = ", ".join(f"{host} ({as_ranges([fact.rank for fact in group])})" for host, group in nodes.items())
    found = f"{len(facts)} on {len(nodes)} node{'s' * (len(nodes) > 1)}: {where}"
    if len({len(group) for group in nodes.values()}) > 1:
        return "warn", found, "start the same number of processes on each node: the node with most sets the pace"
    return "ok", found, ""


def _versions(facts: Sequence[Facts]) -> Finding:
    def version_of(name: str) -> Callable[[Facts], str]:
        return lambda fact: fact.versions.get(name, "not installed")

    names = dict.fromkeys(name for fact in facts for name in fact.versions)
    apart = [name for name in names if differ(facts, version_of(name))]
    if apart:
        found = "; ".join(f"{name} {differences(facts, version_of(name))}" for name in apart)
        return "fail", found, "install the same versions on all nodes; one environment on a shared disk is best"
    found = ", ".join(f"{name} {version}" for name, version in facts[0].versions.items())
    if missing := [name for name, version in facts[0].versions.items() if version == "not installed"]:
        return "fail", found, f"install {missing[0]} in the environment that the job uses: pip install -e ."
    return "ok", found, ""


def _code(facts: Sequence[Facts]) -> Finding:
    found = differences(facts, lambda fact: fact.code)
    if differ(facts, lambda fact: fact.code):
        return "fail", found, "bring all nodes to the same revision; one checkout on a shared disk is best"
    return "ok", f"{found} (hash of the package's files)", ""


def _gpus(facts: Sequence[Facts]) -> Finding:
    if not any(fact.gpus_visible or fact.gpus_present for fact in facts):
        return "ok", "none: training runs on CPU cores", ""
    for found, remedy in _gpu_problems(facts):
        return "fail", found, remedy
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
    if differ(facts, lambda fact: fact.gpus_visible):
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


def _gpu_kinds(facts: Sequence[Facts]) -> Finding:
    def describe(fact: Facts) -> str:
        assert fact.gpu is not None
        bf16 = "bf16" if fact.gpu.has_bf16 else "no bf16"
        return f"{fact.gpu.name}, {fact.gpu.total_bytes / _GIB:.0f} GiB, {bf16}, driver {fact.driver or 'not known'}"

    found, visible = differences(facts, describe), facts[0].gpus_visible
    per_node = f"{visible} per node, one per rank: {found}"
    if any(fact.gpu and not fact.gpu.has_bf16 for fact in facts):
        return "warn", per_node, "train with --precision fp32: these GPUs have no bf16"
    if differ(facts, describe):
        return "warn", per_node, "use nodes of one kind, with one driver: the slowest GPU sets the pace"
    used = len([fact for fact in facts if fact.host == facts[0].host])
    if used < visible:
        return "warn", f"{found}; {visible} per node, of which {used} are used", "start one process for each GPU"
    return "ok", per_node, ""


def _gpu_memory(facts: Sequence[Facts]) -> Finding | None:
    gpus = [(fact.gpu.used_bytes, fact) for fact in facts if fact.gpu is not None]
    if not gpus:
        return None
    used, fact = max(gpus, key=itemgetter(0))
    found = f"at most {used / _GIB:.1f} GiB in use before training"
    if used <= _CONTEXT:
        return "ok", found, ""
    remedy = f"find its users on {fact.host} (nvidia-smi), and end processes that were left running"
    return "warn", f"{found}: rank {fact.rank} on {fact.host}", remedy


def _gpu_speed(facts: Sequence[Facts]) -> Finding | None:
    """Report the slowest GPU, which sets the pace of all."""
    rates = [(fact.gpu.tflops, fact) for fact in facts if fact.gpu is not None and fact.gpu.tflops is not None]
    if not rates:
        return None
    middle = median_high(rate for rate, _ in rates)
    slowest, fact = min(rates, key=itemgetter(0))
    found = f"at least {slowest:,.0f} TFLOP/s in products (rank {fact.rank} on {fact.host}), median {middle:,.0f}"
    if slowest >= _EVEN_RATES * middle:
        return "ok", found, ""
    see = "look at its clocks, temperature and users (nvidia-smi -q -d PERFORMANCE)"
    return "warn", found, f"it slows all ranks down: {see}, or exclude {fact.host}"


def _cpus(facts: Sequence[Facts]) -> Finding:
    lowest = min(facts, key=lambda fact: fact.cpus)
    found = f"at least {lowest.cpus} per process ({lowest.host})"
    near = [(fact.gpu.near_cpus, fact) for fact in facts if fact.gpu is not None and fact.gpu.near_cpus is not None]
    if far := [fact for count, fact in near if count == 0]:
        found += f"; none close to the GPU of rank {as_ranges([fact.rank for fact in far])} on {hosts_of(far)}"
        remedy = (
            "let each process use all CPUs of the job (srun --cpu-bind=none), and ask for whole nodes (--exclusive)"
        )
        return "warn", found, remedy
    return "ok", f"{found}, {min(near, key=itemgetter(0))[0]} of them close to its GPU" if near else found, ""


def _load(facts: Sequence[Facts]) -> Finding | None:
    """Report the load of the busiest node."""
    known = [(*fact.load, fact) for fact in facts if fact.load is not None]
    if not known:
        return None
    load, cores, busiest = max(known, key=lambda each: each[0] / each[1])
    found = f"at most {load:.1f} on {cores} core(s) ({busiest.host})"
    remedies = "let it end, use another machine, or train on CPUs with fewer threads (OMP_NUM_THREADS)"
    return "ok" if load <= cores else "warn", found, f"other work slows {busiest.host} down: {remedies}"


def _state(value: float, least: float, good: float) -> State:
    return "fail" if value < least else "warn" if value < good else "ok"


def _memory(facts: Sequence[Facts]) -> Finding:
    lowest = min(facts, key=lambda fact: fact.available_bytes)
    free = lowest.available_bytes / _GIB
    found = f"at least {free:.1f} GiB free per process ({lowest.host})"
    remedy = "ask for more memory (sbatch --mem), start fewer processes, or end other programs there"
    return _state(free, _LEAST_MEMORY, _GOOD_MEMORY), found, remedy


def _open_files(facts: Sequence[Facts]) -> Finding:
    needed = _FILES + _FILES_PER_RANK * len(facts)
    lowest = min(facts, key=lambda fact: fact.open_files)
    found = f"at least {lowest.open_files:,} per process ({lowest.host}), and about {needed:,} are needed"
    remedy = f"raise the hard limit to {4 * needed} (ulimit -Hn; LimitNOFILE for slurmd, Docker: --ulimit nofile)"
    return _state(lowest.open_files, needed, 2 * needed), found, remedy


def _volume(facts: Sequence[Facts], name: str, run_gib: float) -> Finding:
    least, good, remedy = _VOLUMES[name]
    if name == RUN_FOLDER:
        least = good = run_gib
    for fact in facts:
        if problem := fact.volumes[name].problem:
            found = f"{problem}; rank {fact.rank} on {fact.host}"
            return "fail", found, f"correct the path or its permissions; {remedy}"
    lowest = min(facts, key=lambda fact: fact.volumes[name].free_bytes)
    free = lowest.volumes[name].free_bytes / _GIB
    found, state = f"{free:,.1f} GiB free in {facts[0].volumes[name].path} ({lowest.host})", _state(free, least, good)
    return state, f"{found}, and {least:g} are needed" if state == "fail" else found, remedy


def _shared_folder(facts: Sequence[Facts]) -> Iterator[tuple[str, Finding]]:
    seen = [(fact, fact.shared) for fact in facts if fact.shared is not None]
    if not seen:
        return
    if blind := [fact for fact, shared in seen if not shared.sees_rank_0 or not shared.seen_by_rank_0]:
        ranks = as_ranges([fact.rank for fact in blind])
        found = f"rank 0 does not share files with rank {ranks} on {hosts_of(blind)}"
        remedy = "choose a --run-dir on a disk that all nodes mount at the same path and can write to"
        yield "run folder shared", ("fail", found, remedy)
        return
    yield "run folder shared", ("ok", "rank 0 and all other ranks see each other's files", "")
    fact, lock = next(((fact, shared.lock) for fact, shared in seen if shared.lock != "held"), (facts[0], "held"))
    if lock == "held":
        yield "file locks", ("ok", "hold between all ranks", "")
        return
    what = "rank 0's lock did not hold" if lock == "free" else f"locks fail ({lock})"
    found = f"{what} for rank {fact.rank} on {fact.host}"
    remedy = "mount the run folder with locks (NFS: without nolock or local_lock), or choose another --run-dir"
    yield "file locks", ("fail" if fact.host == facts[0].host else "warn", found, remedy)


def _data(facts: Sequence[Facts], number: int) -> Finding:
    seen = [(fact, fact.data[number]) for fact in facts]
    for fact, data in seen:
        if data.problem:
            remedy = "use a folder made by dist-transformer prepare, at a path that all nodes see"
            return "fail", f"rank {fact.rank} on {fact.host}: {data.problem}", remedy
    found = f"{seen[0][1].place}: index "
    hashes = {data.index_sha256[:12]: fact.host for fact, data in seen}
    if len(hashes) > 1:
        found += "; ".join(f"{sha256} on {host}" for sha256, host in hashes.items())
        return "fail", found, "copy the folder again to the nodes where it differs"
    total = sum(data.verified_files for _, data in seen)
    text = f"; hashes of {total:,} files are right" if total else ""
    return "ok", f"{found}{seen[0][1].index_sha256[:12]}{text}", ""
