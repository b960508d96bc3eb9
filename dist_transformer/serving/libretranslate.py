"""Requests of programs in the API of LibreTranslate (https://docs.libretranslate.com), which has many clients.

{"q": text or [text, …], "source": "en", "target": "de", "format": "text"}, as JSON or as a form. Other fields, such as
`api_key`, have no effect.
"""

import operator
from collections.abc import Sequence
from typing import Any, Literal

from iso639 import Language, LanguageNotFoundError
from pydantic import BaseModel, ConfigDict

from dist_transformer.base.errors import UserError
from dist_transformer.config.language_codes import base_language, is_same_language
from dist_transformer.serving.models import ServedModel, translate_lines
from dist_transformer.serving.requests import one_line

# Lines take time each, however short they are.
MOST_LINES = 128
_ANY_SOURCE = "auto"


class DetectRequest(BaseModel):
    """A request for the language of a text, or of several."""

    model_config = ConfigDict(strict=True)
    q: str | list[str]


class BatchRequest(DetectRequest):
    """A request for translations of a text, or of several, from a language, or `auto`, to another."""

    source: str
    target: str
    format: Literal["text", "", None] = None


def lines_of(request: BatchRequest, *, max_characters: int) -> list[list[str]]:
    """Return the lines of each text.

    Raises:
        UserError: the texts have too many lines or characters, or a control character.
    """
    texts = [request.q] if isinstance(request.q, str) else request.q
    characters = sum(map(len, texts))
    if characters > max_characters:
        raise UserError(f"q has {characters:,} characters and {max_characters:,} are allowed: send several requests")
    lines = [[*map(one_line, text.replace("\r\n", "\n").replace("\r", "\n").split("\n"))] for text in texts]
    count = sum(bool(line.strip()) for text in lines for line in text)
    if count > MOST_LINES:
        raise UserError(f"q has {count:,} lines and {MOST_LINES} are allowed: send several requests")
    return lines


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
            and (request.source == _ANY_SOURCE or same(model.info.source_language, request.source))
        ]
        if fitting:
            break
    if len({model.info.source_language for model in fitting}) == 1:
        return fitting[0]
    directions = " or ".join(
        dict.fromkeys(f"{model.info.source_language} to {model.info.target_language}" for model in models)
    )
    if fitting:
        raise UserError(f"the source auto could be several languages: set one, because there is {directions}")
    raise UserError(f"no model translates from this source to this target: there is {directions}")


def translate_texts(model: ServedModel, texts: Sequence[Sequence[str]]) -> list[str]:
    """Translate the lines of several texts.

    Raises:
        UserError: the model's numbers are not finite, or the device has not enough memory.
    """
    translated = iter(translate_lines(model, [line for text in texts for line in text]))
    return ["\n".join(next(translated) for _ in text) for text in texts]


def describe_languages(models: Sequence[ServedModel]) -> list[dict[str, Any]]:
    """Describe the models' directions: the targets of each source language."""
    targets: dict[str, list[str]] = {}
    for model in models:
        found = targets.setdefault(model.info.source_language, [])
        if model.info.target_language not in found:
            found.append(model.info.target_language)
    return [{"code": source, "name": _name(source), "targets": found} for source, found in targets.items()]


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
