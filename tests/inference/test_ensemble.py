"""Ensembles against the paper's equations in float64, whose probabilities are averaged one token at a time."""

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import dist_transformer
from dist_transformer.base.errors import UserError
from dist_transformer.config.directions import Direction
from dist_transformer.config.settings import ModelConfig
from dist_transformer.data.vocabulary.byte_bpe import learn_byte_bpe
from dist_transformer.data.vocabulary.tokenizer import BOS_ID, EOS_ID, PAD_ID, UNK_ID
from dist_transformer.inference import beam
from dist_transformer.inference.beam import Hypothesis, beam_search
from dist_transformer.inference.decoding import Decoding, ExactLoading
from dist_transformer.inference.ensemble import Ensemble
from dist_transformer.inference.loading import load_joint, read_joint_info
from dist_transformer.inference.sampling import sample
from dist_transformer.inference.scoring import score_ids
from dist_transformer.model.transformer import Transformer
from dist_transformer.model_folder import ModelInfo, load_model, write_model_folder
from tests.inference.test_beam import assert_same, make_model, make_sources, plain_search, same_memory, steps_on_a_gpu
from tests.inference.test_scoring import InFloat64

Lines = tuple[list[str], list[str]]
CPU = torch.device("cpu")
VOCABULARY = 23
SHAPES = [
    {"width": 16, "heads": 2, "ffn_width": 32, "encoder_layers": 2, "decoder_layers": 2, "max_positions": 64},
    {"width": 24, "heads": 3, "ffn_width": 16, "encoder_layers": 1, "decoder_layers": 3, "max_positions": 40},
    {"width": 8, "heads": 1, "ffn_width": 8, "encoder_layers": 1, "decoder_layers": 1, "max_positions": 64},
]


@pytest.fixture(scope="module")
def models() -> list[Transformer]:
    """Three networks of one vocabulary, with sharp distributions that differ."""
    torch.manual_seed(2)
    made = [Transformer(ModelConfig(**shape, vocab_size=VOCABULARY)).eval() for shape in SHAPES]
    with torch.no_grad():
        for model in made:
            for parameter in model.parameters():
                parameter.add_(0.3 * torch.randn_like(parameter))
    return made


@pytest.fixture(scope="module")
def ensemble(models: list[Transformer]) -> Ensemble:
    return Ensemble(models).eval()


class Mean:
    """The mean of the models' probabilities, without caches, packs or logarithms."""

    def __init__(self, models: list[Transformer]) -> None:
        self.models = [InFloat64(model) for model in models]

    def next(self, source: list[int], tokens: list[int]) -> np.ndarray:
        return self.all(source, tokens)[-1]

    def all(self, source: list[int], tokens: list[int]) -> np.ndarray:
        return sum(model.distributions(source, tokens).numpy() for model in self.models) / len(self.models)

    def search(self, source: list[int], settings: Decoding) -> list[Hypothesis]:
        def logp_of(rows: list[list[int]]) -> torch.Tensor:
            return torch.from_numpy(np.log([self.next(source, tokens) for tokens in rows]))

        return plain_search(logp_of, settings, len(source) + settings.max_extra_tokens)


@pytest.mark.system
@pytest.mark.parametrize("slots", [None, 3])
@pytest.mark.parametrize("k", [1, 3])
def test_a_search_continues_with_the_mean_of_the_probabilities(
    ensemble: Ensemble, models: list[Transformer], k: int, slots: int | None
) -> None:
    """Greedy and with a beam, in batches that shrink and in slots that are refilled."""
    sources = make_sources(8, longest=6)
    settings = Decoding(beam=k, nbest=k, max_extra_tokens=4, least_growth=1000)
    found = beam_search(ensemble, sources, settings=settings, slots=slots)
    for row, source in zip(found, sources, strict=True):
        assert_same([row], [Mean(models).search(source, settings)])
    # None of the models would have found the same alone.
    for model in models:
        alone = beam_search(model, sources, settings=settings, slots=slots)
        assert [[one.tokens for one in row] for row in alone] != [[one.tokens for one in row] for row in found]


def test_scores_are_logarithms_of_the_mean(ensemble: Ensemble, models: list[Transformer]) -> None:
    pairs = list(zip(make_sources(9), make_sources(9, seed=1), strict=True))
    for (source, target), score in zip(pairs, score_ids(ensemble, pairs, device=CPU, batch_tokens=40), strict=True):
        p = Mean(models).all(source, target)
        expected = [math.log(p[place, token]) for place, token in enumerate([*target, EOS_ID])]
        assert score.token_log_probabilities == pytest.approx(expected, abs=1e-5)


def test_first_tokens_are_drawn_from_the_mean(ensemble: Ensemble, models: list[Transformer]) -> None:
    source, count = [5, 6, 7], 4000
    keys = [(line, 0) for line in range(count)]
    settings = Decoding(sample=True, seed=3, max_extra_tokens=0)
    found = sample(ensemble, [source] * count, keys, settings=settings)
    expected = Mean(models).next(source, [])
    expected[[PAD_ID, UNK_ID, BOS_ID]] = 0
    expected /= expected.sum()
    counts = np.bincount([one.tokens[0] if one.tokens else EOS_ID for one in found], minlength=VOCABULARY)
    deviation = np.sqrt(count * expected * (1 - expected))
    assert (np.abs(counts - count * expected) <= 4.5 * deviation + 1e-9).all()
    for one in found[:5]:
        p = Mean(models).all(source, one.tokens)
        total = sum(math.log(p[place, token]) for place, token in enumerate([*one.tokens, EOS_ID]))
        assert one.log_probability == pytest.approx(total, abs=1e-4)


def test_positions_are_those_that_every_model_has(ensemble: Ensemble) -> None:
    assert ensemble.config.max_positions == 40
    (row,) = beam_search(ensemble, [[5] * 35], settings=Decoding(max_extra_tokens=50))
    assert len(row[0].tokens) <= 39


def test_a_step_of_slots_writes_the_same_memory(ensemble: Ensemble) -> None:
    """A CUDA graph of an ensemble needs this of every model."""
    search = beam._Search(ensemble, make_sources(20, seed=3), Decoding(), 5)
    same_memory(search, 5, lambda: [*search.state.states, search.beams])
    assert search.state.positions_N is search.state.states[0].positions_N


@pytest.mark.system
@pytest.mark.parametrize("slots", [None, 5])
def test_a_step_on_a_gpu_neither_mixes_devices_nor_waits(
    slots: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def make() -> Ensemble:
        return Ensemble([make_model(vocab_size=64 * 40 + 5, width=width) for width in (8, 16)]).eval()

    steps_on_a_gpu(make, slots, tmp_path, monkeypatch)


@pytest.fixture(scope="module")
def folders(model_folder: Path, other_folder: Path) -> list[Path]:
    return [model_folder, other_folder]


def test_folders_are_loaded_as_one_model(folders: list[Path], toy_lines: Lines) -> None:
    sources, targets = toy_lines[0][:4], toy_lines[1][:4]
    joint = dist_transformer.load(folders, device="cpu")
    assert (joint.info.corpus, joint.info.longest_source) == ("toy grammar, other grammar", 40)
    assert (joint.info.several_sentences, joint.info.split_over) == (0.1, 40)
    assert joint.info.steps == ()
    direct = Ensemble([load_model(folder, CPU)[0] for folder in folders]).eval()
    ids = [joint.tokenizer.source.encode(line) for line in sources]
    expected = beam_search(direct, ids, settings=Decoding(max_extra_tokens=5))
    found = joint.translate(sources, nbest=1, max_extra_tokens=5, split_over="no")
    assert [row[0].tokens for row in found] == [tuple(row[0].tokens) for row in expected]
    each = [dist_transformer.load(folder, device="cpu").score(sources, targets) for folder in folders]
    for both, one, other in zip(joint.score(sources, targets), *each, strict=True):
        tokens = zip(one.token_log_probabilities, other.token_log_probabilities, strict=True)
        mean = [math.log((math.exp(a) + math.exp(b)) / 2) for a, b in tokens]
        assert both.token_log_probabilities == pytest.approx(mean, abs=1e-5)
    # Three parts of the first model.
    weighted = dist_transformer.load([f"{folders[0]}:3", folders[1]], device="cpu")
    for both, one, other in zip(weighted.score(sources, targets), *each, strict=True):
        tokens = zip(one.token_log_probabilities, other.token_log_probabilities, strict=True)
        mean = [math.log((3 * math.exp(a) + math.exp(b)) / 4) for a, b in tokens]
        assert both.token_log_probabilities == pytest.approx(mean, abs=1e-5)
    with pytest.raises(UserError, match="model:0 has no share in the result: leave it out"):
        dist_transformer.load([f"{folders[0]}:0", folders[1]])
    with pytest.raises(UserError, match="attention is that of one model, and this is an ensemble: load one"):
        joint.attention(sources[0], targets[0])
    with pytest.raises(UserError, match="path has no model folder: pass at least one"):
        dist_transformer.load([])


def test_what_does_not_fit_is_refused_by_name(
    folders: list[Path], model_info: ModelInfo, random_model: Transformer, tmp_path: Path
) -> None:
    foreign = learn_byte_bpe(["other words"] * 9, vocab_size=400)
    info = replace(model_info, tokenizer_sha256=foreign.sha256)
    weights = dict(random_model.state_dict())
    write_model_folder(tmp_path / "foreign", info=info, weights=weights, tokenizer_json=foreign.content)
    with pytest.raises(UserError, match=r"foreign has another vocabulary than .*model, and the models of an ensemble"):
        load_joint([folders[0], tmp_path / "foreign"], ExactLoading(), CPU)
    there_and_back = (
        Direction(source_language="de", target_language="en"),
        Direction(source_language="en", target_language="de"),
    )
    back = replace(model_info, source_language="de", target_language="en", directions=there_and_back[:1])
    tokenizer = (folders[0] / "tokenizer.json").read_bytes()
    write_model_folder(tmp_path / "back", info=back, weights=weights, tokenizer_json=tokenizer)
    with pytest.raises(UserError, match=r"back translates de-en and .*model en-de, or their tags differ: use models"):
        read_joint_info([folders[0], tmp_path / "back"], ExactLoading())
