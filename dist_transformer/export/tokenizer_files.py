"""Our tokenizer for other programs: a `tokenizer.json` that adds tags and `</s>`, or files of a `MarianTokenizer`."""

import json
from collections.abc import Sequence
from typing import Any

from dist_transformer.base.errors import UserError
from dist_transformer.data.vocabulary.m2m100 import M2M100Vocabulary
from dist_transformer.data.vocabulary.tokenizer import BOS_ID, EOS_ID, PAD_ID, SPECIALS, UNK_ID, Tokenizer, Vocabulary
from dist_transformer.export.m2m100 import TOKENIZER_CONFIG_FILE, m2m100_tokenizer_files
from dist_transformer.export.marian import is_of_marian
from dist_transformer.model_folder import TOKENIZER_FILE, ModelInfo

SOURCE_FILE = "source.spm"
"""File that only a `MarianTokenizer` has."""
_END = SPECIALS[EOS_ID]


def transformers_files(tokenizer: Vocabulary, info: ModelInfo) -> dict[str, str | bytes]:
    """Return the files of a tokenizer of transformers by name.

    Args:
        info: of one direction.

    Raises:
        UserError: it has no tokenizer for these vocabularies, or none that puts these tags in front of a text.
    """
    direction, has_two = info.direction, tokenizer.sizes[1] > 0
    if isinstance(tokenizer, M2M100Vocabulary):
        return m2m100_tokenizer_files(tokenizer, direction)
    if not tokenizer.source.library == tokenizer.target.library == "sentencepiece":
        if has_two:
            raise UserError(
                "transformers has no tokenizer for two vocabularies, unless both are of SentencePiece: export it with "
                "--to ctranslate2"
            )
        return {
            TOKENIZER_FILE: whole_tokenizer(tokenizer.source, direction.tags, knows_specials=True),
            TOKENIZER_CONFIG_FILE: tokenizer_config(info.model.max_positions),
        }
    if len(tags := direction.tags) > 1:
        raise UserError(
            f"transformers' MarianTokenizer takes one tag in front of a text, and this direction has {' '.join(tags)}: "
            "export it with --to ctranslate2"
        )
    tables: list[str | bytes] = []
    for side in (tokenizer.source, tokenizer.target)[: 1 + has_two]:
        table = {language_code(piece) if piece in side.tags else piece: i for i, piece in enumerate(side.pieces)}
        tables.append(json.dumps(table, indent=1, ensure_ascii=False) + "\n")
    begin: str | None = SPECIALS[BOS_ID]
    if is_of_marian(tokenizer, info.model):
        # Their table has no <s>: a tokenizer that names one would add it.
        tables, begin = [*tokenizer.tables], None
    return {
        SOURCE_FILE: tokenizer.source.library_file,
        "target.spm": tokenizer.target.library_file,
        **dict(zip(("vocab.json", "target_vocab.json"), tables, strict=False)),
        TOKENIZER_CONFIG_FILE: tokenizer_config(
            info.model.max_positions,
            tokenizer_class="MarianTokenizer",
            bos_token=begin,
            source_lang=direction.source_language,
            target_lang=direction.target_language,
            separate_vocabs=has_two or None,
        ),
    }


def language_code(*tags: str) -> str:
    """Return a tag as `MarianTokenizer` reads it at the beginning of a text: `<2de>` becomes `>>2de<<`."""
    return "".join(tag if tag.startswith(">>") else f">>{tag[1:-1]}<<" for tag in tags)


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


def tokenizer_config(max_positions: int, **changes: object) -> str:
    """Return the config that transformers 4 and 5 read in addition to the vocabulary.

    Args:
        changes: other values of its entries; those that are None are left out.
    """
    config = {
        # A name that both versions know; transformers 5 writes one that 4 does not know.
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": SPECIALS[PAD_ID],
        "unk_token": SPECIALS[UNK_ID],
        "bos_token": SPECIALS[BOS_ID],
        "eos_token": _END,
        "source_lang": None,
        "target_lang": None,
        "separate_vocabs": None,
        "model_max_length": max_positions,
        "padding_side": "right",
        "model_input_names": ["input_ids", "attention_mask"],
        # Text that spells `</s>` stays text.
        "split_special_tokens": True,
        "clean_up_tokenization_spaces": False,
        **changes,
    }
    return json.dumps({name: value for name, value in config.items() if value is not None}, indent=2) + "\n"
