"""Commands of a user, and the messages about those that cannot work."""

import json
import re
import shlex
import sys
from pathlib import Path

import pytest

from benchmarks.launching import overridden
from dist_transformer.run.ledger import read_ledger
from tests.conftest import ROOT
from tests.slurm.cluster import wait_until
from tests.slurm.conftest import SMALL, TWO_NODES, FinishedJob, Site

pytestmark = pytest.mark.slice(name="slurm-jobs")

PAGE = (ROOT / "docs" / "cluster.md").read_text(encoding="utf-8").replace("\\\n", "")
PAGE_LINES = sorted(set(re.findall(r"^(?:\w+=\S+ )*sbatch .*", PAGE, re.MULTILINE)))


def test_the_page_submits() -> None:
    assert len(PAGE_LINES) == 5


@pytest.mark.parametrize("line", PAGE_LINES)
def test_slurm_accepts_what_the_page_submits(line: str, site: Site) -> None:
    """Two nodes are there; what asks for more is asked of them."""
    command = line.replace("--account=nlp ", "").replace("sbatch", "sbatch --test-only")
    said = site.cluster.run("bash", "-c", command, cwd=site.checkout)
    assert "to start at" in said


@pytest.mark.parametrize(
    ("flags", "edit", "said"),
    [
        ([], "PYTHON=(/nowhere/python)", "error: PYTHON in slurm/cluster.env (/nowhere/python) does not run Python"),
        ([], "RUNS=", "error: RUNS is not set: set it in slurm/cluster.env, or before sbatch (RUNS=... sbatch"),
        (
            [],
            "DATA=/nowhere PREPARE=()",
            "error: PREPARE is empty: set it in slurm/cluster.env to the flags that make /nowhere",
        ),
        (["--run-dir=here"], "", "error: --run-dir=here is not for this job: set RUN_DIR=... before sbatch"),
        ([], "STAGES='trian prepare'", "error: STAGES names trian: choose from prepare, train and evaluate"),
        ([], "if", "error: slurm/cluster.env cannot be used"),
        ([], "DOCTOR=yes STAGES=train RUN_DIR=/proc/run", "error: the job is not fit to train: follow the remedies"),
    ],
)
def test_what_cannot_work_is_said_in_a_sentence(flags: list[str], edit: str, said: str, site: Site) -> None:
    with site.edited(edit):
        job = site.submit("train_big.sh", *flags, options=TWO_NODES)
        assert site.cluster.wait(job) == "FAILED"
    assert said in site.log(job)
    assert site.cluster.exit_code(job) == 1


def test_a_preparation_that_fails_ends_the_training(site: Site) -> None:
    with site.edited("DATA=$PWD/data/none PREPARE=(--src /no/train.en --tgt /no/train.de --vocab-size 400)"):
        job = site.submit("train_big.sh", options=TWO_NODES)
        assert site.cluster.wait(job) == "CANCELLED"
    (preparation,) = re.findall(r"job (\d+) prepares ", site.log(job))
    assert site.cluster.state(preparation) == "FAILED"
    assert "/no/train.en" in site.log(preparation)


def test_batch_scripts_find_no_python(site: Site, tmp_path: Path) -> None:
    """Steps do: what the other tests of this folder show depends on it."""
    python = shlex.quote(sys.executable)
    (tmp_path / "job.sh").write_text(f"#!/bin/bash\n{python} -c '' || echo none\nsrun {python} -c 'print(2)'\n")
    job = site.cluster.run("sbatch", "--parsable", f"--output={tmp_path}/out", tmp_path / "job.sh", cwd=tmp_path)
    assert site.cluster.wait(job) == "COMPLETED"
    assert (tmp_path / "out").read_text(encoding="utf-8").splitlines()[1:] == ["none", "2"]


def submit_lines(site: Site, folder: Path, *lines: str, options: list[str]) -> tuple[str, Path]:
    """Submit a script of its own that uses slurm/lib.sh; its number and its log."""
    script, log = folder / "job.sh", folder / "out"
    script.write_text("\n".join(("#!/bin/bash", "source slurm/lib.sh", *lines, "finish 0")) + "\n", encoding="utf-8")
    return site.cluster.run("sbatch", "--parsable", *options, f"--output={log}", script, cwd=site.checkout), log


def test_an_archived_environment_is_unpacked_on_a_disk_of_each_node(site: Site, tmp_path: Path) -> None:
    prefix, archive = tmp_path / "environment", tmp_path / "environment.tar"
    site.cluster.run(sys.executable, "-m", "venv", "--without-pip", prefix)
    site.cluster.run("tar", "-cf", archive, "-C", tmp_path, prefix.name)
    disk = site.cluster.folder / "disk" / "copy"
    with site.edited(f'ARCHIVE="{archive}" NODE_FOLDER="{disk}" PYTHON=("$NODE_FOLDER/environment/bin/python")'):
        line = """run_step none 2 1 "${PYTHON[@]}" -c 'import os, sys; print(os.uname().nodename, sys.prefix)'"""
        job, log = submit_lines(site, tmp_path, line, options=["--nodes=2"])
        state, said = site.cluster.wait(job), log.read_text(encoding="utf-8")
    assert state == "COMPLETED", said
    assert sorted(line[3:] for line in said.splitlines()) == [f"node{number} {disk}/environment" for number in (1, 2)]
    left = [list((site.cluster.folder / f"disk-{node}").iterdir()) for node in site.cluster.nodes]
    assert left == [[], []]


def test_each_task_has_its_own_cores(site: Site, tmp_path: Path) -> None:
    """The nodes claim more cores than this machine has, so the job asks for the first two."""
    line = "run_step none 1 2 grep Cpus_allowed_list /proc/self/status"
    options = ["--nodes=1", "--ntasks-per-node=2", "--distribution=block:block"]
    job, log = submit_lines(site, tmp_path, line, options=options)
    assert site.cluster.wait(job) == "COMPLETED", log.read_text(encoding="utf-8")
    said = log.read_text(encoding="utf-8")
    assert sorted(line.split()[-1] for line in said.splitlines()) == ["0", "1"], said


def test_a_training_waits_for_cpus_near_its_gpus(site: Site) -> None:
    """First, the free CPUs of both nodes are on one socket and the free GPUs on the other one."""
    command = ["sbatch", "--parsable", "--nodes=2", "--mem=1000", "--output=/dev/null", "--wrap=sleep 600"]
    others = [
        site.cluster.run(*command, *options)
        for options in (["--mincpus=32", "--distribution=block:block"], ["--mincpus=1", "--gpus-per-node=4"])
    ]
    for other in others:
        wait_until(lambda other=other: site.cluster.state(other) == "RUNNING", "CPUs or GPUs are taken")
    options = ["--nodes=1", "--gpus-per-node=2", "--mincpus=8"]
    with site.edited("scontrol show job --details $SLURM_JOB_ID; PYTHON=(true)"):
        job = site.submit("train_big.sh", options=options, STAGES="none")
        wait_until(lambda: "Reason=Resources" in site.cluster.run("scontrol", "show", "job", job), "the job waits")
        site.cluster.run("scancel", others[1])
        site.cluster.wait(job)
    # The second socket has CPUs 32 to 63 and GPUs 4 to 7.
    assert re.search(r"CPU_IDs=(3[2-9]|[45]\d|6[0-3])-\d+ .*IDX:4-5", site.log(job)), site.log(job)
    site.cluster.run("scancel", others[0])


def test_from_another_folder_the_remedy_is_named(site: Site, tmp_path: Path) -> None:
    options = ["--parsable", *TWO_NODES, f"--output={tmp_path}/out"]
    job = site.cluster.run("sbatch", *options, site.checkout / "slurm/train_big.sh", cwd=tmp_path)
    assert site.cluster.wait(job) == "FAILED"
    assert "is not the checkout: sbatch in its root, or with --chdir" in (tmp_path / "out").read_text(encoding="utf-8")


def test_the_pipeline_chains_its_jobs(site: Site, finished: FinishedJob) -> None:
    env = {"RUNS": str(site.checkout / "more runs"), "DOCTOR": "no"}
    said = site.cluster.run("slurm/pipeline.sh", "big", *TWO_NODES, "--", *SMALL, cwd=site.checkout, env=env)
    jobs = dict(re.findall(r"^(\w+): +job (\d+)$", said, re.MULTILINE))
    assert list(jobs) == ["prepare", "train", "evaluate"]
    assert site.cluster.wait(jobs["evaluate"]) == "COMPLETED", site.log(jobs["train"]) + site.log(jobs["evaluate"])
    run_dir = site.checkout / "more runs" / "big-en-de"
    assert (run_dir / "ledger.jsonl").read_bytes() == (finished.run_dir / "ledger.jsonl").read_bytes()
    scores = [json.loads((folder / "bleu.json").read_text())["bleu"] for folder in (run_dir, finished.run_dir)]
    assert scores[0] == scores[1]
    # Training left the evaluation to its own job.
    assert "trained on" not in site.log(jobs["train"])


def test_a_corpus_is_translated_on_two_nodes(site: Site, finished: FinishedJob) -> None:
    """The hypotheses of the evaluation, which decoded the same lines greedily."""
    source = site.checkout.parent / "parallel text" / "test.en"
    output = site.checkout / "mono text.de"
    flags = ["--input", str(source), "--beam", "1", "--chunk-lines", "2"]
    job = site.submit("translate.sh", *flags, options=TWO_NODES, RUN_DIR=finished.run_dir, OUTPUT=output)
    assert site.cluster.wait(job) == "COMPLETED", site.log(job)
    assert output.read_bytes() == (finished.run_dir / "bleu.hypotheses.txt").read_bytes()
    assert not output.with_name("mono text.de.parts").exists()


def test_rows_of_table_3_are_a_job_array_and_its_table(site: Site, finished: FinishedJob) -> None:
    # Without preset and steps, which are table3's own, and with the validation that its figures come from.
    flags = overridden([*SMALL[2:-2], "--validate-every", "10", "--validate-sentences", "0"])
    asked = ["--preset", "tiny", "--max-steps", "10", "--average", "1", "--", *flags]
    script = ["slurm/ablations.sh", "--nodes=1", "--gpus-per-node=1", "--array=0,18", "--", *asked]
    said = site.cluster.run(*script, cwd=site.checkout, env={"DOCTOR": "no"})
    jobs = dict(re.findall(r"^(\w+): +job (\d+)$", said, re.MULTILINE))
    assert site.cluster.wait(jobs["table"]) == "COMPLETED", site.log(jobs["table"])
    folder = site.checkout / "runs" / "table3-en-de"
    assert {len(list(read_ledger(folder / row / "ledger.jsonl"))) for row in ("base", "E")} == {10}
    table = (folder / "table3.md").read_text(encoding="utf-8")
    assert re.search(r"\| E \| positions sinusoidal → learned \|.*\| -0\.1 \|", table)


def test_the_array_is_the_table() -> None:
    from dist_transformer.config.presets import VARIANTS

    script = (ROOT / "slurm" / "ablations.sh").read_text(encoding="utf-8")
    assert f"array=--array=0-{len(VARIANTS) - 1} " in script


def test_mpirun_and_srun_give_the_same_world_inside_a_job(site: Site, tmp_path: Path) -> None:
    """mpirun starts its helpers by srun, whose variables the ranks inherit."""
    python, worker = shlex.quote(sys.executable), ROOT / "tests" / "distributed" / "worker_world.py"
    mpirun = Path(sys.executable).with_name("mpirun")
    lines = [
        "#!/bin/bash",
        f"srun --mpi=pmi2 {python} {worker}",
        f"{mpirun} -n 4 {python} {worker}",
        f"RANK=0 WORLD_SIZE=1 srun {python} {worker} 2>&1 | grep -o 'WORLD_SIZE is 1 but srun started 2 tasks' | uniq",
    ]
    (tmp_path / "job.sh").write_text("\n".join(lines) + "\n", encoding="utf-8")
    options = ["--parsable", "--nodes=2", "--ntasks-per-node=1", f"--output={tmp_path}/out"]
    env = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    job = site.cluster.run("sbatch", *options, tmp_path / "job.sh", cwd=tmp_path, env=env)
    site.cluster.wait(job)
    said = (tmp_path / "out").read_text(encoding="utf-8")
    seen = [json.loads(line) for line in said.splitlines() if line.startswith("{")]
    assert sorted(rank["rank"] for rank in seen if rank["size"] == 2) == [0, 1], said
    assert sorted(rank["rank"] for rank in seen if rank["size"] == 4) == [0, 1, 2, 3], said
    assert said.splitlines()[-1] == "WORLD_SIZE is 1 but srun started 2 tasks"
