"""Our tokenizer for other programs: `tokenizer.json` that adds `</s>`, and what `AutoTokenizer` reads beside it."""

import json
from typing import Any

from dist_transformer.data.tokenizer import BOS_ID, EOS_ID, PAD_ID, SPECIALS, UNK_ID

CONFIG_FILE = "tokenizer_config.json"

_END = SPECIALS[EOS_ID]


def with_end(tokenizer_json: bytes, *, knows_specials: bool) -> str:
    """Our tokenizer.json with `</s>` after every text.

    Args:
        knows_specials: Whether text that spells a special token may become that token, which a setting of the program
            prevents (`split_special_tokens`). Without, no program can be set wrongly, and decoding leaves nothing out.
    """
    state: dict[str, Any] = json.loads(tokenizer_json)
    if not knows_specials:
        state["added_tokens"] = []
    end = {"SpecialToken": {"id": _END, "type_id": 0}}
    first, second = ({"Sequence": {"id": name, "type_id": 0}} for name in "AB")
    state["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [first, end],
        "pair": [first, second, end],
        "special_tokens": {_END: {"id": _END, "ids": [EOS_ID], "tokens": [_END]}},
    }
    return json.dumps(state, indent=2, ensure_ascii=False) + "\n"


def tokenizer_config(max_positions: int) -> str:
    """What transformers 4 and 5 read of a tokenizer besides tokenizer.json."""
    config = {
        # The name that both know; transformers 5 itself writes one that 4 does not.
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": SPECIALS[PAD_ID],
        "unk_token": SPECIALS[UNK_ID],
        "bos_token": SPECIALS[BOS_ID],
        "eos_token": _END,
        "model_max_length": max_positions,
        "padding_side": "right",
        "model_input_names": ["input_ids", "attention_mask"],
        # Text that spells `</s>` stays text.
        "split_special_tokens": True,
        "clean_up_tokenization_spaces": False,
    }
    return json.dumps(config, indent=2) + "\n"
