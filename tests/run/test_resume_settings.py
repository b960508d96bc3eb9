"""Every setting of a run, changed on resume: refused by name, or effective and reported."""

import dataclasses
import json
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dist_transformer.base.errors import UserError
from dist_transformer.config.registry import ATTENTIONS
from dist_transformer.config.schema import flat_groups
from dist_transformer.config.settings import TrainConfig
from dist_transformer.run.folder import run_identity
from tests.run.small_run import small_config, train_and_save

# Values where the rule for the type has no valid one.
CHOSEN = {
    "model.positions": "learned",
    "model.heads": 4,
    "model.attention": "softmax_other",
    "model.head_width": 2,
    "model.target_vocab_size": 7,
    "optimizer.schedule": "cosine",
    "optimizer.min_lr": 1e-4,
    "batch.packs_per_micro_batch": 1,
    "data_weights": (2.0,),
    "freeze": ("norms",),
    "sinks": ("wandb",),
    "best_by": "chrf",
    "init_from": Path("model"),
    "deepspeed_config": Path("zero3"),
    "cache_dir": Path("cache"),
    "validation_command": "score {hypothesis}",
    "precision": "fp32",
    "profile": "2:1",
}
ALSO = {"model.target_vocab_size": {"tie_embeddings": "target"}}
# They decide what a step computes. Dropout masks alone depend on the packs at once.
REFUSED = ("model", "batch", "seed", "data_weights", "data_temperature", "init_from", "freeze", "optimizer.kind")
FREE = "batch.packs_per_micro_batch"
MOVED = ("data", "run_dir")
"""They name places: the same data and the same run may be elsewhere."""
# It sets packs_per_step, and is not kept.
WITHOUT_EFFECT = ("batch.target_tokens_per_step",)


def settings_of(kind: type, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the names of all settings, as flags have them, with their types."""
    types = typing.get_type_hints(kind)
    for field in dataclasses.fields(kind):
        if dataclasses.is_dataclass(inner := types[field.name]):
            yield from settings_of(inner, "" if field.name in flat_groups(TrainConfig) else f"{field.name}.")  # type: ignore[arg-type]
        else:
            yield f"{prefix}{field.name}", inner


def another(name: str, kind: Any, value: Any) -> Any:
    if name in CHOSEN:
        return CHOSEN[name]
    if typing.get_origin(kind) is typing.Literal:
        return next(choice for choice in typing.get_args(kind) if choice != value)
    if isinstance(value, bool):
        return not value
    if isinstance(value, float):
        return value / 2 or 0.5
    return (value or 0) + 2


def changed(config: TrainConfig, name: str, value: Any) -> TrainConfig:
    group, _, inner = name.rpartition(".")
    value = dataclasses.replace(getattr(config, group), **{inner: value}, **ALSO.get(name, {})) if group else value
    return config.changed(**{group or name: value})


def value_of(described: dict[str, Any], name: str) -> Any:
    for part in name.split("."):
        described = described[part]
    return described


ALL = {name: kind for name, kind in settings_of(TrainConfig) if name not in (*MOVED, *WITHOUT_EFFECT)}


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> TrainConfig:
    config = small_config(tmp_path_factory.mktemp("settings"))
    config = config.changed(batch=dataclasses.replace(config.batch, packs_per_step=4, packs_per_micro_batch=4))
    train_and_save(config, 2)
    return config


@pytest.mark.parametrize("name", ALL)
def test_a_setting_changed_on_resume_is_refused_by_name_or_effective(
    name: str, config: TrainConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(ATTENTIONS._entries, "softmax_other", None)
    file = config.run_dir / "config.json"
    before, described = file.read_bytes(), json.loads(file.read_bytes())
    group, _, inner = name.rpartition(".")
    parts = [getattr(config, name) for name in ([group] if group else flat_groups(TrainConfig))]
    old = next(getattr(part, inner) for part in (*parts, config) if hasattr(part, inner))
    wanted = changed(config, name, another(name, ALL[name], old))
    if {name, name.split(".", maxsplit=1)[0]} & {*REFUSED} and name != FREE:
        with pytest.raises(UserError, match=rf"was trained with {name} = .*: use the old value, or"):
            train_and_save(wanted)
        assert file.read_bytes() == before
        return
    run = train_and_save(wanted)
    assert run.resumed_at == 2
    new = value_of(json.loads(file.read_bytes()), name)
    assert new == json.loads(json.dumps(value_of(run.described, name), default=str)) != described.get(name, old)
    assert any(note.startswith(f"setting changed: {name}: ") for note in run.notes), run.notes
    file.write_bytes(before)


def test_a_number_stays_as_it_was_written(tmp_path: Path) -> None:
    """A file of settings may have said 0 for 0.0, which is a part of the identity that weight files state."""
    config = small_config(tmp_path)
    config = config.changed(model=dataclasses.replace(config.model, dropout=0.0))
    train_and_save(config, 2)
    file = config.run_dir / "config.json"
    written = file.read_text().replace('"dropout": 0.0', '"dropout": 0')
    assert run_identity(json.loads(written)) != run_identity(json.loads(file.read_text()))
    file.write_text(written)
    train_and_save(config.changed(batch=dataclasses.replace(config.batch, packs_per_micro_batch=2)))
    found = json.loads(file.read_text())
    assert run_identity(found) == run_identity(json.loads(written))
    assert found["batch"]["packs_per_micro_batch"] == 2
