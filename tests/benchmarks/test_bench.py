"""Parts become one result file that keeps to the layout, and a picture of its rates."""

import json
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import bench, gpu_check
from benchmarks import command as benchmark
from benchmarks.bench import Suite, merge
from benchmarks.measure import Part, TrainingPart, read_flags
from benchmarks.results_table import make_lines, read_result
from benchmarks.rows import train_row
from dist_transformer.config.flags import parse_training
from dist_transformer.runtime.launch import own_command
from tests.conftest import ROOT, run_command


def rate(*values: float) -> dict[str, Any]:
    return {"median": sorted(values)[len(values) // 2], "lowest": min(values), "highest": max(values)}


def training(ours: float, *, machine: str = "4 cores of AMD EPYC", date: str = "2026-01-31") -> dict[str, Any]:
    contenders = {
        "ours": {"rates": rate(ours - 10, ours, ours + 20), "ours_to_this": rate(1.0)},
        "torch": {"rates": rate(ours / 4), "ours_to_this": rate(4.0)},
    }
    return {
        "what": "training",
        "corpus": "mix (en-de)",
        "synthetic": False,
        "date": date,
        "machine": machine,
        "commands": ["python tools/benchmark.py train"],
        "seeds": [1],
        "wall_seconds": 2.5,
        "figures": {"preset": "tiny", "precision": "bf16", "unit": "tokens per CPU second", "contenders": contenders},
        "rows": [train_row([*contenders], gpu=False)],
    }


def test_parts_are_merged_into_one_file(tmp_path: Path) -> None:
    """A part that is measured again replaces its figures; each has its rows; a picture lies beside."""
    file = tmp_path / "bench-cpu.json"
    merge(file, "train-tiny", training(1000), what="both")
    merge(file, "train-big", training(50, date="2026-02-01"), what="both", load="shared with other work")
    merge(file, "train-tiny", training(1200), what="both")
    result = read_result(file)
    assert list(result["figures"]) == ["train-tiny", "train-big"]
    assert (result["date"], result["wall_seconds"], result["seeds"]) == ("2026-02-01", 5.0, [1])
    assert result["machine"] == "4 cores of AMD EPYC; shared with other work"
    assert len(result["commands"]) == 2
    lines = [(table, line.split(" | ")[:2]) for table, line in make_lines(file, result)]
    assert lines == [("training", ["| `tiny`, bf16", "1,200"]), ("training", ["| `tiny`, bf16", "50"])]
    width, height = struct.unpack(">II", file.with_suffix(".png").read_bytes()[16:24])
    assert width > 500
    assert height > 200
    names = ["bench-cpu-history.jsonl", "bench-cpu.json", "bench-cpu.png"]
    assert sorted(path.name for path in tmp_path.iterdir()) == names
    # What was replaced stays in the history, by commit.
    history = [json.loads(line) for line in (tmp_path / names[0]).read_text().splitlines()]
    assert [(line["part"], line["rates"]["ours"]) for line in history] == [
        ("train-tiny", 1000),
        ("train-big", 50),
        ("train-tiny", 1200),
    ]
    head = ["git", "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(head, cwd=ROOT, check=True, capture_output=True, text=True).stdout.strip()
    assert {line["commit"].rstrip("+") for line in history} == {commit}
    assert [line["load"] for line in history] == [None, "shared with other work", None]


def test_parts_are_commands_that_exist(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each by the parser of tools/benchmark.py itself, on a CPU and on a GPU."""
    suite = Suite(corpora=tmp_path, work=tmp_path, vocab_size=400)
    for place in (bench.TRAINING_TEXT, bench.DECODED_TEXT, bench.DECODED_VALID, *bench.TEST_SETS.values()):
        for language in (bench.SOURCE, bench.TARGET):
            file = tmp_path / f"{place}.{language}"
            file.parent.mkdir(parents=True, exist_ok=True)
            file.touch()
    parsed: list[tuple[str, Part]] = []
    trained = []

    def parse(self: Suite, tool: str, *words: object) -> None:
        """Instead of running it."""
        if tool in ("prepare", "average"):
            return
        assert tool == "tools/benchmark.py"
        name, *flags = map(str, words)
        part = read_flags(benchmark.part_of(name), flags)
        parsed.append((name, part))
        assert part.json is not None
        part.json.write_text("{}")

    def train(command: list[object], **_: object) -> str:
        start = own_command("train")
        assert command[: len(start)] == start
        trained.append(parse_training([str(word) for word in command[len(start) :]])[0])
        return ""

    monkeypatch.setattr(Suite, "run", parse)
    monkeypatch.setattr("benchmarks.bench.run_printed", train)
    for part in bench.PARTS:
        for on_cpu in (True, False):
            suite.measure(part, *bench.command_of(part, suite, on_cpu=on_cpu))
            name, settings = parsed[-1]
            assert name == part.partition("-")[0]
            assert settings.json == tmp_path / f"{part}.json"
            if isinstance(settings, TrainingPart):
                batch = settings.config().batch
                assert not on_cpu or batch.packs_per_step == batch.packs_at_once
    assert {config.model.width for config in trained} == {128, 512}
    for measure in (gpu_check.measure_training, gpu_check.measure_decoding):
        list(measure(suite))
    assert any("--compile" in settings.flags for _, settings in parsed if isinstance(settings, TrainingPart))


@pytest.mark.slice(name="benchmarks")
def test_a_model_learns_for_a_moment(toy_data: Any, tmp_path: Path) -> None:
    """The folder can be read, and its loss is below that of the start."""
    from dist_transformer.model_folder import read_model_info

    out = tmp_path / "model"
    small = ["--model.width", "32", "--model.heads", "2", "--batch.max-target-tokens", "256"]
    command = [sys.executable, "tools/benchmark.py", "learn", "--data", toy_data.path, "--minutes", "0.05"]
    said = run_command(*command, "--out", out, "--json", tmp_path / "learn.json", "--", *small)
    figures = json.loads((tmp_path / "learn.json").read_text())["figures"]
    assert figures["nll_after"] < figures["nll_before"]
    assert read_model_info(out).steps == (figures["steps"],)
    assert f"{figures['steps']:,} steps in" in said


def test_gpu_check_says_what_its_steps_speak_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Computed by hand: 300 is 1.2 · 250, pays, 59 against 68 does not; 0.5 · 600 of 989 TFLOP/s (H100) is 0.30."""

    def step(rate: float, share: float) -> dict[str, Any]:
        return {"rates": {"median": rate}, "share_of_product_rate": share, "product_flops_per_second": 6e14}

    steps = {"step-64-compiled": step(300, 0.5), "step-64": step(250, 0.4), "step-8-compiled": step(59, 0.1)}
    file = tmp_path / "gpu-check-h100.json"
    file.write_text(json.dumps({"figures": {**steps, "step-8": step(68, 0.2)}}))
    monkeypatch.setattr(bench, "device_name", lambda: "h100")
    assert list(gpu_check.advice(tmp_path)) == [
        "64 pack(s) at a time: compiled 300, not compiled 250: --compile auto should be on",
        "8 pack(s) at a time: compiled 59, not compiled 68: --compile auto should be off",
        "cost/hardware.py: MFU = 0.30",
    ]
    file.write_text(json.dumps({"figures": {"step-64": step(250, 0.4)}}))
    assert list(gpu_check.advice(tmp_path)) == ["cost/hardware.py: MFU = 0.24"]
    assert list(gpu_check.advice(tmp_path / "missing")) == []
