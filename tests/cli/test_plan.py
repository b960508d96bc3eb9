"""`dist-transformer plan`, as it prints."""

import json
import sys
from pathlib import Path

import pytest

from dist_transformer.base.errors import UserError
from dist_transformer.cli.plan import main, parse_arguments
from dist_transformer.config.settings import EMBEDDED_CORPUS
from dist_transformer.data.folder.reader import DataFolder


def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: str) -> str:
    monkeypatch.setattr(sys, "argv", ["plan_run.py", *arguments.split()])
    try:
        main()
    finally:
        output = capsys.readouterr().out
    return output


def test_flags_of_training_are_taken() -> None:
    flags = ["--batch.packs-per-step", "16", "--save-every", "7"]
    found = parse_arguments(["--preset", "big", "--variant", "C2", "--nodes", "2", *flags])
    assert (found.cluster.nodes, found.train.batch.packs_per_step, found.train.checkpoints.save_every) == (2, 16, 7)
    # Four of base's six layers.
    assert (found.train.model.width, found.train.model.encoder_layers) == (1024, 4)
    assert found.train.corpora.data == EMBEDDED_CORPUS


def test_the_screen(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    out = tmp_path / "plan.json"
    arguments = f"--preset big --nodes 2 --gpus 8 --gpu h100 --json {out}"
    screen = run(monkeypatch, capsys, arguments)
    assert max(map(len, screen.splitlines())) <= 110
    assert "214,245,376 parameters with 37,000 words" in screen
    assert "a MODEL, not a measurement (--mfu 0.33 of 989 TFLOP/s)" in screen
    # The table of GPUs has 8 x 400 Gbit/s for a DGX H100, and 450 GB/s inside.
    assert "rings over 3200 Gbit/s and 15 µs between nodes, 450 GB/s and 5 µs in a node; no overlap" in screen
    assert "best      1 node(s): " in screen
    assert "ZeRO-2: each rank has one micro-batch per step" in screen
    (chosen,) = (line for line in screen.splitlines() if line.startswith(">"))
    assert chosen.split()[1] == "ZeRO-1"
    assert chosen.endswith("fits")
    written = json.loads(out.read_text())
    assert f"{written['target_tokens_per_second']:,.0f} target tokens/s" in screen
    assert [stage["name"] for stage in written["stages"]] == [
        "ZeRO-0",
        "ZeRO-1",
        "ZeRO-2",
        "ZeRO-3",
        "ZeRO-3 offload",
    ]
    assert written["speed_is"] == "a model, not a measurement"


def test_a_run_that_does_not_fit_fails_with_the_remedy(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = "--preset big --gpu v100-16 --precision fp32 --batch.packs-per-micro-batch 64"
    with pytest.raises(UserError, match=r"ZeRO-1 needs .* GiB per GPU; train with --batch.packs-per-micro"):
        run(monkeypatch, capsys, arguments)


def test_a_cpu_gets_no_claim(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    screen = run(monkeypatch, capsys, "--preset tiny --gpu cpu")
    assert "no prediction for a CPU" in screen
    assert "tokens/s" not in screen


def test_a_small_model_waits_for_launches(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    screen = run(monkeypatch, capsys, "--preset tiny")
    assert "h100: 108,714 target tokens/s: a MODEL, not a measurement" in screen
    assert "limited by the launches of its kernels" in screen
    # No jobs of a cluster unless flags describe one.
    assert "requeue" not in screen
    assert "requeue" in run(monkeypatch, capsys, "--preset tiny --job-hours 2")


def test_names_that_are_unknown_are_refused() -> None:
    with pytest.raises(UserError, match="--preset huge is unknown"):
        parse_arguments(["--preset", "huge"])
    with pytest.raises(UserError, match="--against takes settings and machine from the run"):
        parse_arguments(["--against", "run", "--nodes", "2"])


def test_a_json_that_cannot_be_written_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=r"none/plan.json cannot be written .*choose another place"):
        run(monkeypatch, capsys, f"--preset tiny --gpu cpu --json {tmp_path}/none/plan.json")


def test_an_absurd_plan_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], toy_data: DataFolder
) -> None:
    """An epoch is 4 steps of 64 packs."""
    monkeypatch.setattr(sys, "argv", ["plan_run.py", "--preset", "big", "--gpu", "cpu", "--data", str(toy_data.path)])
    main()
    screen, warnings = capsys.readouterr()
    tokens = f"{toy_data.index.train.target_tokens:,}"
    assert f"75,000.0 epochs of {tokens} target tokens" in screen
    assert warnings == (
        f"warning: --max-steps 300000 means about 75,000 epochs of {tokens} target tokens, which the model would "
        "memorize: lower --max-steps (400 is about 100 epochs), or use a smaller preset\n"
    )
    monkeypatch.setattr(sys, "argv", ["plan_run.py", "--preset", "tiny", "--gpu", "cpu", "--data", str(toy_data.path)])
    main()
    screen, warnings = capsys.readouterr()
    assert "epochs of" in screen
    assert warnings == ""
