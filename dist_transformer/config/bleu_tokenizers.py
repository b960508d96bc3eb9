"""Tokenisers of sacreBLEU by language."""

# Every other language uses mteval's tokeniser, "13a". For Japanese and Korean sacreBLEU also has dictionary tokenisers,
# which need more packages; "char" needs none. The signature names the tokeniser.
_TOKENIZERS = {"zh": "zh", "ja": "char", "ko": "char", "th": "char", "lo": "char", "km": "char", "my": "char"}


def bleu_tokenizer(language: str) -> str:
    """Return sacreBLEU's tokeniser for text of `language`, such as "de", "zh" or "zh-CN"."""
    return _TOKENIZERS.get(base_language(language), "13a")


def base_language(language: str) -> str:
    """Return the base language: `zh_Hant` → `zh`."""
    return language.replace("_", "-").split("-")[0].lower()
