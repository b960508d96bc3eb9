"""Parts become one result file that keeps to the layout, and a picture of its rates."""

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import bench, gpu_check
from benchmarks import command as benchmark
from benchmarks.bench import Suite, merge
from benchmarks.measure import Part, TrainingPart, read_flags, spread
from benchmarks.results_table import make_lines, read_result
from benchmarks.rows import train_row
from dist_transformer.config.flags import parse_training


def training(ours: float, *, date: str = "2026-01-31") -> dict[str, Any]:
    contenders = {
        "ours": {"rates": spread([ours - 10, ours, ours + 20]), "ours_to_this": spread([1.0])},
        "torch": {"rates": spread([ours / 4]), "ours_to_this": spread([4.0])},
    }
    return {
        **{"what": "training", "corpus": "mix (en-de)", "synthetic": False, "date": date, "seeds": [1]},
        **{"machine": "4 cores of AMD EPYC", "commands": ["python tools/benchmark.py train"], "wall_seconds": 2.5},
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
    assert file.with_suffix(".png").read_bytes().startswith(b"\x89PNG")


def test_parts_are_commands_that_exist(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each by the parser of tools/benchmark.py itself, on a CPU and on a GPU."""
    names = [f"{corpus}/{text}" for corpus, texts in bench.TEXTS.items() for text in texts]
    for file in (tmp_path / f"{name}.{side}" for name in (*names, *bench.TEST_SETS.values()) for side in ("en", "de")):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
    parsed: list[tuple[str, Part]] = []
    trained = []

    def parse(self: Suite, tool: str, *words: object) -> None:
        """Instead of running it."""
        name, *flags = map(str, words)
        if tool == "train":
            trained.append(parse_training([name, *flags])[0])
        elif tool == "tools/benchmark.py":
            parsed.append((name, read_flags(benchmark.part_of(name), flags)))
            Path(str(parsed[-1][1].json)).write_text("{}")
        else:
            assert tool in ("prepare", "average")

    monkeypatch.setattr(Suite, "run", parse)
    suite = Suite(corpora=tmp_path, work=tmp_path)
    for part in bench.PARTS:
        for on_cpu in (True, False):
            suite.measure(part, *bench.command_of(part, suite, on_cpu=on_cpu))
            name, settings = parsed[-1]
            assert (name, settings.json) == (part.partition("-")[0], tmp_path / f"{part}.json")
            if isinstance(settings, TrainingPart):
                batch = settings.config().batch
                # As users get it.
                assert not on_cpu or batch.packs_per_micro_batch is None
    for name in gpu_check.PARTS.keys() - {"tests"}:
        list(gpu_check.PARTS[name](suite))
    assert {(config.model.width, config.max_steps) for config in trained} == {(128, 1600), (512, 7500), (512, 2000)}
    assert any("--compile" in settings.flags for _, settings in parsed if isinstance(settings, TrainingPart))


def test_gpu_check_says_what_its_steps_speak_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Computed by hand: 300 is 1.2 · 250, pays, 59 against 68 does not; 0.5 · 600 of 989 TFLOP/s (H100) is 0.30."""

    def step(rate: float, share: float) -> dict[str, Any]:
        return {"rates": {"median": rate}, "share_of_product_rate": share, "product_flops_per_second": 6e14}

    monkeypatch.setattr(gpu_check, "device_name", lambda: "h100")
    assert list(gpu_check.advice(tmp_path)) == []
    steps = {"step-64-compiled": step(300, 0.5), "step-64": step(250, 0.4), "step-8-compiled": step(59, 0.1)}
    file = tmp_path / "gpu-check-h100.json"
    file.write_text(json.dumps({"figures": {**steps, "step-8": step(68, 0.2)}}))
    assert list(gpu_check.advice(tmp_path)) == [
        "64 pack(s) at a time: compiled 300, not compiled 250: --compile auto should be on",
        "8 pack(s) at a time: compiled 59, not compiled 68: --compile auto should be off",
        "cost/hardware.py: MFU = 0.30",
    ]
