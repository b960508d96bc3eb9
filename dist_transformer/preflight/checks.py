"""Judgement of the facts of all ranks: one line per check, with a remedy if the job is not fit to start."""

from collections.abc import Callable, Iterator, Sequence
from operator import itemgetter
from typing import Literal

from dist_transformer.base.checks import Check
from dist_transformer.preflight.facts import CACHE, RUN_FOLDER, SHARED_MEMORY, TEMPORARY_FOLDER, Facts
from dist_transformer.runtime.rendezvous import as_ranges

State = Literal["ok", "warn", "fail"]
Finding = tuple[State, str, str]
"""State, finding, and remedy, which is shown unless the state is ok."""

_GIB = 2**30
# GiB of one process without its model: Python, torch and DeepSpeed take about half a GiB.
_LEAST_MEMORY, _GOOD_MEMORY = 1, 4
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
# GB/s between GPUs; below this rate, NCCL certainly uses TCP.
_SLOW_NCCL = 5.0
# Share of the ports' nominal rate that a large all-reduce must reach. Sound clusters reach 0.7 to 0.9.
_LEAST_SHARE, _LARGE = 0.4, 2**28
# NCCL's name of TCP.
_TCP = "Socket"
# NCCL locks some MiB per channel and peer; the common default of 8 MiB is too little even for the first.
_LEAST_LOCKED = 64 * 2**20


def judge(facts: Sequence[Facts], *, run_gib: float) -> list[Check]:
    """Check whether the job is fit to start.

    Args:
        facts: facts of all ranks, in order.
        run_gib: free GiB that the run folder must have.
    """
    rows: list[tuple[str, Finding | None]] = [
        ("ranks", _ranks(facts)),
        ("versions", _versions(facts)),
        ("GPUs", next(_gpus(facts))),
        ("GPU memory", _gpu_memory(facts)),
        ("memory", _memory(facts)),
        ("MASTER_ADDR", _address(facts)),
        ("NCCL settings", _settings(facts)),
    ]
    if len(by_value(facts, lambda fact: fact.host)) > 1:
        if all(fact.gpu is not None for fact in facts):
            rows += [("InfiniBand", _infiniband(facts)), ("locked memory", _locked_memory(facts))]
        rows.append(("NCCL network", _transport(facts)))
    rows += [
        *_reductions(facts),
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
    names = dict.fromkeys(name for fact in facts for name in fact.versions)
    found = {
        name: differences(facts, lambda fact, name=name: str(fact.versions.get(name, "not installed")))  # type: ignore[misc]
        for name in names
    }
    if apart := [f"{name} {text}" for name, (text, differ) in found.items() if differ]:
        remedy = "install the same versions and code on all nodes; one environment on a shared disk is best"
        return "fail", "; ".join(apart), remedy
    text = ", ".join(f"{name} {version}" for name, version in facts[0].versions.items())
    if missing := [name for name, version in facts[0].versions.items() if version == "not installed"]:
        return "fail", text, f"install {missing[0]} in the environment that the job uses: pip install -e ."
    return "ok", f"{text} (hash of the package's files)", ""


def _gpus(facts: Sequence[Facts]) -> Iterator[Finding]:
    """Yield findings, of which the first one causes those after it."""
    if not any(fact.gpus_visible or fact.gpus_present for fact in facts):
        yield "ok", "none: training runs on CPU cores", ""
    if blind := [fact for fact in facts if fact.gpus_present and not fact.gpus_visible]:
        build = f"CUDA {blind[0].built_for}" if blind[0].built_for else "CPUs"
        yield (
            "fail",
            f"{blind[0].gpus_present} in {hosts_of(blind)}, but torch sees none: it is built for {build}, and the "
            f"driver is {blind[0].driver or 'not known'}",
            "install a torch built for a CUDA version that the driver supports (nvidia-smi): CUDA 13 needs driver 580 "
            "or newer, CUDA 12 needs 525; also check CUDA_VISIBLE_DEVICES, and ask the scheduler for GPUs",
        )
    found, differ = differences(facts, lambda fact: f"{fact.gpus_visible} visible")
    if differ:
        yield "fail", found, "exclude the node with missing GPUs, or repair it"
    visible = facts[0].gpus_visible
    if without := [fact for fact in facts if fact.gpu is None]:
        yield (
            "fail",
            f"local rank {without[0].local_rank} on {without[0].host} has none of {without[0].gpus_visible}",
            "start one process per GPU, and let each see all GPUs of its node (srun: --gpus-per-node, no --gpu-bind)",
        )
    seen = [(fact, fact.gpu) for fact in facts if fact.gpu is not None]
    for fact, gpu in seen:
        if gpu.problem:
            yield "fail", f"rank {fact.rank} on {fact.host}: {gpu.problem}", f"exclude {fact.host}, and have it checked"
    for group in by_value(facts, lambda fact: fact.gpu and fact.gpu.uuid).values():
        if len(group) > 1:
            ranks = as_ranges([fact.rank for fact in group])
            yield "fail", f"ranks {ranks} on {group[0].host} use the same GPU", "start one process per GPU"

    def describe(fact: Facts) -> str:
        assert fact.gpu is not None
        bf16 = "bf16" if fact.gpu.has_bf16 else "no bf16"
        return f"{fact.gpu.name}, {fact.gpu.total_bytes / _GIB:.0f} GiB, {bf16}, driver {fact.driver or 'not known'}"

    found, differ = differences(facts, describe)
    per_node = f"{visible} per node, one per rank: {found}"
    if not all(gpu.has_bf16 for _, gpu in seen):
        yield "warn", per_node, "train with --precision fp32: these GPUs have no bf16"
    if differ:
        yield "warn", per_node, "use nodes of one kind, with one driver: the slowest GPU sets the pace"
    used = len([fact for fact in facts if fact.host == facts[0].host])
    if used < visible:
        yield "warn", f"{found}; {visible} per node, of which {used} are used", "start one process for each GPU"
    yield "ok", per_node, ""


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


def _state(value: float, least: float, good: float) -> State:
    return "fail" if value < least else "warn" if value < good else "ok"


def _memory(facts: Sequence[Facts]) -> Finding:
    lowest = min(facts, key=lambda fact: fact.available_bytes)
    free = lowest.available_bytes / _GIB
    found = f"at least {free:.1f} GiB free per process ({lowest.host})"
    remedy = "ask for more memory (sbatch --mem), start fewer processes, or end other programs there"
    return _state(free, _LEAST_MEMORY, _GOOD_MEMORY), found, remedy


def _address(facts: Sequence[Facts]) -> Finding | None:
    master = facts[0].master
    if not master:
        return None
    if lost := [fact for fact in facts if not fact.master_addresses]:
        remedy = "fix name resolution there, or export MASTER_ADDR as an IP address"
        return "fail", f"{master} does not resolve on {hosts_of(lost)}", remedy
    for fact in facts:
        # On the node of rank 0, its own name may resolve to a loopback address.
        if fact.host != facts[0].host and any(it == "::1" or it.startswith("127.") for it in fact.master_addresses):
            remedy = "remove its name from 127.0.1.1 in /etc/hosts, or export MASTER_ADDR as an IP address"
            return "warn", f"{master} is {fact.host} itself on {fact.host}", remedy
    return "ok", f"{master}: {', '.join(facts[0].master_addresses)}", ""


def _settings(facts: Sequence[Facts]) -> Finding | None:
    """Check that NCCL's and gloo's variables are the same on all ranks and name interfaces that exist."""
    for fact in facts:
        setting = dict(word.split("=", 1) for word in fact.nccl_settings).get("NCCL_SOCKET_IFNAME", "")
        if setting and not names_an_interface(setting, fact.interfaces):
            found = f"NCCL_SOCKET_IFNAME={setting} names none of {', '.join(fact.interfaces)} on {fact.host}"
            return "fail", found, "set it to one of those, or unset it"
    found, differ = differences(facts, lambda fact: " ".join(fact.nccl_settings) or "none")
    if differ:
        remedy = "set NCCL's variables in one place for all ranks (slurm/cluster.env), or unset them"
        return "warn", found, remedy
    return ("ok", found, "") if facts[0].nccl_settings else None


def names_an_interface(setting: str, interfaces: Sequence[str]) -> bool:
    """Check whether NCCL_SOCKET_IFNAME selects an interface: prefixes; `=`: exact names; `^`: names to exclude."""
    excludes = setting.startswith("^")
    exact = setting.lstrip("^").startswith("=")
    names = setting.lstrip("^").lstrip("=").split(",")

    def matches(interface: str) -> bool:
        return any(interface == name if exact else interface.startswith(name) for name in names if name)

    return any(matches(interface) != excludes for interface in interfaces)


def _infiniband(facts: Sequence[Facts]) -> Finding:
    """Check that all nodes have the same ports."""

    def describe(fact: Facts) -> str:
        active = [port.rate for port in fact.ports if port.is_active]
        rates = ", ".join(f"{active.count(rate)} x {rate}" for rate in dict.fromkeys(active))
        return rates or "no active port"

    found, differ = differences(facts, describe)
    if differ:
        return "warn", found, "exclude the node that has less, or have its links checked (ibstat)"
    if not any(port.is_active for port in facts[0].ports):
        return "warn", found, "NCCL uses TCP: if the nodes have InfiniBand, open /dev/infiniband to the container"
    return "ok", found, ""


def _locked_memory(facts: Sequence[Facts]) -> Finding | None:
    if not any(port.is_active for fact in facts for port in fact.ports):
        return None
    limited = [(fact.locked_bytes, fact.host) for fact in facts if fact.locked_bytes is not None]
    if not limited:
        return "ok", "no limit", ""
    least, host = min(limited)
    found = f"at most {least / 2**20:,.0f} MiB per process ({host}): NCCL locks memory for InfiniBand"
    lift = "LimitMEMLOCK=infinity for slurmd, and PropagateResourceLimitsExcept=MEMLOCK in slurm.conf"
    remedy = f"ask the cluster's administrators to lift the limit ({lift}); Docker: --ulimit memlock=-1"
    return "fail" if least < _LEAST_LOCKED else "warn", found, remedy


def _transport(facts: Sequence[Facts]) -> Finding | None:
    """Report the network that NCCL uses between nodes, if it stated one."""
    known = dict.fromkeys(fact.network for fact in facts if fact.network)
    on_tcp = [fact for fact in facts if fact.network == _TCP]
    fast = [port for fact in on_tcp for port in fact.ports if port.is_active]
    if not fast:
        return ("ok", ", ".join(known), "") if known else None
    found = f"TCP sockets on {hosts_of(on_tcp)}, although {fast[0].name} ({fast[0].rate}) is there"
    install = "install libibverbs1 and ibverbs-providers, for EFA aws-ofi-nccl in LD_LIBRARY_PATH"
    unset = "unset NCCL_IB_DISABLE, NCCL_NET and NCCL_IB_HCA, open /dev/infiniband to the container"
    return "warn", found, f"{install}; {unset}, and look for the reason with NCCL_DEBUG=INFO"


def _reductions(facts: Sequence[Facts]) -> Iterator[tuple[str, Finding]]:
    # NCCL uses all InfiniBand ports of a node at once; the node with the slowest ones sets the pace. In GB/s.
    nodes = [group[0] for group in by_value(facts, lambda fact: fact.host).values()]
    rates = (sum(float(port.rate.split()[0]) / 8 for port in node.ports if port.is_active) for node in nodes)
    nominal = min(rates) if len(nodes) > 1 else 0
    for number, reduction in enumerate(facts[0].reductions):
        mine = [fact.reductions[number] for fact in facts]
        seconds = max(one.seconds for one in mine)
        speed = reduction.bytes / seconds / 1e9
        check = f"all-reduce {reduction.bytes // 2**20} MiB"
        found = f"{reduction.backend}: {speed:.2f} GB/s algorithm bandwidth, {1000 * seconds:.1f} ms"
        on_nccl = reduction.backend == "nccl"
        is_slow = on_nccl and reduction.bytes >= 2**25 and speed < _SLOW_NCCL
        if on_nccl and reduction.bytes >= _LARGE and nominal:
            # A ring sends 2 (ranks - 1) / ranks of the bytes through the ports of each node.
            share = 2 * (len(facts) - 1) / len(facts) * speed / nominal
            found = f"{found}, {share:.0%} of the ports' {nominal:g} GB/s"
            is_slow = is_slow or share < _LEAST_SHARE
        if wrong := [fact.rank for fact, one in zip(facts, mine, strict=True) if not one.exact]:
            remedy = "set NCCL_P2P_DISABLE=1 and try again; if that helps, have the links checked"
            yield check, ("fail", f"{found}; WRONG SUMS on rank {as_ranges(wrong)}", remedy)
        else:
            remedy = "see NCCL's choice of devices with NCCL_DEBUG=INFO, and set NCCL_IB_HCA and NCCL_SOCKET_IFNAME"
            yield check, ("warn" if is_slow else "ok", found, remedy)


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
    if not facts[0].run_folder_lock:
        return
    if blind := [fact for fact in facts if fact.run_folder_lock == "unseen"]:
        ranks = as_ranges([fact.rank for fact in blind])
        found = f"rank 0 does not share files with rank {ranks} on {hosts_of(blind)}"
        remedy = "choose a --run-dir on a disk that all nodes mount at the same path and can write to"
        yield "run folder shared", ("fail", found, remedy)
        return
    yield "run folder shared", ("ok", "all other ranks see the files of rank 0", "")
    fact = next((fact for fact in facts if fact.run_folder_lock != "held"), None)
    if fact is None:
        yield "file locks", ("ok", "hold between all ranks", "")
        return
    what = "rank 0's lock did not hold" if fact.run_folder_lock == "free" else f"locks fail ({fact.run_folder_lock})"
    found = f"{what} for rank {fact.rank} on {fact.host}"
    remedy = "mount the run folder with locks (NFS: without nolock or local_lock), or choose another --run-dir"
    yield "file locks", ("fail" if fact.host == facts[0].host else "warn", found, remedy)


def _data(facts: Sequence[Facts], number: int) -> Finding:
    seen = [fact.data[number] for fact in facts]
    for fact, data in zip(facts, seen, strict=True):
        if data.problem:
            remedy = "use a folder made by dist-transformer prepare, at a path that all nodes see"
            return "fail", f"rank {fact.rank} on {fact.host}: {data.problem}", remedy
    hashes, differ = differences(facts, lambda fact: fact.data[number].index_sha256[:12])
    remedy = "copy the folder again to the nodes where it differs"
    return "fail" if differ else "ok", f"{seen[0].place}: index {hashes}", remedy


def by_value(facts: Sequence[Facts], value: Callable[[Facts], object]) -> dict[object, list[Facts]]:
    """Group ranks by a value, in the order in which values first appear."""
    groups: dict[object, list[Facts]] = {}
    for fact in facts:
        groups.setdefault(value(fact), []).append(fact)
    return groups


def differences(facts: Sequence[Facts], value: Callable[[Facts], object]) -> tuple[str, bool]:
    """Describe which hosts have which value: `2.11 on n1; 2.13 on n2, n3`; if all have the same, that value alone.

    Returns:
        the description, and whether the values differ.
    """
    groups = by_value(facts, value)
    texts = [f"{found} on {hosts_of(group)}" for found, group in groups.items()]
    return ("; ".join(texts), True) if len(groups) > 1 else (str(value(facts[0])), False)


def hosts_of(facts: Sequence[Facts]) -> str:
    """Name the hosts of ranks, each once."""
    return ", ".join(dict.fromkeys(fact.host for fact in facts))
