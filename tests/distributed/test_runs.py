"""Whole runs under DeepSpeed's launcher, as a user starts them: any world, kill -9, damage, a task that is learned."""

import contextlib
import json
import random
import re
import shlex
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from sacrebleu.metrics.bleu import BLEU
from sacrebleu.metrics.chrf import CHRF
from sacrebleu.metrics.ter import TER
from safetensors.torch import load_file

from benchmarks.launching import overridden
from dist_transformer.averaging.mean import average
from dist_transformer.averaging.sources import weight_file_metadata
from dist_transformer.base.files import sha256_of
from dist_transformer.config.plain import to_plain
from dist_transformer.data.folder.format import read_shard
from dist_transformer.data.folder.reader import DataFolder
from dist_transformer.evaluation.samples import read_sheets
from dist_transformer.run.layout import read_records
from dist_transformer.run.ledger import read_ledger
from dist_transformer.run.lock import sole_training
from dist_transformer.runtime.launch import as_typed, own_command
from tests.conftest import ROOT, deepspeed_command, run_command, run_ranks
from tests.jobs import Job, require_same_end

pytestmark = pytest.mark.slow

SMALL = [
    *("--preset", "tiny", "--model.width", "32", "--model.ffn-width", "64", "--model.heads", "2"),
    *("--batch.max-target-tokens", "256", "--batch.packs-per-step", "4"),
    *("--optimizer.warmup-steps", "10", "--validate-every", "0", "--log-every", "1"),
    # With Adam's usual 1e-9, the rounding of a nearly dead neuron's gradient decides where it goes, and losses that
    # began equal are 2e-5 apart after 20 steps. What is compared here is the gradient, whatever adds it up.
    *("--optimizer.epsilon", "1e-6"),
]
# With seeds 2 and 3 even 1e-6 lets one neuron of some world go its own way, from one step on: losses are then up to
# 8e-5 apart. With seeds 4 and 5, as in the other worlds of seed 3, they stay within 1e-6.
FP32 = ("--precision", "fp32", "--ema-decay", 0.9, "--seed", 4)


def train(ranks: int, data: Path, run_dir: Path, *flags: object, status: int = 0) -> str:
    places = ["--data", data, "--run-dir", run_dir]
    return run_ranks(ranks, "-m", "dist_transformer.train", *overridden([*SMALL, *places, *flags]), status=status)


def left_in_memory() -> set[Path]:
    """Files of DeepSpeed in shared memory that no process uses: others may train on this machine."""
    files, used = set(Path("/dev/shm").glob("deepspeed*")), ""
    for process in Path("/proc").glob("[0-9]*/maps"):
        with contextlib.suppress(OSError):
            used += process.read_text(encoding="utf-8", errors="replace") if files else ""
    return {file for file in files if str(file) not in used}


def losses(run_dir: Path) -> list[float]:
    return [record["loss"] for record in read_records(run_dir, "train")]


@pytest.fixture(scope="module")
def worlds(toy_data: DataFolder, tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """The same 20 steps, dropout on, on 1, 2 and 3 ranks."""
    runs = {}
    for ranks in (1, 2, 3):
        runs[ranks] = tmp_path_factory.mktemp("worlds") / str(ranks)
        profile = ("--profile", "3:2") if ranks == 2 else ()
        train(ranks, toy_data.path, runs[ranks], "--max-steps", 20, "--save-every", 10, *FP32, *profile)
    return runs


def averaged(run_dir: Path) -> dict[str, torch.Tensor]:
    return load_file(run_dir / "weights" / "ema-00000020.safetensors")


def farthest(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    assert a.keys() == b.keys()
    return max(float((a[name] - b[name]).abs().max()) for name in a)


@pytest.mark.parametrize("ranks", [2, 3])
def test_any_world_has_the_same_sentences_losses_and_average(worlds: dict[int, Path], ranks: int) -> None:
    ledgers = [list(read_ledger(worlds[world] / "ledger.jsonl")) for world in (ranks, 1)]
    assert ledgers[0] == ledgers[1]
    assert len(ledgers[1]) == 20
    assert losses(worlds[ranks]) == pytest.approx(losses(worlds[1]), abs=1e-5)
    assert farthest(averaged(worlds[ranks]), averaged(worlds[1])) <= 1e-5


def test_the_rank_whose_own_work_takes_longest_is_recorded(worlds: dict[int, Path]) -> None:
    for record in read_records(worlds[3], "train"):
        assert record["slowest_rank"] in range(3)
        assert record["slowest_rank_seconds"] >= record["median_rank_seconds"] > 0
        assert record["peak_memory_bytes"] > 2**20
    assert "slowest_rank" not in read_records(worlds[1], "train")[0]


def test_a_profile_is_one_trace_in_the_run_folder(worlds: dict[int, Path]) -> None:
    (trace,) = (trace for run in worlds.values() for trace in run.glob("trace-*"))
    assert trace == worlds[2] / "trace-00000003-00000004.json"
    assert "aten::mm" in {event.get("name") for event in json.loads(trace.read_text())["traceEvents"]}


def test_weight_files_say_of_which_run_they_are_and_when_they_were_written(
    worlds: dict[int, Path], toy_data: DataFolder
) -> None:
    seconds = {record["step"]: record["train_seconds"] for record in read_records(worlds[2], "train")}
    described = {step: weight_file_metadata(worlds[2] / f"weights/step-{step:08d}.safetensors") for step in (10, 20)}
    assert {step: values["train_seconds"] for step, values in described.items()} == {s: seconds[s] for s in (10, 20)}
    alone = weight_file_metadata(worlds[1] / "weights/step-00000020.safetensors")
    assert described[10]["run"] == described[20]["run"] == alone["run"]
    assert described[20]["marks"] == alone["marks"] == [to_plain(toy_data.index.marks)]
    assert [values["interrupted"] for values in described.values()] == [False, False]
    sources = [read_shard(toy_data.path / shard.file)[0] for shard in toy_data.index.train.shards]
    longest = max(source.lengths.max() for source in sources)
    assert described[20]["longest_source"] == alone["longest_source"] == longest
    several = toy_data.index.several_sentences
    assert several is not None
    assert described[20]["several_sentences"] == alone["several_sentences"] == several / toy_data.index.train.pairs


def test_a_run_resumes_in_other_worlds_and_stages(
    worlds: dict[int, Path], toy_data: DataFolder, tmp_path: Path
) -> None:
    """Each time the same command on more ranks or fewer, and under another stage; three do not share evenly."""
    run_dir = tmp_path / "run"
    in_memory = left_in_memory()
    parts = [(1, "zero1"), (3, "zero3"), (4, "zero2"), (1, "zero0")]
    for part, (ranks, stage) in enumerate(parts, start=1):
        config = ROOT / "ds_configs" / f"{stage}.json"
        train(ranks, toy_data.path, run_dir, "--max-steps", 5 * part, "--deepspeed-config", config, *FP32)
    assert losses(run_dir) == pytest.approx(losses(worlds[1]), abs=1e-5)
    assert list(read_ledger(run_dir / "ledger.jsonl")) == list(read_ledger(worlds[1] / "ledger.jsonl"))
    assert farthest(averaged(run_dir), averaged(worlds[1])) <= 1e-5
    assert left_in_memory() <= in_memory


def test_a_run_begins_with_a_model(worlds: dict[int, Path], toy_data: DataFolder, tmp_path: Path) -> None:
    """A run starts with the averaged weights of another one, and later resumes from its own checkpoint."""
    model, run_dir = tmp_path / "model", tmp_path / "run"
    average([worlds[1] / "weights" / "ema-00000020.safetensors"], model)
    begun = load_file(model / "model.safetensors")
    assert all(begun[name].equal(tensor) for name, tensor in averaged(worlds[1]).items())
    # In bf16 the fp32 weights must still be the model's, to the last bit but for the update.
    places = ("--init-from", model, "--data", toy_data.path, "--run-dir", run_dir)
    sizes = ("--batch.max-target-tokens", 256, "--validate-every", 2, "--validate-sentences", 0, "--ema-decay", 0)
    flags = ("--preset", "finetune", *places, *sizes, "--optimizer.peak-lr", 1e-12, "--save-every", 1)
    # Its network is that of the model, and its score is that of the weights it begins with.
    output = run_ranks(1, "-m", "dist_transformer.train", *flags, "--max-steps", 1)
    assert f"starts with the weights of {model}" in output
    assert [record["step"] for record in read_records(run_dir, "valid")] == [0, 1]
    start, after = (record["nll"] for record in read_records(run_dir, "valid"))
    assert start == pytest.approx(after, abs=1e-6)
    weights = run_dir / "weights"
    assert farthest(load_file(weights / "step-00000001.safetensors"), begun) <= 1e-11
    model.rename(tmp_path / "moved")
    more = overridden([*flags, "--max-steps", 2, "--ema-decay", 0.9])
    output = run_ranks(1, "-m", "dist_transformer.train", *more)
    assert "the moving average of the weights starts with the weights of step 1" in output
    assert farthest(load_file(weights / "ema-00000002.safetensors"), begun) <= 1e-11
    recorded = json.loads((run_dir / "config.json").read_text())
    assert recorded["init_from"] == str(model)
    assert recorded["init_from_sha256"] == sha256_of(tmp_path / "moved" / "model.safetensors")
    output = run_command(sys.executable, "tools/verify_run.py", run_dir)
    assert "3 equal to a checkpoint's" in " ".join(output.split())


def test_each_save_says_how_long_training_waited(worlds: dict[int, Path]) -> None:
    for ranks in (1, 2):
        records = read_records(worlds[ranks], "checkpoint")
        assert [record["step"] for record in records] == [10, 20]
        assert all(0 < record["stall"] <= record["seconds"] for record in records)


def test_a_second_run_in_the_same_folder_is_refused(toy_data: DataFolder, job: Callable[..., Job]) -> None:
    first = job("run", "--max-steps", 10**6, "--save-every", 10**6).start_ranks(1)
    first.wait_for_training()
    output = train(1, toy_data.path, first.run_dir, "--max-steps", 1, status=1)
    assert f"error: {first.run_dir} is in use by process {first.processes[0].pid} on " in output
    assert "Traceback" not in output
    assert first.processes[0].poll() is None
    # Killed: its folder is free at once, with nothing to remove by hand.
    first.close()
    with sole_training(first.run_dir, pytest.fail, patience=1.0):
        pass


def test_a_world_larger_than_the_step_is_refused(toy_data: DataFolder, tmp_path: Path) -> None:
    output = train(2, toy_data.path, tmp_path / "run", "--batch.packs-per-step", 1, status=1)
    assert "packs_per_step is 1 but 2 processes were started" in output
    assert "Traceback" not in output


def test_killed_at_a_random_moment_a_run_ends_as_if_it_was_not(job: Callable[..., Job]) -> None:
    flags = ("--max-steps", 24, "--save-every", 3, "--validate-every", 0)
    whole = job("whole", *flags).start_ranks()
    assert whole.statuses() == [0, 0], whole.output
    print("seed", seed := random.randrange(2**32))
    generator = random.Random(seed)
    for kill in range(2):
        killed = job("killed", *flags).start_ranks()
        killed.wait_for((killed.run_dir / "checkpoints" / f"step-{6 + 9 * kill:08d}").exists)
        time.sleep(generator.random() * 0.5)
        killed.close()
    last = job("killed", *flags).start_ranks()
    assert last.statuses() == [0, 0], last.output
    assert "resumed from" in last.output
    require_same_end(last.run_dir, whole.run_dir, 24)
    assert losses(last.run_dir) == losses(whole.run_dir)


def test_other_settings_are_refused_on_resume_by_name(worlds: dict[int, Path], toy_data: DataFolder) -> None:
    output = train(1, toy_data.path, worlds[1], "--max-steps", 30, "--model.dropout", 0.3, status=1)
    assert "model.dropout = 0.1, not 0.3" in output
    output = train(1, toy_data.path, worlds[1], "--max-steps", 30, "--resume", "never", status=1)
    assert "--resume never" in output


def test_a_rate_that_jumps_on_resume_is_said(worlds: dict[int, Path], toy_data: DataFolder, tmp_path: Path) -> None:
    shutil.copytree(worlds[1], tmp_path / "run")
    output = train(1, toy_data.path, tmp_path / "run", "--max-steps", 20, *FP32, "--optimizer.peak-lr", 1e-6)
    # The preset's 3e-3 · sqrt(10 / 21), and the same part of 1e-6.
    assert "warning: the changed settings continue at a learning rate of 6.9e-07, the old ones at 0.00207" in output


@pytest.mark.slice(name="worlds")
def test_a_copy_task_is_learned(tmp_path: Path) -> None:
    """A model of 2 ranks learns to repeat its input."""
    generator = random.Random(5)
    words = ["".join(generator.choices("abcdefghij", k=3)) for _ in range(60)]
    lines = list(dict.fromkeys(" ".join(generator.choices(words, k=generator.randint(4, 12))) for _ in range(10_200)))
    for name, part in (("train", lines[200:]), ("test", lines[:200])):
        for language in ("xx", "yy"):
            (tmp_path / f"{name}.{language}").write_text("".join(f"{line}\n" for line in part))
    prepare = [sys.executable, "tools/prepare_data.py", "--vocab-size", 400, "--out", tmp_path / "data"]
    run_command(*prepare, "--src", tmp_path / "train.xx", "--tgt", tmp_path / "train.yy")
    settings = ["--preset", "tiny", "--max-steps", 500, "--model.dropout", 0.0, "--optimizer.warmup-steps", 100]
    places = ["--data", tmp_path / "data", "--run-dir", tmp_path / "run"]
    run_command(*deepspeed_command(2), "--module", "dist_transformer", "train", *settings, *places)
    average = [sys.executable, "tools/average_checkpoints.py", "--last", 2]
    run_command(*average, "--run-dir", tmp_path / "run", "--out", tmp_path / "model")
    files = ["--src", tmp_path / "test.xx", "--ref", tmp_path / "test.yy", "--json", tmp_path / "bleu.json"]
    run_command(*deepspeed_command(2), "tools/evaluate_bleu.py", "--model", tmp_path / "model", *files)
    scores: dict[str, Any] = json.loads((tmp_path / "bleu.json").read_text())
    assert scores["bleu"] >= 98
    assert scores["sentences"] == 200


def test_the_end_names_the_weights_and_the_next_command(worlds: dict[int, Path], toy_data: DataFolder) -> None:
    output = train(1, toy_data.path, worlds[1], "--max-steps", 20, *FP32, "--save-every", 10)
    average = as_typed(own_command("average", "--run-dir", worlds[1]))
    assert f"next:    {average}" in output


# Says how many of the files it has seen, but 9 the third time, and fails the fifth time. It keeps the hypotheses.
SCORER = """
import sys
from pathlib import Path
source, hypothesis, reference = (Path(word).read_text("utf-8") for word in sys.argv[2:])
calls = len(list(Path(sys.argv[1]).iterdir())) + 1
Path(sys.argv[1], str(calls)).write_text(hypothesis, "utf-8")
assert source.count("\\n") == hypothesis.count("\\n") == reference.count("\\n") == 5
if calls == 5:
    sys.exit("no model")
print("score:", 9 if calls == 3 else calls)
"""


def test_the_best_weights_stay_and_validation_changes_nothing(toy_data: DataFolder, tmp_path: Path) -> None:
    plain, run_dir, seen = tmp_path / "plain", tmp_path / "run", tmp_path / "seen"
    seen.mkdir()
    steps = ("--max-steps", 6, "--save-every", 6)
    train(2, toy_data.path, plain, *steps)
    validation = ("--validate-every", 1, "--validate-sentences", 5, "--keep-weights", 1, "--keep-best", 2)
    scorer = shlex.join([sys.executable, "-c", SCORER, str(seen), "{source}", "{hypothesis}", "{reference}"])
    validation = (*validation, "--validation-command", scorer)
    output = train(2, toy_data.path, run_dir, *steps, *validation, "--best-by", "command")
    weights = "weights/step-00000006.safetensors"
    whole, validated = load_file(plain / weights), load_file(run_dir / weights)
    assert all(whole[name].equal(validated[name]) for name in whole)
    records = read_records(run_dir, "valid")
    assert [(record["step"], record.get("command")) for record in records] == [
        *((1, 1.0), (2, 2.0), (3, 9.0), (4, 4.0), (5, None), (6, 6.0))
    ]
    # The losses fall, so another measure has other steps.
    assert min(records, key=lambda record: record["nll"])["step"] == 6
    assert {int(file.stem[5:]) for file in (run_dir / "weights").glob("step-*")} == {3, 6}
    assert "step 5: the validation command failed with status 1 (no model): check --validation-command" in output
    assert "command 4 (5 lines), best was 9.000 at step 3" in output
    sheets = read_sheets(run_dir)
    assert [sheet.bleu for sheet in sheets] == [record["bleu"] for record in records]
    assert [sheet.sentences for sheet in sheets] == [5] * 6
    sources, references = toy_data.valid_text()
    assert (sheets[-1].samples[0].source, sheets[-1].samples[-1].reference) == (sources[0], references[-1])
    assert f"BLEU {records[-1]['bleu']:.1f}, chrF {records[-1]['chrf']:.1f}, TER {records[-1]['ter']:.1f}" in output
    assert output.count("\n  hypothesis: ") == len(records)
    for number, (record, sheet) in enumerate(zip(records, sheets, strict=True), 1):
        hypotheses = (seen / str(number)).read_text("utf-8").removesuffix("\n").split("\n")
        assert hypotheses == [sample.hypothesis for sample in sheet.samples]
        ranked = [[sample.reference for sample in sheet.samples]]
        for name, metric in (("bleu", BLEU()), ("chrf", CHRF()), ("ter", TER())):
            assert record[name] == metric.corpus_score(hypotheses, ranked).score
    # What was ranked by one measure is not continued by another.
    output = train(1, toy_data.path, run_dir, *steps, *validation, "--best-by", "chrf", status=1)
    assert "has ranked its validations with best_by = 'command', not 'chrf', and two measures cannot be" in output


def test_the_plan_of_a_run_beside_what_it_measured(worlds: dict[int, Path]) -> None:
    """Two ranks at ZeRO-1 in fp32; on a CPU no speed is predicted."""
    output = run_command(sys.executable, "-m", "dist_transformer", "plan", "--against", worlds[2])
    rows = {line.split(",")[0]: line.split()[-3:] for line in output.splitlines() if "MiB " in line or ", ms" in line}
    for name in ("states between steps", "checkpoint"):
        assert 0.9 < float(rows[name][2]) < 1.1, output
    assert (rows["peak memory"][0], rows["step time"][0]) == ("—", "—")
    assert float(rows["peak memory"][1].replace(",", "")) > 100
    assert "machine   1 node(s) with 2 x CPU process, ZeRO-1" in output


def test_mode_checks_a_run_before_it_is_queued(toy_data: DataFolder) -> None:
    command = [sys.executable, "-m", "dist_transformer.train", "--test-mode", *SMALL]
    output = run_command(*command, "--data", toy_data.path, "--optimizer.peak-lr", 2e-2)
    names = [
        "loss falls",
        "every update applied",
        "saves a complete checkpoint",
        "resumes exactly",
        "decodes as it trains",
        "memorizes sentences",
    ]
    rows = re.findall(r"^(\S.*?) +(ok|FAIL)  ", output, flags=re.MULTILINE)
    assert rows == [(name, "ok") for name in names]
    # Of the trainings inside nothing is shown.
    assert not [line for line in output.splitlines() if line.startswith(("step ", "epoch ", "finished ", "resumed "))]
    assert "tok/s" not in output
    assert "effective batch  4 packs, at most 1,024 target tokens per step" in output
    assert "GiB" in output
    output = run_command(*command, "--data", toy_data.path, "--optimizer.peak-lr", 1e-9, status=1)
    rows = re.findall(r"^(\S.*?) +(ok|FAIL)  ", output, flags=re.MULTILINE)
    assert ("memorizes sentences", "FAIL") in rows
    assert ("resumes exactly", "ok") in rows
    assert "Traceback" not in output
