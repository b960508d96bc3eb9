"""The wheel alone: the demo, a text of one's own to BLEU on two processes, a page to try the model, Python."""

import asyncio
import json
import subprocess
from pathlib import Path

import pytest

from dist_transformer.data.text.toy_corpus import make_toy_corpus, write_toy_corpus
from tests.api.examples import run_examples
from tests.browser import Browser, browser
from tests.compat.environments import run_installed
from tests.serving.page_driver import open_page

__all__ = ["browser"]


@pytest.mark.slice(name="wheel")
def test_the_demo(installed: Path, tmp_path: Path) -> None:
    said = run_installed(installed, tmp_path, "dist-transformer", "demo", timeout=1_800)
    result = json.loads((tmp_path / "runs" / "demo" / "result.json").read_text(encoding="utf-8"))
    assert result["world_size"] == 2
    assert result["bleu"] > 90, said[-2000:]
    assert f"BLEU {result['bleu']:.1f}" in said


@pytest.fixture(scope="module")
def own_text(installed: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder where the commands of the README were run, on two processes, with a small model."""
    folder = tmp_path_factory.mktemp("own")
    write_toy_corpus(folder, make_toy_corpus(train_pairs=3_000, valid_pairs=100, test_pairs=50, seed=1))

    def run(*words: object) -> str:
        return run_installed(installed, folder, "dist-transformer", *words)

    files = ["--src", "train.en", "--tgt", "train.de", "--valid-src", "valid.en", "--valid-tgt", "valid.de"]
    run("prepare", *files, "--vocab-size", 500, "--out", "data")
    small = ["--preset", "tiny", "--max-steps", 60, "--save-every", 20, "--deepspeed_config", "zero2"]
    run("train", *small, "--data", "data", "--run-dir", "run", "--processes", 2)
    run("verify", "run", "--data", "data")
    run("average", "--run-dir", "run", "--last", 2, "--out", "model")
    run("evaluate", "--model", "model", "--src", "test.en", "--ref", "test.de", "--json", "b.json", "--processes", 2)
    run("report", "run")
    return folder


@pytest.mark.slice(name="wheel")
def test_text_of_ones_own_to_bleu(own_text: Path) -> None:
    scores = json.loads((own_text / "b.json").read_text(encoding="utf-8"))
    assert (scores["sentences"], scores["world_size"]) == (50, 2)
    assert len((own_text / "b.hypotheses.txt").read_text(encoding="utf-8").splitlines()) == 50
    assert (own_text / "run" / "report.html").stat().st_size > 10_000


@pytest.mark.slice(name="wheel")
def test_a_model_is_tried_in_the_browser(installed: Path, own_text: Path, browser: Browser) -> None:
    async def use(url: str) -> None:
        async with open_page(browser, 1280, 900) as page:
            await page.open(url)
            await page.type("the old man sees a dog")
            await page.press("Enter")
            await page.wait_for("document.querySelectorAll('.result .hypothesis').length === 4")
            await page.wait_for("document.querySelectorAll('.map tbody td').length > 8")
            assert page.console == []

    words = [installed / "dist-transformer", "serve", "--model", own_text / "model", "--port", "0"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        try:
            asyncio.run(use(server.stdout.readline().split()[1]))
        finally:
            server.terminate()


@pytest.mark.slice(name="wheel")
def test_the_examples_in_python(installed: Path, tmp_path: Path) -> None:
    run_examples(tmp_path, lambda script: run_installed(installed, tmp_path, "python", script.name))


@pytest.mark.slice(name="smoke")
def test_the_wheel_alone_runs_a_short_demo(installed: Path, tmp_path: Path) -> None:
    flags = ("--max-steps", 40, "--train-pairs", 1500, "--average", 1)
    said = run_installed(installed, tmp_path, "dist-transformer", "demo", *flags)
    result = json.loads((tmp_path / "runs" / "demo" / "result.json").read_text(encoding="utf-8"))
    assert (result["world_size"], result["zero_stage"]) == (2, 1)
    assert f"BLEU {result['bleu']:.1f}" in said
    assert (tmp_path / "runs" / "demo" / "model" / "model.safetensors").exists()
