"""Checks of the network between ranks: addresses, NCCL, InfiniBand, the all-reduce."""

from collections.abc import Callable, Iterator, Sequence
from operator import itemgetter
from typing import Literal

from dist_transformer.preflight.facts import Facts
from dist_transformer.runtime.rendezvous import as_ranges

State = Literal["ok", "warn", "fail"]
Finding = tuple[State, str, str]
"""State, finding, and remedy, which is shown unless the state is ok."""

# GB/s between GPUs; below this rate, NCCL certainly uses TCP.
_SLOW_NCCL = 5.0
# Share of the ports' nominal rate that a large all-reduce must reach. Sound clusters reach 0.7 to 0.9.
_LEAST_SHARE, _LARGE = 0.4, 2**28
# NCCL's name of TCP.
_TCP = "Socket"
# NCCL locks some MiB per channel and peer; the common default of 8 MiB is too little even for the first.
_LEAST_LOCKED = 64 * 2**20


def judge_network(facts: Sequence[Facts]) -> Iterator[tuple[str, Finding | None]]:
    """Check the network between the ranks; yield names and findings."""
    yield "MASTER_ADDR", _address(facts)
    yield "NCCL settings", _settings(facts)
    if differ(facts, lambda fact: fact.host):
        if all(fact.gpu is not None for fact in facts):
            yield "InfiniBand", _infiniband(facts)
            yield "locked memory", _locked_memory(facts)
        yield "NCCL network", _transport(facts)
    yield from _reductions(facts)


def _address(facts: Sequence[Facts]) -> Finding | None:
    master = facts[0].master
    if not master:
        return None
    if lost := [fact for fact in facts if not fact.master_addresses]:
        remedy = "fix name resolution there, or export MASTER_ADDR as an IP address"
        return "fail", f"{master} does not resolve on {hosts_of(lost)}", remedy
    for fact in facts:
        # On the node of rank 0, its own name may resolve to a loopback address.
        if fact.host != facts[0].host and any(_is_loopback(address) for address in fact.master_addresses):
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
    found = differences(facts, lambda fact: " ".join(fact.nccl_settings) or "none")
    if differ(facts, lambda fact: fact.nccl_settings):
        remedy = "set NCCL's variables in one place for all ranks (slurm/cluster.env), or unset them"
        return "warn", found, remedy
    return ("ok", found, "") if facts[0].nccl_settings else None


def _infiniband(facts: Sequence[Facts]) -> Finding:
    """Check the ports and the library that NCCL needs for InfiniBand."""

    def describe(fact: Facts) -> str:
        active = [port.rate for port in fact.ports if port.is_active]
        rates = ", ".join(f"{active.count(rate)} x {rate}" for rate in dict.fromkeys(active))
        return rates or "no active port"

    found = differences(facts, describe)
    if differ(facts, describe):
        return "warn", found, "exclude the node that has less, or have its links checked (ibstat)"
    if not any(port.is_active for port in facts[0].ports):
        return "warn", found, "NCCL uses TCP: if the nodes have InfiniBand, open /dev/infiniband to the container"
    if without := [fact for fact in facts if not fact.loads_verbs]:
        found = f"{found}, and libibverbs.so.1 cannot be loaded on {hosts_of(without)}"
        return "fail", found, "install libibverbs1 and ibverbs-providers: without them NCCL uses TCP"
    return "ok", found, ""


def _locked_memory(facts: Sequence[Facts]) -> Finding | None:
    if not any(port.is_active for fact in facts for port in fact.ports):
        return None
    limited = [(fact.locked_bytes, fact.host) for fact in facts if fact.locked_bytes is not None]
    if not limited:
        return "ok", "no limit", ""
    least, host = min(limited, key=itemgetter(0))
    found = f"at most {least / 2**20:,.0f} MiB per process ({host}): NCCL locks memory for InfiniBand"
    lift = "LimitMEMLOCK=infinity for slurmd, and PropagateResourceLimitsExcept=MEMLOCK in slurm.conf"
    remedy = f"ask the cluster's administrators to lift the limit ({lift}); Docker: --ulimit memlock=-1"
    return "fail" if least < _LEAST_LOCKED else "warn", found, remedy


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


def _transport(facts: Sequence[Facts]) -> Finding | None:
    """Report the network that NCCL uses between nodes, if it stated one."""
    known = [(fact, fact.reductions[0].network) for fact in facts if fact.reductions and fact.reductions[0].network]
    on_tcp = [fact for fact, network in known if network == _TCP]
    fast = [port for fact in on_tcp for port in fact.ports if port.is_active]
    if not fast:
        return ("ok", ", ".join(dict.fromkeys(network for _, network in known)), "") if known else None
    found = f"TCP sockets on {hosts_of(on_tcp)}, although {fast[0].name} ({fast[0].rate}) is there"
    if fast[0].is_efa:
        return "warn", found, "install aws-ofi-nccl, through which NCCL uses EFA, and put it into LD_LIBRARY_PATH"
    unset = "unset NCCL_IB_DISABLE, NCCL_NET and NCCL_IB_HCA, open /dev/infiniband to the container"
    return "warn", found, f"{unset}, and look for the reason with NCCL_DEBUG=INFO"


def nominal_rate(facts: Sequence[Facts]) -> float | None:
    """Return the nominal GB/s of the node with the slowest network; None: one node, or no rate is known.

    NCCL uses all InfiniBand ports of a node at once. On Ethernet alone, the fastest link counts.
    """
    nodes = [group[0] for group in by_value(facts, lambda fact: fact.host).values()]
    rates = [
        sum(port.gigabytes for port in node.ports if port.is_active)
        or max((link.gigabytes for link in node.links), default=0.0)
        for node in nodes
    ]
    return min(rates) or None if len(nodes) > 1 else None


def _reductions(facts: Sequence[Facts]) -> Iterator[tuple[str, Finding]]:
    nominal = nominal_rate(facts)
    for number, reduction in enumerate(facts[0].reductions):
        mine = [fact.reductions[number] for fact in facts]
        seconds = max(one.seconds for one in mine)
        speed = reduction.bytes / seconds / 1e9
        check = f"all-reduce {reduction.bytes // 2**20} MiB"
        found = f"{reduction.backend}: {speed:.2f} GB/s algorithm bandwidth, {1000 * seconds:.1f} ms"
        on_nccl = reduction.backend == "nccl"
        is_slow = on_nccl and reduction.bytes >= 2**25 and speed < _SLOW_NCCL
        if on_nccl and reduction.bytes >= _LARGE and nominal is not None:
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


def by_value(facts: Sequence[Facts], value: Callable[[Facts], object]) -> dict[object, list[Facts]]:
    """Group ranks by a value, in the order in which values first appear."""
    groups: dict[object, list[Facts]] = {}
    for fact in facts:
        groups.setdefault(value(fact), []).append(fact)
    return groups


def differ(facts: Sequence[Facts], value: Callable[[Facts], object]) -> bool:
    """Decide whether not all ranks have the same value."""
    return len(by_value(facts, value)) > 1


def differences(facts: Sequence[Facts], value: Callable[[Facts], object]) -> str:
    """Describe which hosts have which value: `2.11 on n1; 2.13 on n2, n3`; if all have the same, that value alone."""
    groups = by_value(facts, value)
    if len(groups) == 1:
        return str(value(facts[0]))
    return "; ".join(f"{found} on {hosts_of(group)}" for found, group in groups.items())


def hosts_of(facts: Sequence[Facts]) -> str:
    """Name the hosts of ranks, each once."""
    return ", ".join(dict.fromkeys(fact.host for fact in facts))
