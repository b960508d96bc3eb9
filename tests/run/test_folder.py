import dataclasses
import errno
import fcntl
import hashlib
import json
import shutil
import socket
import subprocess
import sys
import threading
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dist_transformer.base.errors import UserError
from dist_transformer.config.plain import from_plain, read_json
from dist_transformer.config.settings import BatchConfig, OptimizerConfig, TrainConfig
from dist_transformer.run.folder import (
    average_notes,
    check_settings,
    describe_run,
    open_run,
    remove_newer,
    require_same_measure,
    run_identity,
    shareable_settings,
    write_settings,
)
from dist_transformer.run.lock import sole_training
from tests.run.small_run import MODEL, TOKENIZER, small_config, train_and_save

DS_CONFIG = {"zero_optimization": {"stage": 1, "overlap_comm": True}}


@pytest.fixture
def config(tmp_path: Path) -> TrainConfig:
    return small_config(tmp_path, run_dir=tmp_path / "runs" / "1")


def described(config: TrainConfig, ds_config: dict[str, Any] = DS_CONFIG) -> dict[str, Any]:
    return describe_run(config, [Path(place) for place in config.corpora.data], ds_config)


@pytest.fixture
def run_dir(config: TrainConfig) -> Path:
    write_settings(config.run_dir, described(config), Path(config.corpora.data[0]) / "tokenizer.json")
    return config.run_dir


def test_what_is_written(config: TrainConfig, run_dir: Path) -> None:
    assert sorted(path.name for path in run_dir.iterdir()) == ["config.json", "tokenizer.json"]
    assert (run_dir / "tokenizer.json").read_bytes() == TOKENIZER
    written = json.loads((run_dir / "config.json").read_text())
    index = (Path(config.corpora.data[0]) / "index.json").read_bytes()
    assert written.pop("data_sha256") == [hashlib.sha256(index).hexdigest()]
    assert written.pop("deepspeed") == DS_CONFIG
    assert written.pop("init_from_sha256") is None
    assert written.pop("threads") is None
    assert from_plain(TrainConfig, written, "config.json") == config


def changed_settings(run_dir: Path, wanted: dict[str, Any]) -> list[str]:
    return check_settings(run_dir, wanted, read_json(run_dir / "config.json"))


CHANGED: list[dict[str, Any]] = [
    {"model": dataclasses.replace(MODEL, decoder_layers=3)},
    {"batch": BatchConfig(max_source_tokens=77)},
    {"seed": 2},
    {"init_from": Path("models/base")},
]


def test_settings_to_share_name_no_place(config: TrainConfig) -> None:
    shared = shareable_settings(described(config))
    assert shared["max_steps"] == config.max_steps
    assert shared["model.attention"] == config.model.attention
    assert "/" not in json.dumps(shared)
    assert not {"data", "run_dir", "data_sha256", "init_from_sha256"} & shared.keys()


def test_what_cannot_be_resumed_is_another_run(config: TrainConfig) -> None:
    identity = run_identity(described(config))
    assert len(identity) == 16
    others = [config.changed(**changes) for changes in CHANGED]
    assert len({identity, *(run_identity(described(other)) for other in others)}) == 1 + len(CHANGED)
    longer = dataclasses.replace(config, max_steps=900, precision="fp32", run_dir=config.run_dir / "moved")
    # Other dropout masks, and the same run.
    longer = dataclasses.replace(longer, batch=dataclasses.replace(config.batch, packs_per_micro_batch=2))
    assert run_identity(described(longer, {})) == identity
    (Path(config.corpora.data[0]) / "index.json").write_text('{"corpus": "another"}')
    assert run_identity(described(config)) != identity


def test_other_data_is_refused(config: TrainConfig, run_dir: Path) -> None:
    (data,) = config.corpora.data
    other = Path(data).with_name("other")
    shutil.copytree(data, other)
    (other / "index.json").write_text('{"corpus": "another"}')
    with pytest.raises(UserError) as refused:
        changed_settings(run_dir, described(config.changed(data=(str(other),))))
    assert str(refused.value) == (
        f"{run_dir} was trained on other data ({data}) than --data {other}: pass the same data, which may have moved, "
        "or choose another --run-dir"
    )
    (Path(data) / "index.json").write_text('{"corpus": "another"}')
    with pytest.raises(UserError) as refused:
        changed_settings(run_dir, described(config))
    assert str(refused.value) == (
        f"--data {data} has changed since {run_dir} was trained on it: restore the earlier data, or choose another "
        "--run-dir"
    )


def test_the_same_data_elsewhere_is_accepted(config: TrainConfig, run_dir: Path) -> None:
    moved = Path(config.corpora.data[0]).with_name("moved")
    Path(config.corpora.data[0]).rename(moved)
    changed = changed_settings(run_dir, described(config.changed(data=(str(moved),))))
    assert changed == [f"data: {list(config.corpora.data)!r} -> {[str(moved)]!r}"]


def test_the_rest_may_change_and_is_listed(config: TrainConfig, run_dir: Path) -> None:
    changed = dataclasses.replace(
        config,
        max_steps=900,
        precision="fp32",
        deepspeed_config=Path("z2.json"),
        optimizer=OptimizerConfig(schedule="inverse_sqrt", peak_lr=1e-3, warmup_steps=200),
    )
    wanted = described(changed, {"zero_optimization": {"stage": 2}, "wall_clock_breakdown": True})
    assert changed_settings(run_dir, wanted) == [
        "deepspeed.wall_clock_breakdown: None -> True",
        "deepspeed.zero_optimization.overlap_comm: True -> None",
        "deepspeed.zero_optimization.stage: 1 -> 2",
        "deepspeed_config: None -> 'z2.json'",
        "max_steps: 1000 -> 900",
        "optimizer.peak_lr: 0.003 -> 0.001",
        "precision: None -> 'fp32'",
    ]


def test_a_ranking_by_another_measure_is_refused_by_name(tmp_path: Path) -> None:
    ranked = {"best": [[10, 2.0]]}
    before, now = ({"best_by": "command", "validation_command": f"{name} {{hypothesis}}"} for name in "ab")
    with pytest.raises(UserError, match=r"has ranked its validations with validation_command = 'a .*', not 'b "):
        require_same_measure(tmp_path, now, before, ranked)
    require_same_measure(tmp_path, now, before, {"best": []})
    require_same_measure(tmp_path, before, before, ranked)
    # A program whose score ranks nothing may change.
    require_same_measure(tmp_path, now | {"best_by": "nll"}, before | {"best_by": "nll"}, ranked)


def test_what_a_resumed_run_computes_again_is_removed(tmp_path: Path) -> None:
    files = {
        f"{folder}/step-000000{step}{end}"
        for folder, end in (("weights", ".safetensors"), ("samples", ".json"))
        for step in (10, 20, 30)
    } | {f"weights/ema-000000{step}.safetensors" for step in (20, 30)}
    for name in files:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    remove_newer(tmp_path, 20)
    left = {str(path.relative_to(tmp_path)) for path in tmp_path.glob("*/*")}
    assert left == {name for name in files if "-00000030" not in name}


@pytest.mark.parametrize(
    ("before", "now", "told"),
    [
        ({}, 0.0, ""),
        ({"ema_decay": 0.99}, 0.999, ""),
        ({}, 0.999, "the moving average of the weights starts with the weights of step 7"),
        ({"ema_decay": 0.0}, 0.999, "the moving average of the weights starts with the weights of step 7"),
        ({"ema_decay": 0.999}, 0.0, "the moving average of the weights is no longer kept; its files in weights/ stay"),
    ],
)
def test_an_average_that_begins_or_ends_is_told(before: dict[str, Any], now: float, told: str) -> None:
    assert average_notes({"step": 7, **before}, now) == ([told] if told else [])


HOLDER = """
import sys
from pathlib import Path
from dist_transformer.run.lock import sole_training
with sole_training(Path(sys.argv[1]), print):
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.mark.system
def test_a_folder_in_use_is_refused_and_is_free_when_its_process_is_killed(tmp_path: Path) -> None:
    run_dir = tmp_path / "a run"
    command = [sys.executable, "-c", HOLDER, str(run_dir)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        with pytest.raises(UserError) as refused, sole_training(run_dir, pytest.fail, patience=0.0):
            pass
        who = f"{run_dir} is in use by process {process.pid} on {socket.gethostname()} since 20"
        assert str(refused.value).startswith(who)
        assert "wait until that run ends, or end it" in str(refused.value)
        # The next start comes while this one still ends: it waits.
        threading.Timer(0.3, process.kill).start()
        with sole_training(run_dir, pytest.fail, patience=60.0):
            assert str(process.pid) not in (run_dir / "lock").read_text()
    assert (run_dir / "lock").read_text() == ""
    with sole_training(run_dir, pytest.fail, patience=0.0):
        pass


def test_a_file_system_without_locks_is_used_and_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(*_: object) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", unknown)
    notes: list[str] = []
    with sole_training(tmp_path, notes.append):
        pass
    assert len(notes) == 1
    assert "lock cannot be locked" in notes[0]
    assert "make sure that no other run writes to this folder" in notes[0]


def test_a_resume_keeps_the_threads_of_the_run(config: TrainConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)

    def start(threads: int) -> tuple[int, list[str]]:
        """Start as on a machine of so many cores."""
        wanted, folder = {**described(config), "threads": threads}, SimpleNamespace(path=Path(config.corpora.data[0]))
        with ExitStack() as held:
            _, notes, _ = open_run(config, wanted, folder, held, cores=threads)  # type: ignore[arg-type]
        recorded = json.loads((config.run_dir / "config.json").read_text())["threads"]
        assert recorded == wanted["threads"]
        return recorded, notes

    train_and_save(config, 1)
    write_settings(config.run_dir, {**described(config), "threads": 4}, config.run_dir / "tokenizer.json")
    threads, notes = start(16)
    assert (threads, notes[0].startswith("keeps 4 thread(s) per rank")) == (4, True)
    # Fewer cores, then a number that the user gives.
    threads, notes = start(2)
    assert (threads, notes[0]) == (2, "setting changed: threads: 4 -> 2")
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert start(3)[0] == 3


def test_a_run_moves_the_pointer_off_a_damaged_checkpoint(config: TrainConfig) -> None:
    train_and_save(config, 1, 1)
    run_dir = config.run_dir
    (run_dir / "checkpoints" / "step-00000002" / "state.json").write_text("{}")
    notes = train_and_save(config).notes
    assert "state.json is damaged" in notes[0]
    assert notes[1].endswith("step-00000001: every step after 1 is computed again")
    assert (run_dir / "checkpoints" / "latest").read_text() == "step-00000001\n"
    assert [file.name for file in run_dir.glob("weights/step-*")] == ["step-00000001.safetensors"]
    # A start that is refused lets go of the folder.
    with pytest.raises(UserError, match=r"model\.dropout"):
        train_and_save(config.changed(model=dataclasses.replace(config.model, dropout=0.4)))
    with sole_training(run_dir, pytest.fail, patience=0.0):
        pass


def test_a_mistyped_folder_is_not_made(config: TrainConfig) -> None:
    with pytest.raises(UserError, match=r"--resume required, but .* holds no checkpoint"):
        train_and_save(config.changed(resume="required"))
    assert not config.run_dir.exists()


@pytest.mark.parametrize("name", ["index.json", "model.safetensors"])
def test_a_data_or_model_folder_is_not_written_over(name: str, config: TrainConfig) -> None:
    config.run_dir.mkdir(parents=True)
    (config.run_dir / name).write_text("{}")
    with pytest.raises(UserError, match=rf"folder \(it has {name}\): choose a new folder or a run folder$"):
        train_and_save(config)
    assert [file.name for file in config.run_dir.iterdir()] == [name]
