from types import SimpleNamespace
from typing import Any, cast

import pytest

from dist_transformer.base.errors import UserError
from dist_transformer.serving.libretranslate import (
    MOST_LINES,
    BatchRequest,
    choose_model,
    describe_languages,
    lines_of,
    possible_sources,
)
from dist_transformer.serving.models import ServedModel


def read(changed: dict[str, Any]) -> BatchRequest:
    return BatchRequest.model_validate({"q": "a dog", "source": "en", "target": "de", **changed})


def served(*names: str) -> list[ServedModel]:
    pairs = [name.split("-") for name in names]
    infos = [SimpleNamespace(source_language=source, target_language=target) for source, target in pairs]
    return [cast(ServedModel, SimpleNamespace(name=name, info=info)) for name, info in zip(names, infos, strict=True)]


def test_texts_are_read_as_lines() -> None:
    several = read({"q": ["a\tb\r\n\nc\n", "", "d"], "api_key": "secret", "format": "text"})
    assert lines_of(several, max_characters=10) == [["a b", "", "c", ""], [""], ["d"]]
    assert lines_of(read({}), max_characters=5) == [["a dog"]]


@pytest.mark.parametrize(
    ("q", "message"),
    [
        (["a" * 600, "b" * 401], "q has 1,001 characters and 1,000 are allowed: send several requests"),
        ("a\n" * (MOST_LINES + 1), "q has 129 lines and 128 are allowed: send several requests"),
        (["a"] * (MOST_LINES + 1), "q has 129 lines and 128 are allowed: send several requests"),
        (["a", "b\0"], r"the text holds U\+0000"),
    ],
)
def test_a_bad_request_is_one_sentence(q: str | list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        lines_of(read({"q": q}), max_characters=1000)


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


def test_languages_have_names_and_all_their_targets() -> None:
    models = served("en-de", "en-fr", "zho_Hans-en", "our own-de")
    assert describe_languages(models) == [
        {"code": "en", "name": "English", "targets": ["de", "fr"]},
        {"code": "zho_Hans", "name": "Chinese", "targets": ["en"]},
        {"code": "our own", "name": "our own", "targets": ["de"]},
    ]
    assert [each["language"] for each in possible_sources(models)] == ["en", "zho_Hans", "our own"]
