"""TensorBoard itself on what a run writes: the answers of its server."""

import html
import json
import socket
import subprocess
import sys
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dist_transformer.config.presets import PRESETS
from dist_transformer.evaluation.samples import Sample, SampleSheet
from dist_transformer.reporting.reporter import Reporter

pytestmark = pytest.mark.slice(name="browser")

SAMPLE = Sample(
    source="A dog sleeps.",
    reference="Ein Hund schläft.",
    hypothesis="Der Hund | schläft.",
    source_tokens=["A", "▁dog", "▁sleeps", "</s>"],
    target_tokens=["Der", "▁Hund", "</s>"],
    attention_LTS=[[[0.7, 0.1, 0.1, 0.1], [0.1, 0.7, 0.1, 0.1], [0.1, 0.1, 0.1, 0.7]]],
)


@pytest.fixture
def board(tmp_path: Path) -> Iterator[str]:
    """The address of a TensorBoard that shows a run at its beginning and at its end."""
    reporter = Reporter(tmp_path, is_main=True, max_steps=200, first_step=0)
    reporter.settings(PRESETS["tiny"].changed(run_dir=tmp_path))
    for step in (100, 200):
        reporter.record("train", step, {"loss": 400.0 / step, "nll": 300.0 / step})
        reporter.record("valid", step, {"loss": 400.0 / step + 0.5, "nll": 100.0 + step, "bleu": step / 10})
        reporter.record("checkpoint", step, {"seconds": 1.0, "stall": 0.1})
        reporter.samples(SampleSheet(step=step, sentences=1, bleu=12.5, signature="tok:13a", samples=(SAMPLE,)))
    reporter.record("end", 200, {"train_seconds": 12.0})
    reporter.close()
    with socket.socket() as probe:
        probe.bind(("", 0))
        port = probe.getsockname()[1]
    command = [Path(sys.executable).with_name("tensorboard"), "--host", "localhost", "--port", port]
    options = ["--load_fast=false", "--logdir", tmp_path]
    with (tmp_path / "log").open("wb") as log:
        server = subprocess.Popen([str(word) for word in (*command, *options)], stdout=log, stderr=log)
    try:
        address = f"http://localhost:{port}/"
        deadline = time.monotonic() + 600
        while not _answers(address):
            assert server.poll() is None, (tmp_path / "log").read_text()
            assert time.monotonic() < deadline, "TensorBoard did not answer in two minutes"
            time.sleep(0.2)
        yield address
    finally:
        server.terminate()
        server.wait()


def fetch(address: str) -> str:
    with urllib.request.urlopen(address, timeout=600) as answer:
        return answer.read().decode()


def post(address: str, values: dict[str, Any]) -> Any:
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(address, json.dumps(values).encode(), headers)
    with urllib.request.urlopen(request, timeout=600) as answer:
        return json.loads(answer.read())


def _answers(address: str) -> bool:
    try:
        return "samples" in fetch(address + "data/plugin/text/tags")
    except OSError:
        return False


def test_samples_are_a_table(board: str) -> None:
    """TensorBoard's server renders them: the bar in the sentence is not the border of a cell."""
    (run,) = json.loads(fetch(f"{board}data/plugin/text/tags"))
    shown = json.loads(fetch(f"{board}data/plugin/text/text?run={run}&tag=samples/text_summary"))
    assert [entry["step"] for entry in shown] == [100, 200]
    text = html.unescape(shown[-1]["text"])
    assert "<td>Der Hund | schläft.</td>" in text
    assert "BLEU 12.50 on 1 sentences (tok:13a)" in text


def test_training_and_validation_are_in_one_chart(board: str) -> None:
    """The server finds the curves of each chart of the tab."""
    (category,) = json.loads(fetch(f"{board}data/plugin/custom_scalars/layout"))["category"]
    (run,) = json.loads(fetch(f"{board}data/runs"))
    curves = {}
    for chart in category["chart"]:
        found: dict[str, list[list[float]]] = {}
        for pattern in chart["multiline"]["tag"]:
            query = urllib.parse.urlencode({"run": run, "tag": pattern})
            found |= json.loads(fetch(f"{board}data/plugin/custom_scalars/scalars?{query}"))["tag_to_events"]
        curves[chart["title"]] = {tag: [tuple(point[1:]) for point in points] for tag, points in found.items()}
    assert curves["loss: training and validation"] == {
        "main/loss": [(100, 4.0), (200, 2.0)],
        "valid/loss": [(100, 4.5), (200, 2.5)],
    }
    assert curves["nll per token, unsmoothed: training and validation"].keys() == {"train/nll", "valid/nll"}
    assert curves["BLEU: validation, and the best so far"].keys() == {"main/bleu", "valid/best_bleu"}


def test_the_run_is_a_row_of_settings_and_results(board: str) -> None:
    # Only runs that have ended.
    request = {"startIndex": 0, "sliceSize": 10, "allowedStatuses": ["STATUS_SUCCESS"]}
    (group,) = post(f"{board}data/plugin/hparams/session_groups", request)["sessionGroups"]
    assert group["hparams"]["model.width"] == 128
    assert group["hparams"]["optimizer.schedule"] == "inverse_sqrt"
    (session,) = group["sessions"]
    assert session["status"] == "STATUS_SUCCESS"
    results = {metric["name"]["tag"]: metric["value"] for metric in session["metricValues"]}
    # The nll rose from 200 to 300; BLEU from 10 to 20.
    assert results == {
        "valid/best_nll": 200.0,
        "valid/nll": 300.0,
        "valid/best_bleu": 20.0,
        "main/bleu": 20.0,
        "train/nll": 1.5,
    }
