"""Others search with the same weights, and what is reported is what was done."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.decoding import DecodeBenchmark, decode_table, make_peer, matching_penalty, our_search
from dist_transformer.data.vocabulary.tokenizer import Tokenizer
from dist_transformer.model.transformer import Transformer
from dist_transformer.runtime.device import multiplies_int8
from tests.conftest import run_command
from tests.support.tiny import tiny_config

pytestmark = pytest.mark.slice(name="benchmarks")


@pytest.mark.parametrize("name", ["generate", "ctranslate2"])
def test_peers_translate_as_ours_does(name: str, toy_tokenizer: Tokenizer, toy_lines: Any, tmp_path: Path) -> None:
    """Line for line, from text to text; outputs are cut where the shortest limit may have ended one."""
    torch.manual_seed(4)
    config = tiny_config(max_positions=160, vocab_size=toy_tokenizer.vocab_size)
    settings = DecodeBenchmark(model=tmp_path, src=tmp_path, ref=tmp_path, beam=1, max_extra_tokens=8)
    lines = toy_lines[0][:40]
    model = Transformer(config).eval()
    ours = our_search(model, toy_tokenizer, settings, length_penalty=0.6)
    expected = ours(lines)
    assert len(set(expected)) > 20
    for work in make_peer(name, model, toy_tokenizer, settings, tmp_path).values():
        for mine, found in zip(expected, work(lines), strict=True):
            shared = min(len(mine), len(found), 12)
            assert mine[:shared] == found[:shared]


def test_our_length_penalty_gives_the_peers_length() -> None:
    """Seven halvings of the range from 0.6 to 1.8, for lengths that grow evenly and for some that grow in a step."""
    for wanted, exponent in ((12.0, 0.8), (14.0, 1.2), (11.2, 0.64)):
        assert abs(matching_penalty(lambda b: 8 + 5 * b, wanted, least=0.6) - exponent) < 1.2 / 2**7
    assert matching_penalty(lambda b: 12.0 if b < 1.0 else 13.0, 12.5, least=0.6) == pytest.approx(1.0, abs=0.01)


def test_the_command(model_folder: Path, toy_lines: Any, tmp_path: Path) -> None:
    for name, lines in zip(("s.en", "s.de"), toy_lines, strict=True):
        (tmp_path / name).write_text("\n".join(lines[:12]) + "\n", encoding="utf-8")
    files = ["--src", tmp_path / "s.en", "--ref", tmp_path / "s.de", "--json", tmp_path / "r.json"]
    command = [sys.executable, "tools/benchmark.py", "decode", "--model", model_folder, *files]
    output = run_command(*command, "--peers", "ctranslate2", "ours_int8", "--rounds", 2, "--sentences", 10, "--beam", 1)
    figures = json.loads((tmp_path / "r.json").read_text())["figures"]
    in_int8 = ["ours_int8"] if multiplies_int8(torch.device("cpu")) else []
    assert list(figures["contenders"]) == ["ours", *in_int8, "ctranslate2"]
    assert figures["sentences"] == 10
    assert decode_table(figures) in output
    assert all(len(line) <= 80 for line in decode_table(figures).splitlines())
