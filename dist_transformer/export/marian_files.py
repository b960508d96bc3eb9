"""Marian's own files: `model.npz` with its settings, vocabularies, and `decoder.yml`.

Marian computes sinusoids as tensor2tensor does, adds 1e-6 in LayerNorm, and begins the decoder with a vector of zeros.
"""

import io
import json
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import sentencepiece

from dist_transformer.base.errors import UserError
from dist_transformer.base.files import write_file
from dist_transformer.config.settings import ModelConfig
from dist_transformer.data.vocabulary.marian import MarianVocabulary
from dist_transformer.data.vocabulary.tokenizer import BOS_ID, EOS_ID, PAD_ID, UNK_ID, Tokenizer, Vocabulary
from dist_transformer.export.libraries import BEAM_SIZE, LENGTH_PENALTY
from dist_transformer.export.marian import BIAS, matrices_of, ours_of, refuse_others, weights_with
from dist_transformer.model.transformer import Transformer
from dist_transformer.model_folder import ModelInfo

DECODER_FILE = "decoder.yml"
SETTINGS_ENTRY = "special:model.yml"
OUTPUT_BIAS = "decoder_ff_logit_out_b"
# Settings beside those of the sizes. Marian has these by default, and converters to other programs read them.
_SETTINGS: dict[str, Any] = {
    "type": "transformer",
    "tied-embeddings-src": False,
    "transformer-decoder-autoreg": "self-attention",
    "transformer-guided-alignment-layer": "last",
    "transformer-no-projection": False,
    "transformer-postprocess": "dan",
    "transformer-postprocess-emb": "d",
    "transformer-postprocess-top": "",
    "transformer-preprocess": "",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class MarianFiles:
    """Files that `decoder.yml` names."""

    weights: Path
    vocabularies: tuple[Path, Path]
    """Vocabularies of the sources and of the targets."""

    @property
    def has_sentencepiece(self) -> bool:
        """Whether Marian itself splits text."""
        return all(file.suffix == ".spm" for file in self.vocabularies)


def refuse_what_the_program_lacks(config: ModelConfig) -> None:
    """Raise a UserError that names a setting that Marian does not support."""
    wanted = {"norm": "post", "norm_epsilon": 1e-6, "positions": "sinusoidal_t2t", "attention": "softmax"}
    refuse_others("Marian", config, wanted | {"begin_with_zeros": True})
    if config.activation == "gelu":
        raise UserError("Marian has another gelu, an approximation: model.activation must be relu or swish")


def entries_of(vocabulary: Vocabulary, *, by_model: bool) -> tuple[list[int], list[int]]:
    """Return our id of each entry of Marian's vocabularies, of sources and of targets.

    Those of other programs' folders have no `<pad>` and no `<s>`, ours have.

    Args:
        by_model: in the order of SentencePiece's models; otherwise in that of the tables.
    """
    if by_model:
        return _in_order_of_model(vocabulary.source), _in_order_of_model(vocabulary.target)
    if isinstance(vocabulary, MarianVocabulary):
        source, target = ([token for token in ours_of(ids) if token != PAD_ID] for ids in vocabulary.their_ids)
        return source, target
    source, target = (
        [EOS_ID, UNK_ID, PAD_ID, BOS_ID, *range(BOS_ID + 2, side.vocab_size)]
        for side in (vocabulary.source, vocabulary.target)
    )
    return source, target


def _in_order_of_model(side: Tokenizer) -> list[int]:
    """Return our id of each piece of a model of SentencePiece; -1: we lack it."""
    library = sentencepiece.SentencePieceProcessor(model_proto=side.library_file)
    ids = {piece: token for token, piece in enumerate(side.pieces)}
    return [ids.get(library.id_to_piece(i), -1) for i in range(library.get_piece_size())]


def splits_text(vocabulary: Vocabulary) -> bool:
    """Return whether SentencePiece's models alone, which Marian's program reads, are the vocabularies."""
    models = [side.library_file for side in (vocabulary.source, vocabulary.target)]
    by_table, by_model = (entries_of(vocabulary, by_model=choice) for choice in (False, True))
    has_same = all({*table} == {*model} for table, model in zip(by_table, by_model, strict=True))
    return has_same and (vocabulary.sizes[1] > 0 or models[0] == models[1])


def write_marian(folder: Path, model: Transformer, vocabulary: Vocabulary, info: ModelInfo) -> None:
    """Fill `folder` with a model for Marian's program.

    Args:
        info: description of the model, which Marian's files do not have.

    Raises:
        UserError: the vocabulary is not of SentencePiece.
    """
    config, sides = model.config, (vocabulary.source, vocabulary.target)
    if any(side.library != "sentencepiece" for side in sides):
        raise UserError("Marian reads vocabularies of SentencePiece: prepare the data with --vocabulary sentencepiece")
    by_model = splits_text(vocabulary)
    entries = entries_of(vocabulary, by_model=by_model)
    names, ending = ("source", "target"), "spm" if by_model else "yml"
    files = [folder / f"{name if vocabulary.sizes[1] else 'vocab'}.{ending}" for name in names]
    for name, side, file, tokens in zip(names, sides, files, entries, strict=True):
        write_file(file if by_model else folder / f"{name}.spm", side.library_file)
        if not by_model:
            # No text has these two, and Marian's decoder never begins with them.
            pieces = {**dict(enumerate(side.pieces)), PAD_ID: "<unused0>", BOS_ID: "<unused1>"}
            spelled = (json.dumps(pieces[token], ensure_ascii=False) for token in tokens)
            write_file(file, "".join(f"{piece}: {number}\n" for number, piece in enumerate(spelled)))
    weights = weights_with(entries, entries[1], model)
    arrays = {theirs: _array(weights[name], shape) for theirs, name, shape in places(config)}
    arrays |= {
        matrices_in(config)[ours]: weights[name].numpy(force=True) for name, (ours, _) in matrices_of(config).items()
    }
    if BIAS in weights:
        arrays[OUTPUT_BIAS] = weights[BIAS].numpy(force=True)
    text = json.dumps(_settings(config, [*map(len, entries)]), indent=1)
    arrays[SETTINGS_ENTRY] = np.frombuffer(text.encode() + b"\0", np.int8)
    _write_npz(folder / "model.npz", arrays)
    search = {"beam-size": BEAM_SIZE, "normalize": LENGTH_PENALTY, "word-penalty": 0, "mini-batch": 64}
    places_of = {"relative-paths": True, "models": ["model.npz"], "vocabs": [file.name for file in files]}
    write_file(folder / DECODER_FILE, json.dumps(places_of | search, indent=1) + "\n")


def _settings(config: ModelConfig, entries: list[int]) -> dict[str, Any]:
    return _SETTINGS | {
        "dim-emb": config.width,
        "dim-vocabs": entries,
        "enc-depth": config.encoder_layers,
        "dec-depth": config.decoder_layers,
        "transformer-heads": config.heads,
        "transformer-dim-ffn": config.ffn_width,
        "transformer-ffn-activation": config.activation,
        "tied-embeddings": config.tie_embeddings == "target",
        "tied-embeddings-all": config.tie_embeddings == "all",
        "output-omit-bias": not config.output_bias,
    }


def _array(tensor: Any, shape: tuple[int, int]) -> np.ndarray:
    """Return a weight as Marian multiplies by it, from the right."""
    array: np.ndarray = tensor.numpy(force=True)
    return array.reshape(shape) if shape[0] == 1 else np.ascontiguousarray(array.T)


def _write_npz(file: Path, arrays: dict[str, np.ndarray]) -> None:
    """Write arrays as NumPy does, but with their sizes at their beginnings, where Marian reads them."""
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as archive:
        for name, array in arrays.items():
            one = io.BytesIO()
            np.lib.format.write_array(one, array, allow_pickle=False)
            # Always with the same date.
            archive.writestr(zipfile.ZipInfo(f"{name}.npy"), one.getvalue())
    write_file(file, content.getvalue())


def places(config: ModelConfig) -> Iterator[tuple[str, str, tuple[int, int]]]:
    """Yield Marian's name, MarianMT's name and Marian's shape of each array, but for those of the vocabulary."""
    width, inner = config.width, config.ffn_width
    square, vector = (width, width), (1, width)
    for side, count in (("encoder", config.encoder_layers), ("decoder", config.decoder_layers)):
        attentions = {"self": "self_attn"} | ({"context": "encoder_attn"} if side == "decoder" else {})
        for i in range(count):
            theirs, name = f"{side}_l{i + 1}", f"model.{side}.layers.{i}"
            for part, attention in attentions.items():
                for letter, projection in zip("qkvo", ("q", "k", "v", "out"), strict=True):
                    yield f"{theirs}_{part}_W{letter}", f"{name}.{attention}.{projection}_proj.weight", square
                    yield f"{theirs}_{part}_b{letter}", f"{name}.{attention}.{projection}_proj.bias", vector
                yield f"{theirs}_{part}_Wo_ln_scale", f"{name}.{attention}_layer_norm.weight", vector
                yield f"{theirs}_{part}_Wo_ln_bias", f"{name}.{attention}_layer_norm.bias", vector
            for number, shape in ((1, (width, inner)), (2, (inner, width))):
                yield f"{theirs}_ffn_W{number}", f"{name}.fc{number}.weight", shape
                yield f"{theirs}_ffn_b{number}", f"{name}.fc{number}.bias", (1, shape[1])
            yield f"{theirs}_ffn_ffn_ln_scale", f"{name}.final_layer_norm.weight", vector
            yield f"{theirs}_ffn_ffn_ln_bias", f"{name}.final_layer_norm.bias", vector


def matrices_in(config: ModelConfig) -> dict[str, str]:
    """Return Marian's names of matrices with a row per entry, by ours."""
    return {
        "embedding": "Wemb" if config.tie_embeddings == "all" else "encoder_Wemb",
        "target_embedding": "decoder_Wemb",
        "output_projection": "decoder_ff_logit_out_Wt",
    }
