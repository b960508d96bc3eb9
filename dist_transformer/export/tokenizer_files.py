"""Our tokenizer for other programs: a `tokenizer.json` that adds tags and `</s>`, and `AutoTokenizer`'s config."""

import json
from collections.abc import Sequence
from typing import Any

from dist_transformer.data.vocabulary.tokenizer import BOS_ID, EOS_ID, PAD_ID, SPECIALS, UNK_ID, Tokenizer

CONFIG_FILE = "tokenizer_config.json"

_END = SPECIALS[EOS_ID]


def whole_tokenizer(tokenizer: Tokenizer, tags: Sequence[str], *, knows_specials: bool) -> str:
    """Return the tokenizer.json of a side with the tags before every text and `</s>` after it.

    Args:
        knows_specials: keep the list of special tokens. A text that spells one may then become that token, unless the
            program sets `split_special_tokens`. Without the list this cannot happen, and decoding keeps all tokens.
    """
    state: dict[str, Any] = json.loads(tokenizer.library_file)
    if not knows_specials:
        state["added_tokens"] = []
    added = dict(zip((*tags, _END), (*tokenizer.tag_ids(tags), EOS_ID), strict=True))
    *before, end = ({"SpecialToken": {"id": name, "type_id": 0}} for name in added)
    first, second = ({"Sequence": {"id": name, "type_id": 0}} for name in "AB")
    state["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [*before, first, end],
        "pair": [*before, first, second, end],
        "special_tokens": {name: {"id": name, "ids": [token], "tokens": [name]} for name, token in added.items()},
    }
    return json.dumps(state, indent=2, ensure_ascii=False) + "\n"


def tokenizer_config(
    max_positions: int,
    tokenizer_class: str = "PreTrainedTokenizerFast",
    *,
    has_begin: bool = True,
    has_two: bool = False,
    languages: tuple[str, str] | None = None,
) -> str:
    """Return the config that transformers 4 and 5 read in addition to the vocabulary.

    Args:
        tokenizer_class: a name that both versions know; transformers 5 writes one that 4 does not know.
        has_begin: whether the vocabulary has `<s>`.
        has_two: whether the targets have a vocabulary of their own.
        languages: source and target language, which a `MarianTokenizer` states.
    """
    config = {
        "tokenizer_class": tokenizer_class,
        "pad_token": SPECIALS[PAD_ID],
        "unk_token": SPECIALS[UNK_ID],
        **({"bos_token": SPECIALS[BOS_ID]} if has_begin else {}),
        "eos_token": _END,
        **({} if languages is None else dict(zip(("source_lang", "target_lang"), languages, strict=True))),
        **({"separate_vocabs": True} if has_two else {}),
        "model_max_length": max_positions,
        "padding_side": "right",
        "model_input_names": ["input_ids", "attention_mask"],
        # Text that spells `</s>` stays text.
        "split_special_tokens": True,
        "clean_up_tokenization_spaces": False,
    }
    return json.dumps(config, indent=2) + "\n"
