"""Facts of ranks grouped by value: which ranks differ, and on which nodes."""

from collections.abc import Callable, Sequence

from dist_transformer.preflight.facts import Facts


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
