"""TensorBoard itself on what a run writes: its server's answers, and its pages in a real browser where there is one."""

import html
import json
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from dist_transformer.evaluation.samples import Sample, SampleSheet
from dist_transformer.model.positions import sinusoidal_positions
from dist_transformer.reporting.reporter import Reporter
from tests.browser import Browser, browser

__all__ = ["browser"]

pytestmark = pytest.mark.slow

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
    reporter.pictures(range(1, 201), [step * 1e-5 for step in range(1, 201)], sinusoidal_positions(64, 32).numpy())
    for step in (100, 200):
        reporter.record("train", step, {"loss": 400.0 / step})
        reporter.samples(SampleSheet(step=step, sentences=1, bleu=12.5, signature="tok:13a", samples=(SAMPLE,)))
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
        deadline = time.monotonic() + 120
        while not _answers(address):
            assert server.poll() is None, (tmp_path / "log").read_text()
            assert time.monotonic() < deadline, "TensorBoard did not answer in two minutes"
            time.sleep(0.2)
        yield address
    finally:
        server.terminate()
        server.wait()


def fetch(address: str) -> str:
    with urllib.request.urlopen(address, timeout=30) as answer:
        return answer.read().decode()


def _answers(address: str) -> bool:
    try:
        return "samples" in fetch(address + "data/plugin/text/tags")
    except OSError:
        return False


def test_samples_are_a_table(board: str) -> None:
    """As TensorBoard's server renders them: the bar in the sentence is no border of a cell."""
    (run,) = json.loads(fetch(f"{board}data/plugin/text/tags"))
    shown = json.loads(fetch(f"{board}data/plugin/text/text?run={run}&tag=samples/text_summary"))
    assert [entry["step"] for entry in shown] == [100, 200]
    text = html.unescape(shown[-1]["text"])
    assert "<td>Der Hund | schläft.</td>" in text
    assert "BLEU 12.50 on 1 sentences (tok:13a)" in text


def test_the_page_shows_the_pictures(browser: Browser, board: str, tmp_path: Path) -> None:
    screenshot = tmp_path / "images.png"
    browser.run(f"{board}#images", 1300, "--virtual-time-budget=20000", f"--screenshot={screenshot}")
    with Image.open(screenshot) as image:
        images = np.asarray(image.convert("RGB")).astype(int)
    assert images.shape == (1600, 1300, 3)
    # Blue is no colour of TensorBoard's: the maps and the encodings.
    assert (images[..., 2] > images[..., 0] + 60).mean() > 0.005
