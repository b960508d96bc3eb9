"""Codes of languages in any of their spellings, and the tokenisers of sacreBLEU by language."""

import functools
import re

# Codes for which ISO 639 has no other of two letters: the member of a macrolanguage that the code of two letters mostly
# means (cmn is Mandarin, lvs Latvian), and mistakes that are common.
_CODES = (
    "ar:arb az:azj et:ekk fa:pes gn:gug ja:jp kr:knc ku:kmr lv:lvs mg:plt mn:khk ms:zsm ne:npi om:gaz or:ory "
    "ps:pbt,pbu qu:quy sq:als sw:swh tl:fil uz:uzn yi:ydd zh:cmn,cn"
)
_SHORT = {
    other: short
    for short, _, others in (entry.partition(":") for entry in _CODES.split())
    for other in others.split(",")
}
# Every other language uses mteval's tokeniser, "13a". For Japanese and Korean sacreBLEU also has dictionary tokenisers,
# which need more packages; "char" needs none. The signature names the tokeniser.
_TOKENIZERS = dict.fromkeys(("ja", "ko", "th", "lo", "km", "my", "shn", "bo", "dz"), "char") | dict.fromkeys(
    ("zh", "yue", "wuu", "nan", "hak", "gan", "hsn", "cdo", "cjy", "lzh"), "zh"
)


def bleu_tokenizer(language: str) -> str:
    """Return sacreBLEU's tokeniser for text of `language`, such as "de", "zh", "zh-CN" or "zho_Hans"."""
    base, *others = _subtags(language)
    # Romanised text, such as pinyin, has spaces.
    return "13a" if "Latn" in others else _TOKENIZERS.get(base, "13a")


def base_language(language: str) -> str:
    """Return the language alone by its shortest code: `zh_Hant`, `zho_Hans` and `cmn` → `zh`, `yue_Hant` → `yue`."""
    return _subtags(language)[0]


def language_tag(language: str) -> str:
    """Return a code in the spelling of BCP 47: `zho_Hans` → `zh-Hans`, `en_us` → `en-US`; other names as they are."""
    return "-".join(_subtags(language))


def is_same_language(one: str, other: str) -> bool:
    """Return whether two codes may mean one language: script and region count only if both have them."""
    (base, *others), (other_base, *more) = _subtags(one), _subtags(other)
    return base == other_base and (others == more or not others or not more)


def _subtags(language: str) -> list[str]:
    """Split a code into language, script and region, in the spelling of BCP 47; another name is one part."""
    base, *others = re.split("[-_]", language)
    if not re.fullmatch("[A-Za-z]{2,3}", base):
        return [language]
    spelled = (part.title() if len(part) == 4 else part.upper() if len(part) < 4 else part for part in others)
    return [_shortest(base.lower()), *spelled]


@functools.cache
def _shortest(code: str) -> str:
    """Return the code of two letters for a language that has one."""
    if code in _SHORT or len(code) == 2:
        return _SHORT.get(code, code)
    # The tables of ISO 639 take a tenth of a second.
    from iso639 import Language, LanguageNotFoundError

    try:
        return Language.match(code).part1 or code
    except LanguageNotFoundError:
        return code
