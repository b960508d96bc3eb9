"""Checks of a tokenizer.json before the tokenizers library reads it.

The library trusts its files. An id of 4·10⁹ makes it allocate memory until the process is killed, the data of a
`Precompiled` normalizer can crash it, and a regular expression can run without end. So the parts of a file must be of
the few types that training writes, every expression must be one of ours, and ids must number the entries.
"""

from collections.abc import Collection
from typing import Any

from dist_transformer.config.plain import parse_json
from dist_transformer.data.vocabulary.tokenizer import LARGEST_VOCABULARY

# A piece has at most 64 characters and 30 marks of text, and each byte of it is written as one character.
_LONGEST_PIECE = 4 * 128

_PARTS = {
    "version",
    "truncation",
    "padding",
    "added_tokens",
    "normalizer",
    "pre_tokenizer",
    "post_processor",
    "decoder",
    "model",
}
_UNUSED = ("truncation", "padding", "post_processor")
_LEARNED = ("type", "vocab", "merges")
_MODEL = {
    *_LEARNED,
    "dropout",
    "unk_token",
    "continuing_subword_prefix",
    "end_of_word_suffix",
    "fuse_unk",
    "byte_fallback",
    "ignore_merges",
}
_NORMALIZERS = {"Sequence", "Replace", "NFKC", "NFC", "Lowercase"}
_PRE_TOKENIZERS = {"Sequence", "Split", "ByteLevel"}
_DECODERS = {"ByteLevel"}
# Training writes six at most: four replacements, a form and lowercase.
_MOST_STEPS = 6


def check_byte_bpe_file(content: bytes, *, words: Collection[str], normalizations: Collection[str]) -> None:
    """Refuse a file that the tokenizers library should not read.

    Args:
        words: regular expressions that its rule for words may contain.
        normalizations: regular expressions that its normalizers may contain.

    Raises:
        ValueError: the file is refused; the message continues a sentence that begins with the file's name.
    """
    try:
        parts = parse_json(content)
    except ValueError as error:
        raise ValueError(f"is not a tokenizer file ({error})") from None
    if not isinstance(parts, dict) or not {"added_tokens", "model"} <= parts.keys() <= _PARTS:
        raise ValueError("is not a tokenizer file (it does not have the parts of one)")
    problem = (
        next((f"it has a {name}" for name in _UNUSED if parts.get(name) is not None), None)
        or _type_problem(parts.get("normalizer"), _NORMALIZERS, "normalizers", normalizations)
        or _type_problem(parts.get("pre_tokenizer"), _PRE_TOKENIZERS, "pretokenizers", words)
        or _type_problem(parts.get("decoder"), _DECODERS, None, ())
        or _model_problem(parts["model"])
        or _added_problem(parts["added_tokens"], parts["model"]["vocab"])
    )
    if problem:
        raise ValueError(f"is a tokenizer of another kind than dist-transformer prepare trains ({problem})")


def _type_problem(part: Any, kinds: Collection[str], items: str | None, patterns: Collection[str]) -> str | None:
    if not isinstance(part, dict) or not isinstance(part.get("type"), str) or part["type"] not in kinds:
        return f"it has the unknown part {_shown(part)}"
    if part["type"] == "Sequence":
        inner = part.get(items or "")
        # Sequences within sequences could be nested without limit.
        if not isinstance(inner, list) or len(inner) > _MOST_STEPS or part.keys() != {"type", items}:
            return f"it has the unknown part {_shown(part)}"
        plain = [kind for kind in kinds if kind != "Sequence"]
        return next(filter(None, (_type_problem(one, plain, None, patterns) for one in inner)), None)
    for name, value in part.items():
        if name == "pattern":
            if not (isinstance(value, dict) and value.keys() == {"Regex"} and value["Regex"] in patterns):
                return "it has an unknown pattern"
        elif not isinstance(value, str | bool):
            return f"a part has {name} {_shown(value)}"
    return None


def _model_problem(model: Any) -> str | None:
    if not isinstance(model, dict) or model.get("type") != "BPE" or not {*_LEARNED} <= model.keys() <= _MODEL:
        return "its model is not byte-level BPE"
    for name in model.keys() - {*_LEARNED}:
        if model[name] is not None and not isinstance(model[name], bool):
            return f"its {name} is {_shown(model[name])}"
    return _vocabulary_problem(model["vocab"]) or _merges_problem(model["merges"], model["vocab"])


def _vocabulary_problem(vocab: Any) -> str | None:
    if not isinstance(vocab, dict) or len(vocab) > LARGEST_VOCABULARY:
        return "its vocabulary is not a table of pieces, or is too large"
    if any(type(number) is not int for number in vocab.values()):
        return "an id is not a number"
    if not all(0 <= number < len(vocab) for number in vocab.values()) or len({*vocab.values()}) != len(vocab):
        return f"its {len(vocab):,} entries do not have the ids 0 to {len(vocab) - 1:,}"
    if max(map(len, vocab), default=0) > _LONGEST_PIECE:
        return f"a piece has more than {_LONGEST_PIECE} bytes"
    return None


def _merges_problem(merges: Any, vocab: dict[str, int]) -> str | None:
    if not isinstance(merges, list) or len(merges) > len(vocab):
        return "its merges are not a list, or are more than its entries"
    for merge in merges:
        # Versions of the library write the two pieces in different ways.
        pair = merge.split(" ") if isinstance(merge, str) else merge
        fits = isinstance(pair, list) and len(pair) == 2 and all(isinstance(piece, str) for piece in pair)
        if not fits or not (pair[0] in vocab and pair[1] in vocab and pair[0] + pair[1] in vocab):
            return f"the merge {_shown(merge)} is not made of its entries"
    return None


def _added_problem(added: Any, vocab: dict[str, int]) -> str | None:
    if not isinstance(added, list) or len(added) > len(vocab):
        return "its added_tokens are not a list, or are more than its entries"
    for entry in added:
        if not isinstance(entry, dict) or not isinstance(entry.get("content"), str):
            return f"an added token is {_shown(entry)}"
        if type(entry.get("id")) is not int or vocab.get(entry["content"]) != entry["id"]:
            return f"the added token {_shown(entry['content'])} is not in its vocabulary under its id"
        if not all(isinstance(value, bool) for name, value in entry.items() if name not in ("content", "id")):
            return f"an added token is {_shown(entry)}"
    return None


def _shown(value: Any) -> str:
    if isinstance(value, dict) and isinstance(value.get("type"), str):
        value = value["type"]
    return repr(value)[:60] if not isinstance(value, dict | list) else f"a {type(value).__name__}"
