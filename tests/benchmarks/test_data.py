"""The benchmark measures what it names; its speed is not tested."""

import itertools
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import data
from benchmarks.data import DataBenchmark, feeding_works, preparation_works
from benchmarks.results_table import make_lines, read_result
from dist_transformer.data.folder.reader import DataFolder
from dist_transformer.data.loading.plan import resolve_budgets
from tests.conftest import run_command

pytestmark = pytest.mark.slice(name="benchmarks")


def test_our_work_is_counted_in_target_tokens(toy_data: DataFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Planning alone, and feeding, of steps of two packs of 512 tokens."""
    monkeypatch.setattr(data, "BATCH", replace(data.BATCH, max_target_tokens=512, packs_per_step=2))
    info = toy_data.train.info
    budgets = resolve_budgets(data.BATCH, source_tokens=info.source_tokens, target_tokens=info.target_tokens)
    works = feeding_works(toy_data.train, budgets, DataBenchmark(data=toy_data.path))
    planned = list(itertools.islice(works["plan"], 3))
    assert all(512 < tokens <= 2 * 512 for tokens in planned)
    for name in ("feed", "feed_8_packs"):
        fed = list(itertools.islice(works[name], 3))
        assert 512 < fed[0] <= 2 * 512
        assert sum(fed) > 3 * 512


def test_the_same_text_is_prepared_and_encoded(toy_data: DataFolder, tmp_path: Path) -> None:
    works = preparation_works(toy_data, tmp_path, pairs=100, seed=1)
    counts = {name: list(itertools.islice(work, 2)) for name, work in works.items()}
    (tokens,) = {count for found in counts.values() for count in found}
    prepared = [DataFolder.open(tmp_path / f"prepared-{number}") for number in (0, 1)]
    for folder in prepared:
        index = folder.index
        assert index.pairs_read == index.train.pairs + index.valid.pairs == 100
        assert index.train.target_tokens + index.valid.target_tokens == tokens
        assert index.tokenizer_sha256 == toy_data.index.tokenizer_sha256


def test_the_tool_prints_a_table_and_writes_a_result(toy_data: DataFolder, tmp_path: Path) -> None:
    file = tmp_path / "data.json"
    command = [sys.executable, "tools/benchmark.py", "data", "--data", toy_data.path, "--json", file]
    output = run_command(*command, "--seconds", 0.01, "--repeats", 2, "--text-pairs", 50, "--memory-pairs", 60)
    table = output[output.index("target tokens per CPU second") :].splitlines()
    assert max(map(len, table)) <= 80
    result = read_result(file)
    ((table_name, line),) = make_lines(file, result)
    assert (table_name, line.count(" | ")) == ("data", 6)
    assert str(tmp_path) not in file.read_text()
    figures = result["figures"]
    assert [len(found["values"]) for found in figures["target_tokens_per_second"].values()] == [2] * 6
    memory = figures["preparation_memory"]
    assert [memory[size]["pairs"] for size in ("1x", "10x")] == [60, 600]
    assert all(50 < found["peak_mib"] < 1000 for found in memory.values())
