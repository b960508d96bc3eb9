"""Served models: translations, attention weights of a translation, and the directions, as plain JSON values."""

import itertools
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from iso639 import Language, LanguageNotFoundError

from dist_transformer.base.errors import UserError
from dist_transformer.config.language_codes import base_language, is_same_language, language_tag
from dist_transformer.inference.attention_maps import attention_of, readable_pieces
from dist_transformer.inference.decoding import Decoding, Loading
from dist_transformer.inference.loading import load_joint
from dist_transformer.inference.translator import Translator
from dist_transformer.model.transformer import Transformer
from dist_transformer.model_folder import ModelInfo
from dist_transformer.serving.requests import NO_TEXT, AttentionRequest, BatchRequest

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

    def translate(self, text: str, prefix: str = "") -> dict[str, Any]:
        """Translate a text of one line.

        Args:
            prefix: text that the translations begin with; blank for none.

        Returns:
            `hypotheses`, best first, each with `text`, `score`, `tokens` (ids), `pieces`, the last of which is `</s>`,
            and `alignment`, pairs of words as in Pharaoh's format; and `cut`, if it ended at the maximum length;
            `source_pieces`; `split`, which is None unless the text was split; `beyond_training`, if a sentence is
            longer than any in the training; `whole_for_prefix`, if the text was not split because of its prefix;
            `missing_spans`, the number of protected spans that the model left out; `has_maps`, which an ensemble never
            has.

        Raises:
            UserError: the vocabulary leaves nothing of the text, or the prefix does not fit, or the model's numbers are
                not finite, or the device has not enough memory.
        """
        tokenizer = self.translator.tokenizer
        if tokenizer.source.is_blank(text):
            raise UserError(NO_TEXT)
        (translation,) = self.translator.translate([text], prefixes=[prefix])
        split = translation.split
        source = self.translator.source_ids(text, prefix)
        longest = max(len(source), *(len(found.tokens) for found in translation.hypotheses))
        return {
            **self.describe(),
            "source_pieces": readable_pieces(tokenizer.source, source),
            "split": None if split is None else {"parts": split.parts, "limit": split.limit},
            "beyond_training": translation.beyond_training,
            "whole_for_prefix": translation.whole_for_prefix,
            "missing_spans": translation.hypotheses[0].missing_spans,
            "has_maps": split is None and longest < LONGEST_MAP and isinstance(self.translator.model, Transformer),
            "hypotheses": [
                {
                    "text": found.text,
                    "score": round(found.score, 4),
                    "cut": found.is_cut,
                    "alignment": found.alignment and found.alignment.words,
                    "tokens": found.tokens,
                    "pieces": readable_pieces(tokenizer.target, found.tokens),
                }
                for found in translation.hypotheses
            ],
        }

    def translate_texts(self, texts: Sequence[Sequence[str]], *, has_tags: bool) -> list[str]:
        """Translate the lines of several texts; blank ones become empty.

        Args:
            has_tags: whether they are lines of HTML, each on its own.

        Raises:
            UserError: the model's numbers are not finite, or the device has not enough memory.
        """
        lines = [line for text in texts for line in text]
        translator = self.translator
        translated = iter(translator.translate_markup(lines) if has_tags else translator.translate(lines, align=False))
        return ["\n".join(next(translated).text for _ in text) for text in texts]

    def attention(self, request: AttentionRequest) -> dict[str, Any]:
        """Compute the attention weights of one layer.

        Returns:
            `rows` (query pieces), `columns` (key pieces), and `weights`, with 3 decimals, of shape (heads, rows,
            columns).

        Raises:
            UserError: the request does not fit the model, or the sentences are too long for a map.
        """
        translator, config = self.translator, self.translator.model.config
        source, target = translator.source_ids(request.text), request.tokens
        if any(token >= config.output_size for token in target):
            raise UserError(
                f"tokens holds an id that is not in the vocabulary of {config.output_size:,}: translate again"
            )
        longest = min(LONGEST_MAP, config.max_positions)
        if max(len(source), len(target)) >= longest:
            raise UserError(f"attention is shown for up to {longest - 1} word pieces: use a shorter sentence")
        found = attention_of(translator.model, translator.tokenizer, source, target)
        rows, columns, weights_LHTS = found.of_kind(request.kind)
        if request.layer >= len(weights_LHTS):
            raise UserError(f"layer is {request.layer}: it must be 0 to {len(weights_LHTS) - 1}")
        weights_HTS = weights_LHTS[request.layer].double()
        return {"rows": rows, "columns": columns, "weights": weights_HTS.round(decimals=3).tolist()}


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
        translator = Translator(model, tokenizer, device, decoding, info)
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


def choose_model(models: Sequence[ServedModel], request: BatchRequest) -> ServedModel:
    """Choose the first model that has a request's direction.

    Raises:
        UserError: no model has it, or its source is `auto` and models of several source languages have its target.
    """
    for same in (operator.eq, is_same_language):
        fitting = [
            model
            for model in models
            if same(model.info.target_language, request.target)
            and (request.source == "auto" or same(model.info.source_language, request.source))
        ]
        if fitting:
            break
    if len({model.info.source_language for model in fitting}) == 1:
        return fitting[0]
    names = (f"{model.info.source_language} to {model.info.target_language}" for model in models)
    directions = " or ".join(dict.fromkeys(names))
    if fitting:
        raise UserError(f"the source auto could be several languages: set one, because there is {directions}")
    raise UserError(f"no model translates from this source to this target: there is {directions}")


def describe_languages(models: Sequence[ServedModel]) -> list[dict[str, Any]]:
    """Describe the models' directions: the targets of each source language."""
    targets: dict[str, dict[str, None]] = {}
    for model in models:
        targets.setdefault(model.info.source_language, {})[model.info.target_language] = None
    return [{"code": source, "name": _name(source), "targets": [*found]} for source, found in targets.items()]


def possible_sources(models: Sequence[ServedModel]) -> list[dict[str, Any]]:
    """Name the models' source languages, as if each were equally likely: nothing is detected."""
    sources = list(dict.fromkeys(model.info.source_language for model in models))
    return [{"language": source, "confidence": 100 / len(sources)} for source in sources]


def _name(language: str) -> str:
    try:
        # Without an addition, such as "(macrolanguage)".
        return Language.match(base_language(language)).name.partition(" (")[0]
    except LanguageNotFoundError:
        return language
