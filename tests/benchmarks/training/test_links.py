"""The planner's communication beside what real nodes send: bytes, for seconds depend on what else the machine does."""

import dataclasses
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.training.links import STAGES, LinksBenchmark, links_table
from benchmarks.training.namespaces import namespace_nodes
from dist_transformer.base.errors import UserError
from dist_transformer.config.settings import TrainConfig
from dist_transformer.data.folder.reader import DataFolder
from tests.conftest import ROOT, run_command

has_namespaces = pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("tc", path="/usr/sbin:/sbin:/usr/bin") is None,
    reason="network namespaces need root and iproute2",
)


def test_settings_that_cannot_be_measured() -> None:
    settings = LinksBenchmark(
        config=TrainConfig.of(data=("unused",), run_dir=Path("unused")),
        ds_configs=ROOT / "ds_configs",
        nodes=(2,),
        mbits=(100.0,),
        steps=1,
    )
    with pytest.raises(UserError, match="--nodes has 1: give numbers of 2 and more"):
        dataclasses.replace(settings, nodes=(2, 1))
    with pytest.raises(UserError, match="--mbits has 0: give rates above 0"):
        dataclasses.replace(settings, mbits=(0, 100))
    with pytest.raises(UserError, match="processes were started"):
        dataclasses.replace(settings, nodes=(1000,))


@pytest.mark.system
@has_namespaces
def test_nodes_and_what_runs_on_them_end_with_the_block() -> None:
    with namespace_nodes(2) as nodes:
        sleeper = subprocess.Popen([*nodes[1].entry, "sleep", "600"])
        listed = subprocess.run(["ip", "netns", "list"], check=True, capture_output=True, text=True).stdout
        assert {node.space for node in nodes} <= {line.split()[0] for line in listed.splitlines()}
    assert sleeper.wait(timeout=20) == -9
    listed = subprocess.run(["ip", "netns", "list"], check=True, capture_output=True, text=True).stdout
    assert not {node.space for node in nodes} & {line.split()[0] for line in listed.splitlines() if line.strip()}


@pytest.mark.slice(name="benchmarks")
@has_namespaces
def test_real_nodes_send_what_the_planner_counts(toy_data: DataFolder, tmp_path: Path) -> None:
    """Two micro-batches of each of two nodes, over 200 Mbit/s."""
    words = [
        "links",
        "--data",
        toy_data.path,
        "--nodes",
        2,
        "--mbits",
        200,
        "--steps",
        1,
        "--json",
        tmp_path / "l.json",
    ]
    sizes = ["--model.width", 256, "--model.ffn-width", 1024, "--model.encoder-layers", 1, "--model.decoder-layers", 1]
    batch = ["--batch.max-target-tokens", 64, "--batch.packs-per-step", 4, "--precision", "fp32"]
    output = run_command(sys.executable, "tools/benchmark.py", *words, "--", *sizes, *batch)
    figures = json.loads((tmp_path / "l.json").read_text())["figures"]
    assert [(case["nodes"], case["stage"], case["micro_batches"]) for case in figures["cases"]] == [
        (2, stage, 2) for stage in STAGES
    ]
    for case in figures["cases"]:
        # Headers of what TCP sends, and its acknowledgements.
        assert case["measured_bytes"] == pytest.approx(case["predicted_bytes"], rel=0.03)
        assert case["measured_seconds"]["median"] > 0
    assert links_table(figures) in output
