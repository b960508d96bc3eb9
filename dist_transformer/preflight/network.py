"""Checks of the network between ranks: addresses, NCCL, InfiniBand, clocks, the all-reduce."""

from collections.abc import Callable, Iterator, Sequence

from dist_transformer.base.checks import Check
from dist_transformer.preflight.facts import Facts
from dist_transformer.runtime.rendezvous import as_ranges

# Seconds; with a larger offset, the times of logs and files mislead.
_CLOCKS_APART = 1.0
# GB/s between GPUs; below this rate, NCCL certainly uses TCP.
_SLOW_NCCL = 5.0
# Share of the ports' nominal rate that a large all-reduce must reach. Sound clusters reach 0.7 to 0.9.
_LEAST_SHARE, _LARGE = 0.4, 2**28
# NCCL's name of TCP.
_TCP = "Socket"
# NCCL locks some MiB per channel and peer; the common default of 8 MiB is too little even for the first.
_LEAST_LOCKED = 64 * 2**20


def judge_network(facts: Sequence[Facts]) -> Iterator[Check]:
    """Check the network between the ranks."""
    yield from _addresses(facts)
    yield from _settings(facts)
    if len(by_value(facts, lambda fact: fact.host)) > 1:
        yield from _infiniband(facts)
        yield from _transport(facts)
    yield from _clocks(facts)
    yield from _reductions(facts)


def _addresses(facts: Sequence[Facts]) -> Iterator[Check]:
    if facts[0].master:
        lost = [fact for fact in facts if not fact.master_addresses]
        # On the node of rank 0, its own name may resolve to a loopback address.
        others = [fact for fact in facts if fact.host != facts[0].host]
        local = [fact for fact in others if any(_is_loopback(address) for address in fact.master_addresses)]
        found = f"{facts[0].master}: {', '.join(facts[0].master_addresses)}"
        if lost:
            yield Check(
                name="MASTER_ADDR",
                found=f"{facts[0].master} does not resolve on {hosts_of(lost)}",
                state="fail",
                remedy="fix name resolution there, or export MASTER_ADDR as an IP address",
            )
        elif local:
            yield Check(
                name="MASTER_ADDR",
                state="warn",
                found=f"{facts[0].master} is {local[0].host} itself on {local[0].host}",
                remedy="remove its name from 127.0.1.1 in /etc/hosts, or export MASTER_ADDR as an IP address",
            )
        else:
            yield Check(name="MASTER_ADDR", found=found)


def _settings(facts: Sequence[Facts]) -> Iterator[Check]:
    """Check that NCCL's and gloo's variables are the same on all ranks and name interfaces that exist."""
    for fact in facts:
        setting = dict(word.split("=", 1) for word in fact.nccl.settings).get("NCCL_SOCKET_IFNAME", "")
        if setting and not names_an_interface(setting, fact.interfaces):
            yield Check(
                name="NCCL settings",
                state="fail",
                found=f"NCCL_SOCKET_IFNAME={setting} names none of {', '.join(fact.interfaces)} on {fact.host}",
                remedy="set it to one of those, or unset it",
            )
            return
    found = differences(facts, lambda fact: " ".join(fact.nccl.settings) or "none")
    if len(by_value(facts, lambda fact: fact.nccl.settings)) > 1:
        remedy = "set NCCL's variables in one place for all ranks (slurm/cluster.env), or unset them"
        yield Check(name="NCCL settings", found=found, state="warn", remedy=remedy)
    elif facts[0].nccl.settings:
        yield Check(name="NCCL settings", found=" ".join(facts[0].nccl.settings))


def _infiniband(facts: Sequence[Facts]) -> Iterator[Check]:
    """Check the ports, the library and the locked memory that NCCL needs for InfiniBand, if all ranks have GPUs."""
    if any(fact.gpu is None for fact in facts):
        return

    def describe(fact: Facts) -> str:
        active = [port.rate for port in fact.nccl.ports if port.is_active]
        rates = ", ".join(f"{active.count(rate)} x {rate}" for rate in dict.fromkeys(active))
        return rates or "no active port"

    found = differences(facts, describe) if len(by_value(facts, describe)) > 1 else describe(facts[0])
    state, remedy = "ok", ""
    if len(by_value(facts, describe)) > 1:
        state, remedy = "warn", "exclude the node that has less, or have its links checked (ibstat)"
    elif not any(port.is_active for port in facts[0].nccl.ports):
        state = "warn"
        remedy = "NCCL uses TCP: if the nodes have InfiniBand, open /dev/infiniband to the container"
    elif without := [fact for fact in facts if not fact.nccl.loads_verbs]:
        found = f"{found}, and libibverbs.so.1 cannot be loaded on {hosts_of(without)}"
        state, remedy = "fail", "install libibverbs1 and ibverbs-providers: without them NCCL uses TCP"
    yield Check(name="InfiniBand", found=found, state=state, remedy=remedy)  # type: ignore[arg-type]
    if any(port.is_active for fact in facts for port in fact.nccl.ports):
        yield _locked_memory(facts)


def _locked_memory(facts: Sequence[Facts]) -> Check:
    limited = [(fact.nccl.locked_bytes, fact) for fact in facts if fact.nccl.locked_bytes is not None]
    if not limited:
        return Check(name="locked memory", found="no limit")
    least, fact = min(limited, key=lambda pair: pair[0])
    return Check(
        name="locked memory",
        found=f"at most {least / 2**20:,.0f} MiB per process ({fact.host}): NCCL locks memory for InfiniBand",
        state="fail" if least < _LEAST_LOCKED else "warn",
        remedy="ask the cluster's administrators to lift the limit (LimitMEMLOCK=infinity for slurmd, and "
        "PropagateResourceLimitsExcept=MEMLOCK in slurm.conf); Docker: --ulimit memlock=-1",
    )


def names_an_interface(setting: str, interfaces: Sequence[str]) -> bool:
    """Check whether NCCL_SOCKET_IFNAME selects an interface: prefixes; `=`: exact names; `^`: names to exclude."""
    excludes = setting.startswith("^")
    exact = setting.lstrip("^").startswith("=")
    names = setting.lstrip("^").lstrip("=").split(",")

    def matches(interface: str) -> bool:
        return any(interface == name if exact else interface.startswith(name) for name in names if name)

    return any(matches(interface) != excludes for interface in interfaces)


def _is_loopback(address: str) -> bool:
    return address == "::1" or address.startswith("127.")


def _clocks(facts: Sequence[Facts]) -> Iterator[Check]:
    offsets = [(fact.clock_offset, fact) for fact in facts if fact.clock_offset is not None]
    if not offsets:
        return
    offset, fact = max(offsets, key=lambda pair: abs(pair[0]))
    found = f"at most {abs(offset):.3f} s apart ({fact.host} and {facts[0].host})"
    late = abs(offset) > _CLOCKS_APART
    remedy = f"set the clock of {fact.host} (chrony or ntp): otherwise the times of logs and files mislead"
    yield Check(name="clocks", found=found, state="warn" if late else "ok", remedy=remedy)


def _transport(facts: Sequence[Facts]) -> Iterator[Check]:
    """Report the network that NCCL uses between nodes, if it stated one."""
    known = [(fact, fact.reductions[0].network) for fact in facts if fact.reductions and fact.reductions[0].network]
    if not known:
        return
    on_tcp = [fact for fact, network in known if network == _TCP]
    fast = [port for fact in on_tcp for port in fact.nccl.ports if port.is_active]
    if not fast:
        yield Check(name="NCCL network", found=", ".join(dict.fromkeys(network for _, network in known)))
        return
    port = fast[0]
    remedy = "unset NCCL_IB_DISABLE, NCCL_NET and NCCL_IB_HCA, open /dev/infiniband to the container"
    yield Check(
        name="NCCL network",
        found=f"TCP sockets on {hosts_of(on_tcp)}, although {port.name} ({port.rate}) is there",
        state="warn",
        remedy="install aws-ofi-nccl, through which NCCL uses EFA, and put it into LD_LIBRARY_PATH"
        if port.is_efa
        else f"{remedy}, and look for the reason with NCCL_DEBUG=INFO",
    )


def nominal_rate(facts: Sequence[Facts]) -> float | None:
    """Return the nominal GB/s of the node with the slowest network; None: one node, or no rate is known.

    NCCL uses all InfiniBand ports of a node at once. On Ethernet alone, the fastest link counts.
    """
    nodes = [group[0].nccl for group in by_value(facts, lambda fact: fact.host).values()]
    rates = [
        sum(port.gigabytes for port in node.ports if port.is_active)
        or max((link.gigabytes for link in node.links), default=0.0)
        for node in nodes
    ]
    return min(rates) or None if len(nodes) > 1 else None


def _reductions(facts: Sequence[Facts]) -> Iterator[Check]:
    nominal = nominal_rate(facts)
    for number, reduction in enumerate(facts[0].reductions):
        mine = [fact.reductions[number] for fact in facts]
        seconds = max(one.seconds for one in mine)
        speed = reduction.bytes / seconds / 1e9
        check = f"all-reduce {reduction.bytes // 2**20} MiB"
        found = f"{reduction.backend}: {speed:.2f} GB/s algorithm bandwidth, {1000 * seconds:.1f} ms"
        wrong = [fact for fact, one in zip(facts, mine, strict=True) if not one.exact]
        is_slow = reduction.backend == "nccl" and reduction.bytes >= 2**25 and speed < _SLOW_NCCL
        is_late = False
        if reduction.backend == "nccl" and reduction.bytes >= _LARGE and nominal is not None:
            # A ring sends 2 (ranks - 1) / ranks of the bytes through the ports of each node.
            share = 2 * (len(facts) - 1) / len(facts) * speed / nominal
            found, is_late = f"{found}, {share:.0%} of the ports' {nominal:g} GB/s", share < _LEAST_SHARE
        if wrong:
            yield Check(
                name=check,
                found=f"{found}; WRONG SUMS on rank {as_ranges([fact.rank for fact in wrong])}",
                state="fail",
                remedy="set NCCL_P2P_DISABLE=1 and try again; if that helps, have the links checked",
            )
        elif is_slow or is_late:
            remedy = "see NCCL's choice of devices with NCCL_DEBUG=INFO, and set NCCL_IB_HCA and NCCL_SOCKET_IFNAME"
            yield Check(name=check, found=found, state="warn", remedy=remedy)
        else:
            yield Check(name=check, found=found)


def by_value(facts: Sequence[Facts], value: Callable[[Facts], object]) -> dict[object, list[Facts]]:
    """Group ranks by a value, in the order in which values first appear."""
    groups: dict[object, list[Facts]] = {}
    for fact in facts:
        groups.setdefault(value(fact), []).append(fact)
    return groups


def hosts_of(facts: Sequence[Facts]) -> str:
    """Name the hosts of ranks, each once."""
    return ", ".join(dict.fromkeys(fact.host for fact in facts))


def differences(facts: Sequence[Facts], value: Callable[[Facts], object]) -> str:
    """Describe which hosts have which value: `2.11 on n1; 2.13 on n2, n3`."""
    return "; ".join(f"{found} on {hosts_of(group)}" for found, group in by_value(facts, value).items())
