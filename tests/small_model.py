"""Fixtures: a small random model, its tokenizer, and a model folder of it."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from dist_transformer.base.files import sha256_of
from dist_transformer.base.verified import with_own_hash
from dist_transformer.data.text.toy_corpus import make_toy_corpus
from dist_transformer.data.vocabulary.byte_bpe import learn_byte_bpe
from dist_transformer.data.vocabulary.kinds import load_vocabulary
from dist_transformer.data.vocabulary.tokenizer import EOS_ID, Tokenizer
from dist_transformer.model.transformer import Transformer
from dist_transformer.model_folder import CONFIG_FILE, WEIGHTS_FILE, ModelInfo, write_model_folder
from tests.support.tiny import tiny_config


@pytest.fixture(scope="session")
def toy_lines() -> tuple[list[str], list[str]]:
    """English and German lines."""
    pairs = make_toy_corpus(train_pairs=200, valid_pairs=10, test_pairs=10).train
    return [source for source, _ in pairs], [target for _, target in pairs]


@pytest.fixture(scope="session")
def toy_tokenizer(toy_lines: tuple[list[str], list[str]], tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    tokenizer = learn_byte_bpe([*toy_lines[0], *toy_lines[1]], vocab_size=400)
    file = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    tokenizer.save(file)
    return load_vocabulary(file)


@pytest.fixture(scope="session")
def random_model(toy_tokenizer: Tokenizer) -> Transformer:
    """Untrained; 160 positions. Its outputs end before the limit at times."""
    torch.manual_seed(3)
    model = Transformer(
        tiny_config(tie_embeddings="none", max_positions=160, vocab_size=toy_tokenizer.vocab_size)
    ).eval()
    with torch.no_grad():
        model.output_projection.mul_(3)
        model.output_projection[EOS_ID] *= 1.5
    return model


@pytest.fixture(scope="session")
def model_info(toy_tokenizer: Tokenizer, random_model: Transformer) -> ModelInfo:
    return ModelInfo(
        model=random_model.config,
        tokenizer_sha256=toy_tokenizer.sha256,
        source_language="en",
        target_language="de",
        corpus="toy grammar",
        synthetic=True,
        steps=(100, 200),
    )


@pytest.fixture(scope="session")
def model_folder(
    toy_tokenizer: Tokenizer,
    random_model: Transformer,
    model_info: ModelInfo,
    tmp_path_factory: pytest.TempPathFactory,
) -> Path:
    """A model folder of `random_model`; tests must not change it."""
    folder = tmp_path_factory.mktemp("shared") / "model"
    tokenizer_file = folder.parent / "tokenizer.json"
    toy_tokenizer.save(tokenizer_file)
    weights = dict(random_model.state_dict())
    write_model_folder(folder, info=model_info, weights=weights, tokenizer_json=tokenizer_file.read_bytes())
    return folder


@pytest.fixture(scope="session")
def other_folder(toy_tokenizer: Tokenizer, model_info: ModelInfo, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Another network with the vocabulary of `model_folder`; tests must not change it."""
    torch.manual_seed(7)
    shape = tiny_config(width=24, heads=3, ffn_width=16, encoder_layers=2, max_positions=120)
    model = Transformer(replace(shape, vocab_size=toy_tokenizer.vocab_size))
    folder = tmp_path_factory.mktemp("other") / "model"
    info = replace(model_info, model=model.config, longest_source=40, several_sentences=0.1, corpus="other grammar")
    write_model_folder(folder, info=info, weights=dict(model.state_dict()), tokenizer_json=toy_tokenizer.content)
    return folder


def forge_weights(folder: Path, weights: dict[str, torch.Tensor]) -> None:
    """Replace the weights of a model folder, and the hash that its config.json states of them."""
    safetensors.torch.save_file(weights, folder / WEIGHTS_FILE)
    restate(folder, weights={"sha256": sha256_of(folder / WEIGHTS_FILE), "dtype": "fp32", "finite": True})


def restate(folder: Path, **changes: Any) -> None:
    """Edit config.json of a model folder, and the hash that it states of itself."""
    file = folder / CONFIG_FILE
    file.write_bytes(with_own_hash({**json.loads(file.read_text(encoding="utf-8")), **changes}))
