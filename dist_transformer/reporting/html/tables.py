"""Tables of scores, settings and environment."""

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path, PurePosixPath
from typing import Any

from dist_transformer.base.urls import without_secrets
from dist_transformer.config.plain import to_plain
from dist_transformer.config.settings import TrainConfig
from dist_transformer.reporting.html.markup import Html, element, join
from dist_transformer.reporting.html.run import Run, ScoreFile, number

_METRIC_NAMES = {
    "bleu": "BLEU",
    "bleu_cased": "BLEU, case counts",
    "bleu_lowercase": "BLEU, case ignored",
    "bleu_tokenized": "BLEU, tokenised by Moses",
    "bleu_compound_split": "BLEU, tokenised, hyphens split",
    "chrf": "chrF",
    "ter": "TER (lower is better)",
}
# Columns of the table that compares score files.
_COMPARED = ("Model", "File", "Sentences", "BLEU", "chrF", "TER (lower is better)", "Signature of BLEU")
# These have no default, or come from the data.
_GIVEN = frozenset({"data", "run_dir", "vocab_size", "target_vocab_size"})
# Entries of a start that are not about its machine.
_NOT_OF_THE_MACHINE = ("step", "time", "settings")
_ENVIRONMENT_NAMES = {
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


def scores(run: Run) -> Html:
    """Lay out every score file with its full signatures, newest first; several are compared in one table before."""
    if not run.scores:
        return element("p", "No score file in this folder: dist-transformer evaluate --json RUN/bleu.json writes one.")
    compared = _compared(run.scores) if len(run.scores) > 1 else ""
    return join(compared, *(_score_file(file) for file in run.scores))


def _compared(files: list[ScoreFile]) -> Html:
    """Lay out one row per score file."""
    heads = [element("th", name, class_=_class_of(name), scope="col") for name in _COMPARED]
    rows = []
    for file in files:
        sentences = number(file.values, "sentences")
        cells = (
            file.model or "not recorded",
            file.name,
            "not recorded" if sentences is None else f"{sentences:,.0f}",
            *(f"{file.values[name]:.2f}" for name in ("bleu", "chrf", "ter")),
            file.values["signature"],
        )
        named = zip(_COMPARED, cells, strict=True)
        rows.append(
            element("tr", *(element("td", cell, data_label=name, class_=_class_of(name)) for name, cell in named))
        )
    return element("table", element("thead", element("tr", *heads)), element("tbody", *rows), class_="stacks")


def _class_of(column: str) -> str:
    return {"Model": "name", "File": "name", "Signature of BLEU": "mono"}.get(column, "number")


def _score_file(file: ScoreFile) -> Html:
    values = file.values
    sentences, split = number(values, "sentences"), number(values, "split_sentences")
    seconds, ranks = number(values, "seconds"), number(values, "world_size")
    facts = [
        f"model: {file.model}" if file.model else "",
        f"{sentences:,.0f} sentences" if sentences is not None else "",
        f"{split:,.0f} of them split" if split else "",
        f"decoded in {seconds:,.1f} s" if seconds is not None else "",
        f"on {ranks:,.0f} rank(s)" if ranks else "",
        f"hypotheses in {_path_name(values['hypotheses'])}" if values.get("hypotheses") else "",
        "synthetic corpus" if values.get("synthetic") is True else "",
    ]
    rows = [
        element(
            "tr",
            element("td", _METRIC_NAMES.get(name, name), data_label="Metric"),
            element("td", f"{value:.2f}", data_label="Score", class_="number"),
            element("td", signature or "not recorded", data_label="Signature", class_="mono"),
        )
        for name, value, signature in file.metrics
    ]
    heads = element(
        "tr",
        element("th", "Metric", scope="col"),
        element("th", "Score", class_="number", scope="col"),
        element("th", "Signature", scope="col"),
    )
    return join(
        element("h3", file.name),
        element("p", ", ".join(fact for fact in facts if fact), class_="soft"),
        *(element("p", f"Note: {note}") for note in values.get("notes") or []),
        element("table", element("thead", heads), element("tbody", *rows), class_="stacks"),
    )


def settings(run: Run) -> Html:
    """Lay out config.json by group, and mark the values that differ from the defaults."""
    if not run.settings:
        return element("p", "There is no config.json in this folder.")
    defaults = to_plain(TrainConfig.of(data=("data",), run_dir=Path("run")))
    groups = [("run", run.settings, defaults), *_nested("", run.settings, defaults)]
    explained = "Resolved settings of the last start. Bold: differs from the default, which is below the value."
    tables = [_settings_group(name, values, default) for name, values, default in groups]
    return join(element("p", explained, class_="soft"), element("div", *tables, class_="groups"))


def _nested(name: str, values: dict[str, Any], defaults: Any) -> Iterator[tuple[str, dict[str, Any], Any]]:
    """Yield the groups within `values` at any depth: name, settings and their defaults."""
    for key, inner in values.items():
        if isinstance(inner, dict):
            path = f"{name}.{key}" if name else key
            default = defaults.get(key) if isinstance(defaults, dict) else None
            yield path, inner, default
            yield from _nested(path, inner, default)


def _settings_group(group: str, values: dict[str, Any], defaults: Any) -> Html:
    rows = []
    for name, value in values.items():
        if isinstance(value, dict):
            continue
        has_default = isinstance(defaults, dict) and name in defaults and name not in _GIVEN
        is_changed = has_default and defaults[name] != value
        was = element("span", f"default {_shown(defaults[name])}", class_="was") if is_changed else ""
        cells = (element("th", name, scope="row"), element("td", _shown(value), was))
        rows.append(element("tr", *cells, class_="changed" if is_changed else None))
    if not rows:
        return Html()
    return element("div", element("h3", group), element("table", element("tbody", *rows)), class_="group")


def _shown(value: Any) -> str:
    """Format a value for a cell; absolute paths are shortened."""
    # A page that is shared need not show the folders of a machine.
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, list):
        return ", ".join(map(_shown, value)) or "none"
    return _path_name(value) if isinstance(value, str) else str(value)


def _path_name(value: str) -> str:
    """Shorten an absolute path: `/home/me/data/wmt` → `…/wmt`; other text shows no secrets of a URL."""
    return f"…/{PurePosixPath(value).name}" if PurePosixPath(value).is_absolute() else without_secrets(value)


def environment(run: Run) -> Html:
    """Lay out the newest start in full, and the changes between earlier starts."""
    starts = run.environments
    if not starts:
        return element("p", "The run folder does not record the machine and the versions of training.")
    newest = starts[-1]
    known = [name for name in newest if name not in _NOT_OF_THE_MACHINE]
    rows = [
        element(
            "tr",
            element("th", _ENVIRONMENT_NAMES.get(name, name), scope="row"),
            element("td", _environment_value(newest[name])),
        )
        for name in known
    ]
    when = "At the start" if len(starts) == 1 else f"At the newest of {len(starts):,} starts"
    full = element("div", element("table", element("tbody", *rows)), class_="group")
    return join(element("p", f"{when}, {_start(newest)}.", class_="soft"), full, _history(starts))


def _environment_value(value: Any) -> str:
    if isinstance(value, list):
        counts = {item: value.count(item) for item in map(str, value)}
        return ", ".join(f"{count} × {item}" if count > 1 else item for item, count in counts.items()) or "none"
    return _shown(value)


def _start(entry: dict[str, Any]) -> str:
    step = number(entry, "step") or 0
    return f"after step {step:,.0f} ({entry.get('time', 'time not recorded')})"


def _history(starts: list[dict[str, Any]]) -> Html:
    if len(starts) < 2:
        return Html()
    lines = [element("li", f"first start {_start(starts[0])}")]
    for before, now in pairwise(starts):
        changes = [*_changes(before, now), *_changes(before.get("settings", {}), now.get("settings", {}))]
        lines.append(element("li", f"resumed {_start(now)}: {', '.join(changes) or 'nothing changed'}"))
    return join(element("h3", "Starts"), element("ol", *lines))


def _changes(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """List what differs between two starts; nothing is known to differ if one of them recorded nothing."""
    if not before or not now:
        return []
    names = [name for name in before | now if name not in _NOT_OF_THE_MACHINE and before.get(name) != now.get(name)]
    return [
        f"{_ENVIRONMENT_NAMES.get(name, name)} {_environment_value(before.get(name))} → "
        f"{_environment_value(now.get(name))}"
        for name in names
    ]
