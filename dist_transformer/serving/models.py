"""Served models: translations of a text, and the attention weights of a translation, as plain JSON values."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from dist_transformer.base.errors import UserError
from dist_transformer.config.language_codes import language_tag
from dist_transformer.inference.attention_maps import BEGIN, AttentionMaps, attention_maps, readable_pieces
from dist_transformer.inference.decoding import Decoding, Loading
from dist_transformer.inference.loading import load_joint
from dist_transformer.inference.translator import Translator
from dist_transformer.model.transformer import Transformer
from dist_transformer.model_folder import ModelInfo
from dist_transformer.serving.requests import NO_TEXT, AttentionRequest, Kind

# Longer sentences have no maps: a picture of 128 by 128 words is illegible, and a layer of 8 such heads is 0.7 MB.
LONGEST_MAP = 128


@dataclass(frozen=True, kw_only=True, slots=True)
class ServedModel:
    """A loaded model folder, or ensemble."""

    name: str
    info: ModelInfo
    translator: Translator

    def describe(self) -> dict[str, Any]:
        """Describe the model for the page, with its numbers of heads and layers."""
        config = self.info.model
        return {
            "name": self.name,
            "source_language": language_tag(self.info.source_language),
            "target_language": language_tag(self.info.target_language),
            "synthetic": self.info.synthetic,
            "heads": config.heads,
            "layers": {
                "cross": config.decoder_layers,
                "encoder": config.encoder_layers,
                "decoder": config.decoder_layers,
            },
        }


def load_models(
    served: Sequence[Sequence[Path]], loading: Loading, decoding: Decoding, device: torch.device
) -> list[ServedModel]:
    """Load the models to be shown side by side, each for one direction.

    Args:
        served: model folder of each model, or those of an ensemble.

    Raises:
        UserError: a folder has no intact model, or the model does not have that direction, or those of an ensemble
            have different vocabularies.
    """
    models = []
    names = iter(short_names([path for paths in served for path in paths]))
    for paths in served:
        name = " + ".join(itertools.islice(names, len(paths)))
        model, tokenizer, info = load_joint(paths, loading, device)
        translator = Translator.of(model, tokenizer, info, device, decoding)
        models.append(ServedModel(name=name, info=info, translator=translator))
    return models


def short_names(paths: Sequence[Path]) -> list[str]:
    """Name folders by the shortest ends of their paths that differ and are not just `model`."""
    parts = [path.resolve().parts[1:] or ("/",) for path in paths]
    count = 1
    while count < max(map(len, parts)):
        names = ["/".join(part[-count:]) for part in parts]
        if len(set(names)) == len(set(parts)) and "model" not in names:
            break
        count += 1
    return ["/".join(part[-count:]) for part in parts]


def translate(model: ServedModel, text: str, prefix: str = "") -> dict[str, Any]:
    """Translate a text of one line.

    Args:
        prefix: text that the translations begin with; blank for none.

    Returns:
        `hypotheses`, best first, each with `text`, `score`, `tokens` (ids) and `pieces`, the last of which is `</s>`;
        and `cut`, if it ended at the maximum length; `source_pieces`; `split`, which is None unless the text was split;
        `beyond_training`, if a sentence is longer than any in the training; `whole_for_prefix`, if the text was not
        split because of its prefix; `has_maps`, which an ensemble never has.

    Raises:
        UserError: the vocabulary leaves nothing of the text, or the prefix does not fit, or the model's numbers are not
            finite, or the device has not enough memory.
    """
    tokenizer = model.translator.tokenizer
    if tokenizer.source.is_blank(text):
        raise UserError(NO_TEXT)
    (translation,) = model.translator.translate([text], prefixes=[prefix])
    split = translation.split
    source = model.translator.source_ids(text)
    longest = max(len(source), *(len(found.tokens) for found in translation.hypotheses))
    return {
        **model.describe(),
        "source_pieces": readable_pieces(tokenizer.source, source),
        "split": None if split is None else {"parts": split.parts, "limit": split.limit},
        "beyond_training": translation.beyond_training,
        "whole_for_prefix": translation.whole_for_prefix,
        "has_maps": split is None and longest < LONGEST_MAP and isinstance(model.translator.model, Transformer),
        "hypotheses": [
            {
                "text": found.text,
                "score": round(found.score, 4),
                "cut": found.is_cut,
                "tokens": found.tokens,
                "pieces": readable_pieces(tokenizer.target, found.tokens),
            }
            for found in translation.hypotheses
        ],
    }


def translate_lines(model: ServedModel, lines: Sequence[str]) -> list[str]:
    """Translate lines; blank ones become empty.

    Raises:
        UserError: the model's numbers are not finite, or the device has not enough memory.
    """
    return [translation.text for translation in model.translator.translate(lines)]


def attention(model: ServedModel, request: AttentionRequest) -> dict[str, Any]:
    """Compute the attention weights of one layer.

    Returns:
        `rows` (query pieces), `columns` (key pieces), and `weights`, with 3 decimals, of shape (heads, rows, columns).

    Raises:
        UserError: the request does not fit the model, or the sentences are too long for a map.
    """
    tokenizer, config = model.translator.tokenizer, model.translator.model.config
    source, target = model.translator.source_ids(request.text), request.tokens
    if any(not 0 <= token < config.output_size for token in target):
        raise UserError(f"tokens holds an id that is not in the vocabulary of {config.output_size:,}: translate again")
    longest = min(LONGEST_MAP, config.max_positions)
    if max(len(source), len(target)) >= longest:
        raise UserError(f"attention is shown for up to {longest - 1} word pieces: use a shorter sentence")
    count = model.describe()["layers"][request.kind]
    if request.layer >= count:
        raise UserError(f"layer is {request.layer}: it must be 0 to {count - 1}")
    maps_LHTS = _of_kind(attention_maps(model.translator.model, source, target), request.kind)
    weights_HTS = maps_LHTS[request.layer].double()
    source_pieces, target_pieces = readable_pieces(tokenizer.source, source), readable_pieces(tokenizer.target, target)
    return {
        "rows": source_pieces if request.kind == "encoder" else target_pieces,
        "columns": [BEGIN, *target_pieces[:-1]] if request.kind == "decoder" else source_pieces,
        "weights": weights_HTS.round(decimals=3).tolist(),
    }


def _of_kind(maps: AttentionMaps, kind: Kind) -> torch.Tensor:
    return {"cross": maps.cross_LHTS, "encoder": maps.encoder_LHSS, "decoder": maps.decoder_LHTT}[kind]
