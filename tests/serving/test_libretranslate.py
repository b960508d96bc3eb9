import json
import urllib.parse
from types import SimpleNamespace
from typing import Any, cast

import pytest

from dist_transformer.base.errors import UserError
from dist_transformer.serving.libretranslate import (
    FORM,
    MOST_LINES,
    BatchRequest,
    choose_model,
    describe_languages,
    read_batch,
)
from dist_transformer.serving.models import ServedModel

GOOD = {"q": "a dog", "source": "en", "target": "de"}


def read(changed: dict[str, Any], max_characters: int = 100) -> BatchRequest:
    body = json.dumps({**GOOD, **changed}).encode()
    return read_batch(body, "application/json", max_characters=max_characters)


def served(*names: str) -> list[ServedModel]:
    pairs = [name.split("-") for name in names]
    infos = [SimpleNamespace(source_language=source, target_language=target) for source, target in pairs]
    return [cast(ServedModel, SimpleNamespace(name=name, info=info)) for name, info in zip(names, infos, strict=True)]


def test_texts_are_read_as_lines() -> None:
    one, several = read({}), read({"q": ["a\tb\r\n\nc\n", "", "d"], "api_key": "secret", "format": "text"})
    assert (one.texts, one.is_list) == ((("a dog",),), False)
    assert (several.texts, several.is_list) == ((("a b", "", "c", ""), ("",), ("d",)), True)
    assert (read({"q": []}).texts, read({"q": []}).is_list) == ((), True)


def test_a_form_is_read_as_json_is() -> None:
    form = urllib.parse.urlencode({**GOOD, "q": "für dich 💥", "api_key": ""}).encode()
    assert read_batch(form, FORM, max_characters=100) == read({"q": "für dich 💥"})


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"q": None}, "q must be a text or a list of texts"),
        ({"q": ["a", 5]}, "q must be a text or a list of texts"),
        ({"q": ["a" * 60, "b" * 41]}, "q has 101 characters and 100 are allowed: send several requests"),
        ({"q": "a\n" * (MOST_LINES + 1)}, "q has 129 lines and 128 are allowed: send several requests"),
        ({"q": ["a"] * (MOST_LINES + 1)}, "q has 129 lines and 128 are allowed: send several requests"),
        ({"q": ["a", "b\0"]}, "the text holds U+0000"),
        ({"format": "html"}, "format must be text"),
        ({"source": None}, "source and target must be languages"),
    ],
)
def test_a_bad_request_is_one_sentence(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as refused:
        read(changed, max_characters=100 if "characters" in message else 1000)
    assert str(refused.value).startswith(message)


@pytest.mark.parametrize(
    ("body", "kind", "message"),
    [
        (b"[]", "application/json", "the request must be a JSON object"),
        (b"q=%ff&source=en&target=de", FORM, "the request is not a form in UTF-8"),
        (b"&".join(b"a%d=" % i for i in range(50)), FORM, "the request is not a form in UTF-8"),
        (b"q=a&q=b&source=en&target=de", FORM, "the form has a field twice: send lists as JSON"),
    ],
)
def test_a_bad_body_is_one_sentence(body: bytes, kind: str, message: str) -> None:
    with pytest.raises(UserError) as refused:
        read_batch(body, kind, max_characters=100)
    assert str(refused.value).startswith(message)


@pytest.mark.parametrize(
    ("source", "target", "name"),
    [
        ("en", "de", "en-de"),
        ("auto", "de", "en-de"),
        ("eng", "de-DE", "en-de"),
        ("en", "zh-Hant", "en-zho_Hant"),
        ("en", "zh", "en-zho_Hans"),
    ],
)
def test_a_request_goes_to_the_model_of_its_direction(source: str, target: str, name: str) -> None:
    models = served("en-de", "de-en", "en-zho_Hans", "en-zho_Hant")
    assert choose_model(models, read({"source": source, "target": target})).name == name


def test_of_two_models_with_one_direction_the_first_answers() -> None:
    models = served("en-de", "en-de")
    assert choose_model(models, read({"source": "auto"})) is models[0]


@pytest.mark.parametrize(
    ("names", "changed", "message"),
    [
        (("en-de",), {"source": "fr"}, "no model translates from this source to this target: there is en to de"),
        (("en-de",), {"source": "de", "target": "en"}, "no model translates from this source"),
        (("en-de",), {"source": "auto", "target": "auto"}, "no model translates from this source"),
        (("en-de", "fr-de"), {"source": "auto"}, "the source auto could be several languages: set one, because there"),
    ],
)
def test_another_direction_is_one_sentence(names: tuple[str, ...], changed: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as refused:
        choose_model(served(*names), read(changed))
    assert str(refused.value).startswith(message)


def test_languages_have_all_their_targets() -> None:
    assert describe_languages(served("en-de", "en-fr", "de-en")) == [
        {"code": "en", "name": "en", "targets": ["de", "fr"]},
        {"code": "de", "name": "de", "targets": ["en"]},
    ]
