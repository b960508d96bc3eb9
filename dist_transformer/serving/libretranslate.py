"""Requests for translations in the API of LibreTranslate (https://docs.libretranslate.com), which has many clients.

{"q": text or [text, …], "source": "en", "target": "de", "format": "text"}, as JSON or as a form. Other fields, such as
`api_key`, have no effect.
"""

import operator
import urllib.parse
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from dist_transformer.base.errors import UserError
from dist_transformer.config.language_codes import is_same_language
from dist_transformer.serving.messages import checked_line, read_json
from dist_transformer.serving.models import ServedModel, translate_lines

FORM = "application/x-www-form-urlencoded"
# Lines take time each, however short they are.
MOST_LINES = 128
_ANY_SOURCE = "auto"
_MOST_FIELDS = 16


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchRequest:
    """A request for translations of one or several texts."""

    texts: tuple[tuple[str, ...], ...]
    """Lines of each text."""
    is_list: bool
    """Whether the answer is a list."""
    source: str
    """Language, or `auto`."""
    target: str


def read_batch(body: bytes, content_type: str, *, max_characters: int) -> BatchRequest:
    """Read the body of a request for translations.

    Args:
        content_type: `FORM`, or that of JSON.
        max_characters: most characters of all texts together.

    Raises:
        UserError: the body is anything else; the message is one sentence.
    """
    fields = _form_fields(body) if content_type == FORM else _json_fields(body)
    asked, format_ = fields.get("q"), fields.get("format")
    given = asked if isinstance(asked, list) else [asked]
    texts = [text for text in given if isinstance(text, str)]
    if len(texts) < len(given):
        raise UserError("q must be a text or a list of texts")
    if format_ not in (None, "", "text"):
        raise UserError("format must be text: other formats are not supported")
    if not all(isinstance(fields.get(name), str) for name in ("source", "target")):
        raise UserError("source and target must be languages, such as en and de")
    characters = sum(map(len, texts))
    if characters > max_characters:
        raise UserError(f"q has {characters:,} characters and {max_characters:,} are allowed: send several requests")
    lines = tuple(tuple(map(checked_line, _lines_of(text))) for text in texts)
    count = sum(bool(line.strip()) for text in lines for line in text)
    if count > MOST_LINES:
        raise UserError(f"q has {count:,} lines and {MOST_LINES} are allowed: send several requests")
    return BatchRequest(texts=lines, is_list=isinstance(asked, list), source=fields["source"], target=fields["target"])


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


def translate_batch(model: ServedModel, request: BatchRequest) -> dict[str, Any]:
    """Translate the texts of a request line by line.

    Raises:
        UserError: the model's numbers are not finite, or the device has not enough memory.
    """
    translated = iter(translate_lines(model, [line for text in request.texts for line in text]))
    texts = ["\n".join(next(translated) for _ in text) for text in request.texts]
    return {"translatedText": texts if request.is_list else texts[0]}


def describe_languages(models: Sequence[ServedModel]) -> list[dict[str, Any]]:
    """Describe the models' directions: the targets of each source language."""
    targets: dict[str, list[str]] = {}
    for model in models:
        found = targets.setdefault(model.info.source_language, [])
        if model.info.target_language not in found:
            found.append(model.info.target_language)
    return [{"code": source, "name": source, "targets": found} for source, found in targets.items()]


def _lines_of(text: str) -> list[str]:
    return text.replace("\r\n", "\n").replace("\r", "\n").split("\n")


def _json_fields(body: bytes) -> dict[str, Any]:
    fields = read_json(body)
    if not isinstance(fields, dict):
        raise UserError("the request must be a JSON object with q, source, target")
    return fields


def _form_fields(body: bytes) -> dict[str, str]:
    try:
        pairs = urllib.parse.parse_qsl(
            body.decode("utf-8"), keep_blank_values=True, errors="strict", max_num_fields=_MOST_FIELDS
        )
    except ValueError:
        raise UserError("the request is not a form in UTF-8 with q, source, target") from None
    if len(dict(pairs)) < len(pairs):
        raise UserError("the form has a field twice: send lists as JSON")
    return dict(pairs)
