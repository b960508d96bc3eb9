"""Every spelling of a language gets that language's tokeniser."""

import pytest

from dist_transformer.config.language_codes import base_language, bleu_tokenizer, is_same_language, language_tag


@pytest.mark.parametrize(
    ("tokenizer", "codes"),
    [
        (
            "zh",
            "zh ZH zho chi cmn zh-CN zh_TW zh_Hant zho_Hans zho-Hant cmn_Hans zh-Hans-CN yue yue_Hant wuu nan lzh cn",
        ),
        ("char", "ja jpn jpn_Jpan ja-JP jp ko kor kor_Hang ko_KR th tha tha_Thai th-TH"),
        ("char", "lo lao_Laoo km khm_Khmr my mya_Mymr bur shn_Mymr bo bod_Tibt tib dz dzo_Tibt"),
        (
            "13a",
            "en eng eng_Latn en_US de deu ger deu_Latn pt-BR ces cze vi vie_Latn ar arb_Arab zh-Latn cmn_Latn_pinyin x",
        ),
    ],
)
def test_the_tokeniser_follows_the_language(tokenizer: str, codes: str) -> None:
    assert {code: bleu_tokenizer(code) for code in codes.split()} == dict.fromkeys(codes.split(), tokenizer)


@pytest.mark.parametrize(
    ("code", "base", "tag"),
    [
        ("zho_Hans", "zh", "zh-Hans"),
        ("zh-hans-cn", "zh", "zh-Hans-CN"),
        ("chi", "zh", "zh"),
        ("pt_br", "pt", "pt-BR"),
        ("lvs_Latn", "lv", "lv-Latn"),
        ("es-419", "es", "es-419"),
        ("ceb", "ceb", "ceb"),
    ],
)
def test_one_spelling_for_all(code: str, base: str, tag: str) -> None:
    assert (base_language(code), language_tag(code)) == (base, tag)


def test_script_and_region_count_if_both_codes_state_them() -> None:
    for one, other in (("de", "deu"), ("zh", "zho_Hans"), ("zho_Hans", "zh-Hans"), ("pt-BR", "por"), ("en", "en")):
        assert (is_same_language(one, other), is_same_language(other, one)) == (True, True)
    for one, other in (("zho_Hans", "zho_Hant"), ("pt-BR", "pt-PT"), ("zh", "yue"), ("de", "nl"), ("", "de")):
        assert (is_same_language(one, other), is_same_language(other, one)) == (False, False)
