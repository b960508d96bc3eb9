"""Log-probabilities of given translations, beside the paper's equations in float64, one sentence at a time."""

import math
import os
from pathlib import Path

import numpy as np
import pytest
import torch

from dist_transformer.base.errors import UserError
from dist_transformer.data.text.pairs import LineFiles
from dist_transformer.data.vocabulary.tokenizer import BOS_ID, EOS_ID, PAD_ID, UNK_ID, Tokenizer
from dist_transformer.inference import scoring as module
from dist_transformer.inference.scoring import PairScore, score_files, score_ids, score_pairs
from dist_transformer.model.transformer import Transformer
from dist_transformer.runtime import distributed
from tests.support.tiny import tiny_config

Lines = tuple[list[str], list[str]]
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def model(toy_tokenizer: Tokenizer) -> Transformer:
    """Post-norm, tied, two layers; no parameter is zero or one, as untrained biases and norms are."""
    torch.manual_seed(5)
    sizes = {"encoder_layers": 2, "decoder_layers": 2, "max_positions": 160, "vocab_size": toy_tokenizer.vocab_size}
    model = Transformer(tiny_config(**sizes))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return model.eval()


class InFloat64:
    """The paper's equations on one sentence, without packs, groups or masks of padding."""

    def __init__(self, model: Transformer) -> None:
        self.weights = {name: tensor.double() for name, tensor in model.state_dict().items()}
        self.config = model.config
        self.maps: dict[str, torch.Tensor] = {}
        """Attention weights (H, T, S) by the name of the attention."""

    def log_probabilities(self, source: list[int], target: list[int]) -> list[float]:
        """Compute the log-probability of each token of `target </s>`."""
        p = self.distributions(source, target)
        return [math.log(p[place, token]) for place, token in enumerate([*target, EOS_ID])]

    def distributions(self, source: list[int], target: list[int]) -> torch.Tensor:
        """Compute the probabilities of the token after each of `<s> target`, shape (T, V)."""
        memory = self.embedded([*source, EOS_ID])
        for i in range(self.config.encoder_layers):
            layer = f"encoder.{i}"
            memory = self.after(
                f"{layer}.self_residual", memory, self.attend(f"{layer}.self_attention", memory, memory)
            )
            memory = self.after(f"{layer}.ffn_residual", memory, self.feed_forward(layer, memory))
        x = self.embedded([BOS_ID, *target])
        for i in range(self.config.decoder_layers):
            layer = f"decoder.{i}"
            own = self.attend(f"{layer}.self_attention", x, x, causal=True)
            x = self.after(f"{layer}.self_residual", x, own)
            x = self.after(f"{layer}.cross_residual", x, self.attend(f"{layer}.cross_attention", x, memory))
            x = self.after(f"{layer}.ffn_residual", x, self.feed_forward(layer, x))
        logits = x @ self.weights["embedding"].T
        return logits.exp() / logits.exp().sum(1, keepdim=True)

    def embedded(self, ids: list[int]) -> torch.Tensor:
        width = self.config.width
        table = torch.tensor(
            [
                [(math.cos if i % 2 else math.sin)(place / 10000 ** ((i - i % 2) / width)) for i in range(width)]
                for place in range(len(ids))
            ],
            dtype=torch.float64,
        )
        return self.weights["embedding"][ids] * math.sqrt(width) + table

    def after(self, name: str, x: torch.Tensor, sublayer: torch.Tensor) -> torch.Tensor:
        y = x + sublayer
        y = (y - y.mean(1, keepdim=True)) / (y.var(1, correction=0, keepdim=True) + 1e-5).sqrt()
        return y * self.weights[f"{name}.norm.weight"] + self.weights[f"{name}.norm.bias"]

    def linear(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weights[f"{name}.weight"].T + self.weights[f"{name}.bias"]

    def feed_forward(self, layer: str, x: torch.Tensor) -> torch.Tensor:
        inner = self.linear(f"{layer}.feed_forward.inner", x)
        return self.linear(f"{layer}.feed_forward.outer", inner.clamp(min=0))

    def attend(self, name: str, x: torch.Tensor, memory: torch.Tensor, *, causal: bool = False) -> torch.Tensor:
        matrices = self.weights[f"{name}.qkv_weight"].chunk(3)
        biases = self.weights[f"{name}.qkv_bias"].chunk(3)
        q, k, v = (
            side @ matrix.T + bias for side, matrix, bias in zip((x, memory, memory), matrices, biases, strict=True)
        )
        width = q.shape[1] // self.config.heads
        heads, maps = [], []
        for head in range(self.config.heads):
            part = slice(head * width, (head + 1) * width)
            scores = q[:, part] @ k[:, part].T / math.sqrt(width)
            if causal:
                scores = scores.masked_fill(torch.ones_like(scores).triu(1).bool(), -torch.inf)
            maps.append(scores.exp() / scores.exp().sum(1, keepdim=True))
            heads.append(maps[-1] @ v[:, part])
        self.maps[name] = torch.stack(maps)
        return self.linear(f"{name}.output", torch.cat(heads, dim=1))


@pytest.mark.parametrize("batch_tokens", [None, 100, 1])
def test_it_is_the_paper_s_distribution(
    model: Transformer, toy_tokenizer: Tokenizer, toy_lines: Lines, batch_tokens: int | None
) -> None:
    """In order, in batches of any size; an empty line is `</s>` alone."""
    sources, targets = [*toy_lines[0][:20], "a", "", ""], [*toy_lines[1][:20], "", "a", ""]
    reference = InFloat64(model)
    found = score_pairs(model, toy_tokenizer, sources, targets, device=CPU, batch_tokens=batch_tokens)
    assert len(found) == len(sources)
    for source, target, score in zip(sources, targets, found, strict=True):
        ids = toy_tokenizer.encode(target)
        assert score.tokens == (*ids, EOS_ID)
        expected = reference.log_probabilities(toy_tokenizer.encode(source), ids)
        assert score.token_log_probabilities == pytest.approx(expected, abs=1e-5)
        assert score.log_probability == pytest.approx(sum(expected), abs=1e-5)
        assert score.log_probability == math.fsum(score.token_log_probabilities)


def test_search_s_rules_do_not_apply(random_model: Transformer, toy_tokenizer: Tokenizer) -> None:
    """Search never emits `<pad>`, `<unk>` or `<s>`; they have their share of the 1 that all tokens sum up to."""
    pairs = [(toy_tokenizer.encode("a"), [token]) for token in range(toy_tokenizer.vocab_size)]
    scores = score_ids(random_model, pairs, device=CPU)
    p = [math.exp(score.token_log_probabilities[0]) for score in scores]
    assert sum(p) == pytest.approx(1, abs=1e-5)
    assert all(p[token] > 1e-5 for token in (PAD_ID, UNK_ID, BOS_ID))


class GatheredError(Exception):
    """Ends what a rank computes where it would wait for the others."""


def test_ranks_share_the_batches_of_one(
    model: Transformer, toy_tokenizer: Tokenizer, toy_lines: Lines, monkeypatch: pytest.MonkeyPatch
) -> None:
    sources, targets = toy_lines[0][:40], toy_lines[1][:40]

    def score() -> list[PairScore]:
        return score_pairs(model, toy_tokenizer, sources, targets, device=CPU, batch_tokens=200)

    alone = score()
    parts: list[list[np.ndarray]] = []

    def gather(part: list[np.ndarray]) -> None:
        parts.append(part)
        raise GatheredError

    monkeypatch.setattr(module, "world_size", lambda: 3)
    monkeypatch.setattr(module, "gather_objects", gather)
    for rank in range(3):
        monkeypatch.setattr(module, "rank", lambda rank=rank: rank)
        with pytest.raises(GatheredError):
            score()
    # Of equal counts of batches, or one more.
    assert {len(part) for part in parts} <= {len(parts[2]), len(parts[2]) + 1}
    assert sum(map(len, parts)) > 4
    monkeypatch.setattr(module, "gather_objects", lambda _: parts)
    assert score() == alone


def test_a_long_line_is_named_before_anything_is_computed(
    model: Transformer, toy_tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Line 5 is in the third chunk of a file; 159 tokens fit, 160 do not."""

    def no_computing(*_: object) -> None:
        raise AssertionError

    monkeypatch.setattr(module, "_read_batch", no_computing)
    monkeypatch.setattr(module, "_LINES_AT_ONCE", 2)
    sources, targets = ["a"] * 5, ["a", "a", "a", "a", "§" * 80]
    message = (
        "^line 5 has 1 source and 160 target tokens, and the model has room for 159 of each: "
        "split the line, or leave it out of both files$"
    )
    with pytest.raises(UserError, match=message):
        score_pairs(model, toy_tokenizer, sources, targets, device=CPU)
    with pytest.raises(UserError, match=message):
        next(score_files(model, toy_tokenizer, written(tmp_path, sources, targets), device=CPU))
    with pytest.raises(AssertionError):
        score_pairs(model, toy_tokenizer, ["a"], ["§" * 79 + "a"], device=CPU)


def test_files_come_in_chunks(
    model: Transformer, toy_tokenizer: Tokenizer, toy_lines: Lines, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_LINES_AT_ONCE", 4)
    sources, targets = toy_lines[0][:10], toy_lines[1][:10]
    files = written(tmp_path, sources, targets)
    chunks = list(score_files(model, toy_tokenizer, files, device=CPU))
    assert [len(chunk) for chunk in chunks] == [4, 4, 2]
    whole = score_pairs(model, toy_tokenizer, sources, targets, device=CPU)
    found: list[PairScore] = [score for chunk in chunks for score in chunk]
    assert [score.tokens for score in found] == [score.tokens for score in whole]
    assert [score.log_probability for score in found] == pytest.approx([score.log_probability for score in whole])


def test_what_files_cannot_be_scored(model: Transformer, toy_tokenizer: Tokenizer, tmp_path: Path) -> None:
    files = written(tmp_path, ["a", "b"], ["a"])
    with pytest.raises(UserError, match=r"text\.en and .*text\.de must have the same number of lines \(2 and 1\): "):
        next(score_files(model, toy_tokenizer, files, device=CPU))
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(
        UserError, match=r"pipe is a pipe or a device, and texts are read more than once: write it to a file"
    ):
        next(score_files(model, toy_tokenizer, LineFiles(source=files.source, target=tmp_path / "pipe"), device=CPU))
    with pytest.raises(UserError, match=r"^batch_tokens is 0: it must be above 0$"):
        score_pairs(model, toy_tokenizer, ["a"], ["a"], device=CPU, batch_tokens=0)
    assert list(score_files(model, toy_tokenizer, written(tmp_path, [], []), device=CPU)) == []


def test_an_error_of_one_rank_is_that_of_all(
    model: Transformer, toy_tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def too_much(*_: object) -> None:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(model, "encode", too_much)
    gathered: list[object] = []
    gather = distributed.gather_objects
    monkeypatch.setattr(distributed, "gather_objects", lambda value, *_: gathered.append(value) or gather(value))
    with pytest.raises(UserError, match=r"^out of memory in a batch: lower --batch-tokens$"):
        score_pairs(model, toy_tokenizer, ["a"], ["a"], device=CPU)
    assert len(gathered) == 1


def written(folder: Path, sources: list[str], targets: list[str]) -> LineFiles:
    files = LineFiles(source=folder / "text.en", target=folder / "text.de")
    for file, lines in ((files.source, sources), (files.target, targets)):
        file.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return files
