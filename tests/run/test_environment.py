import getpass
import json
import os
import platform
import socket
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from dist_transformer.run.environment import (
    _processor,
    describe_environment,
    read_environments,
    record_environment,
)


def test_versions_and_machine() -> None:
    described = describe_environment(world_size=1, local_size=1)
    assert described["torch"] == version("torch")
    assert described["deepspeed"] == version("deepspeed")
    assert described["dist_transformer"] == version("dist_transformer")
    assert described["python"] == platform.python_version()
    assert 1 <= described["cores"] <= (os.cpu_count() or 1)
    assert described["memory_gib"] > 0.1
    assert platform.machine() in described["system"]
    assert json.loads(json.dumps(described)) == described


def test_a_package_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the code and PyTorch are on this machine."""

    def missing(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr("dist_transformer.runtime.versions.version", missing)
    described = describe_environment()
    assert described["deepspeed"] is None
    assert described["dist_transformer"] == version("dist_transformer")


@pytest.mark.parametrize(("world", "local", "hosts"), [(1, 1, 1), (8, 8, 1), (16, 8, 2), (9, 8, 2)])
def test_hosts_are_counted_from_the_ranks(world: int, local: int, hosts: int) -> None:
    described = describe_environment(world_size=world, local_size=local)
    assert (described["hosts"], described["world_size"]) == (hosts, world)


@pytest.mark.parametrize(("count", "cuda"), [(2, "13.0"), (0, None)])
def test_gpus_are_named(count: int, cuda: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The build of torch is one for GPUs, also on the machine that has none."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    gpu = SimpleNamespace(name="Fast GPU", total_memory=80 * 2**30)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: gpu)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    described = describe_environment()
    assert (described["gpus"], described["cuda"]) == (["Fast GPU, 80 GiB"] * count, cuda)


def test_nothing_personal_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("API_TOKEN", "s3cr3t-v4lue")
    told = json.dumps(describe_environment())
    assert "s3cr3t-v4lue" not in told
    assert "/" not in told
    assert socket.gethostname() not in json.loads(told).values()
    assert getpass.getuser() not in json.loads(told).values()


def test_processor(tmp_path: Path) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text("processor\t: 0\nmodel name\t: Quick CPU: 3 GHz\n\nprocessor\t: 1\nmodel name\t: Other\n")
    assert _processor(cpuinfo) == "Quick CPU: 3 GHz"
    cpuinfo.write_text("processor\t: 0\n")
    assert _processor(cpuinfo) == platform.machine()
    assert _processor(tmp_path / "none") == platform.machine()


def test_each_start_is_added(tmp_path: Path) -> None:
    assert read_environments(tmp_path) == []
    record_environment(tmp_path, {"torch": "1"}, step=0)
    record_environment(tmp_path, {"torch": "2"}, step=500)
    starts = read_environments(tmp_path)
    assert [(start["step"], start["torch"]) for start in starts] == [(0, "1"), (500, "2")]
    for start in starts:
        when = datetime.fromisoformat(start["time"])
        assert when.tzinfo == UTC
    assert [path.name for path in tmp_path.iterdir()] == ["environment.json"]


@pytest.mark.parametrize("content", ['[{"step": 0}', "\udcff"])
def test_a_damaged_file_stops_no_run(tmp_path: Path, content: str) -> None:
    (tmp_path / "environment.json").write_bytes(content.encode("utf-8", errors="surrogateescape"))
    assert read_environments(tmp_path) == []
    record_environment(tmp_path, {"torch": "1"}, step=0)
    assert [start["torch"] for start in read_environments(tmp_path)] == ["1"]
