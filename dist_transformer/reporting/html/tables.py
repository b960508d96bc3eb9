"""Tables of the settings of a run, and of the machines and versions of its starts."""

from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

from dist_transformer.config.plain import to_plain
from dist_transformer.config.settings import TrainConfig
from dist_transformer.reporting.html.values import number, shown

# These have no default, or come from the data.
_GIVEN = frozenset({"data", "run_dir", "vocab_size", "target_vocab_size"})
# Entries of a start that are not about its machine.
_OTHER = frozenset({"step", "time", "settings"})
_LABELS = {
    "python": "Python",
    "torch": "PyTorch",
    "deepspeed": "DeepSpeed",
    "cuda": "CUDA",
    "system": "System",
    "processor": "Processor",
    "cores": "Cores of a rank's host",
    "memory_gib": "Memory of the host, GiB",
    "gpus": "GPUs of the host",
    "hosts": "Hosts",
    "world_size": "Ranks",
    "state_bytes": "Bytes of weights, optimizer and buffers on a rank",
}

Row = tuple[str, str, str | None]
"""Name and value of a setting, and its default if it has another one."""


def settings_groups(settings: dict[str, Any]) -> Iterator[tuple[str, list[Row], list[Row]]]:
    """Yield the groups of config.json at any depth: name, rows, and rows of settings that have their default."""
    return _groups("", settings, to_plain(TrainConfig.of(data=("data",), run_dir=Path("run"))))


def _groups(name: str, values: dict[str, Any], defaults: Any) -> Iterator[tuple[str, list[Row], list[Row]]]:
    known = {key: value for key, value in defaults.items() if key not in _GIVEN} if isinstance(defaults, dict) else {}
    own = {key: value for key, value in values.items() if not isinstance(value, dict)}
    changed = {key: shown(known[key]) for key, value in own.items() if known.get(key, value) != value}
    rows = [(key, shown(value), changed.get(key)) for key, value in own.items()]
    folded = [row for row in rows if row[0] in known.keys() - changed.keys()]
    if rows:
        yield name or "run", [row for row in rows if row not in folded], folded
    for key in [key for key in values if key not in own]:
        yield from _groups(f"{name}.{key}" if name else key, values[key], known.get(key))


def starts(entries: list[dict[str, Any]]) -> list[tuple[str, list[Row], str]]:
    """List the starts, oldest first: when, the machine, and what changed since the one before."""
    return [
        (
            f"after step {number(now, 'step') or 0:,.0f} ({now['time']})",
            [(_LABELS.get(name, name), _text(value), None) for name, value in now.items() if name not in _OTHER],
            ", ".join([*_changes(before, now), *_changes(before.get("settings", {}), now.get("settings", {}))]),
        )
        for before, now in pairwise([{}, *entries])
    ]


def _text(value: Any) -> str:
    if isinstance(value, list):
        counts = Counter(map(shown, value))
        return ", ".join(f"{count} × {item}" if count > 1 else item for item, count in counts.items()) or "none"
    return shown(value)


def _changes(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """List what differs between two starts; nothing is known to differ if one of them recorded nothing."""
    names = [name for name in before | now if name not in _OTHER] if before and now else []
    return [
        f"{_LABELS.get(name, name)} {_text(before.get(name))} → {_text(now.get(name))}"
        for name in names
        if before.get(name) != now.get(name)
    ]
