"""Reading of Hugging Face's folders of M2M100 and NLLB: configuration and vocabulary, as ours."""

import itertools
from pathlib import Path

from dist_transformer.base.errors import UserError
from dist_transformer.config.plain import read_json
from dist_transformer.config.settings import ModelConfig
from dist_transformer.data.vocabulary.m2m100 import MODEL_FILE, M2M100Vocabulary, wrap_m2m100
from dist_transformer.data.vocabulary.tokenizer import EOS_ID
from dist_transformer.export.m2m100 import FIRST_POSITION, TOKENIZER_CONFIG_FILE
from dist_transformer.importing.marian_folder import read_bytes, read_network, refuse_lacks
from dist_transformer.model_folder import CONFIG_FILE

MODEL_TYPE = "m2m_100"

_REMEDY = "use a whole folder of M2M100 or NLLB, as it is published"
_OTHER_FILES = ("special_tokens_map.json", "added_tokens.json")


def read_m2m100_files(folder: Path) -> dict[str, bytes]:
    """Read the files of the tokenizer by name.

    Raises:
        UserError: one is missing, or the tokenizer puts languages behind texts.
    """
    path = folder / TOKENIZER_CONFIG_FILE
    named = read_json(path, remedy=_REMEDY)
    legacy = bool(named.get("legacy_behaviour"))
    refuse_lacks(path, {"legacy_behaviour, with a source's language behind its </s>": legacy})
    table = "vocab.json" if named.get("tokenizer_class") == "M2M100Tokenizer" else "tokenizer.json"
    files = {name: read_bytes(folder / name, _REMEDY) for name in (MODEL_FILE, TOKENIZER_CONFIG_FILE, table)}
    return files | {name: read_bytes(folder / name, _REMEDY) for name in _OTHER_FILES if (folder / name).exists()}


def read_m2m100_vocabulary(folder: Path, files: dict[str, bytes], rows: int) -> M2M100Vocabulary:
    """Make a vocabulary of a tokenizer, whose entries transformers names.

    Args:
        rows: rows of the embedding, of which the last ones may have no entry.

    Raises:
        UserError: it cannot be used.
    """
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(folder)
    # Each file has errors of its own.
    except Exception as error:
        raise UserError(f"transformers cannot load the tokenizer of {folder} ({error!s:.200}): {_REMEDY}") from None
    names = tokenizer.convert_ids_to_tokens(list(range(rows)))
    # M2M100Tokenizer gives <unk> for numbers that no entry has, and NllbTokenizer None.
    known = itertools.takewhile(
        lambda entry: entry[1] is not None and (entry[1] != tokenizer.unk_token or entry[0] == tokenizer.unk_token_id),
        enumerate(names),
    )
    try:
        return wrap_m2m100(files, [name for _, name in known])
    except ValueError as error:
        raise UserError(f"{folder} {error}: {_REMEDY}") from None


def read_m2m100_config(folder: Path, vocabulary: M2M100Vocabulary) -> ModelConfig:
    """Read `config.json` as a model of ours; its vocabulary is the given one.

    Raises:
        UserError: it is of a model that ours cannot express.
    """
    path = folder / CONFIG_FILE
    values = read_json(path, remedy=_REMEDY)
    lacks = {
        "embeddings that are not scaled": not values.get("scale_embedding", True),
        "one embedding and an output apart from it": not values.get("tie_word_embeddings", True),
        "a decoder that does not begin with </s>": (
            values.get("decoder_start_token_id") != vocabulary.their_ids[0][EOS_ID]
        ),
    }
    return read_network(
        path,
        values,
        lacks,
        norm="pre",
        positions="sinusoidal_t2t",
        first_position=FIRST_POSITION,
        begin_with_end=True,
        vocab_size=vocabulary.vocab_size,
    )
