"""The test of a real cluster that comes first: `sbatch slurm/train_big.sh`, and it is all done."""

import json
import re

import pytest

from dist_transformer.run.ledger import read_ledger
from tests.slurm.conftest import STEPS, FinishedJob, Site


@pytest.mark.slice(name="slurm-jobs")
def test_one_command_prepares_trains_averages_and_evaluates_on_two_nodes(site: Site, finished: FinishedJob) -> None:
    log = site.log(finished.job)
    assert "2 rank(s)" in log
    assert len(list(read_ledger(finished.run_dir / "ledger.jsonl"))) == STEPS
    assert (site.data / "index.json").exists()
    assert (finished.run_dir / "model" / "model.safetensors").exists()
    report = json.loads((finished.run_dir / "bleu.json").read_text(encoding="utf-8"))
    assert (report["sentences"], report["world_size"]) == (8, 2)
    assert report["steps"] == [STEPS - 5, STEPS]
    # The data were prepared by a job without GPUs, while this one waited.
    preparation = re.search(r"job (\d+) prepares ", log)
    assert preparation is not None
    assert "gres/gpu" not in site.cluster.run("scontrol", "show", "job", preparation[1])
    assert site.cluster.restarts(finished.job) == 1
    # Then the nodes were checked, before the training; each line bears the number of its task.
    assert log.index("all-reduce 16 MiB") < log.index("2 rank(s)")
    assert {line[:3] for line in log.splitlines() if "all-reduce" in line} == {"0: "}
    # What the job remembered for a next start is gone, and so are its processes.
    assert not (site.checkout / ".slurm" / finished.job).exists()
    assert [len(site.cluster.processes(node)) for node in site.cluster.nodes] == [1, 1]
