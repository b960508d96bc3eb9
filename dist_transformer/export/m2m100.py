"""Conversion to Hugging Face's `M2M100ForConditionalGeneration`, the network of M2M100 and NLLB.

It has pre-norm, sinusoids that begin with position 2, and a decoder that begins with `</s>` and the code of the
target's language. Its parameters have Marian's names and Marian's order of the residual dimension.
"""

import json
from typing import TYPE_CHECKING

from dist_transformer.base.errors import UserError
from dist_transformer.config.directions import Direction
from dist_transformer.config.settings import ModelConfig
from dist_transformer.data.vocabulary.m2m100 import M2M100Vocabulary
from dist_transformer.data.vocabulary.tokenizer import BOS_ID, EOS_ID, PAD_ID, Vocabulary
from dist_transformer.export.marian import network_of, ours_of, refuse_others, weights_with
from dist_transformer.model.transformer import Transformer

if TYPE_CHECKING:
    from transformers import M2M100ForConditionalGeneration

TOKENIZER_CONFIG_FILE = "tokenizer_config.json"
FIRST_POSITION = 2


def refuse_what_m2m100_lacks(config: ModelConfig) -> None:
    """Raise a UserError that names a setting that `M2M100ForConditionalGeneration` does not support."""
    wanted: dict[str, object] = {"norm": "pre", "norm_epsilon": 1e-5, "positions": "sinusoidal_t2t"}
    wanted |= {"first_position": FIRST_POSITION, "attention": "softmax", "tie_embeddings": "all", "output_bias": False}
    refuse_others("M2M100ForConditionalGeneration", config, wanted)


def m2m100_model(model: Transformer, vocabulary: Vocabulary) -> "M2M100ForConditionalGeneration":
    """Build a `M2M100ForConditionalGeneration` that computes the same function; its parameters are copies.

    Raises:
        UserError: it does not support the configuration, or the vocabulary is not that of such a folder.
    """
    from transformers import M2M100Config, M2M100ForConditionalGeneration

    config = model.config
    refuse_what_m2m100_lacks(config)
    if not isinstance(vocabulary, M2M100Vocabulary):
        raise UserError("M2M100ForConditionalGeneration needs the vocabulary of M2M100 or NLLB: use --to ctranslate2")
    ids, entries = vocabulary.their_ids[0], ours_of(vocabulary.their_ids[0])
    theirs = M2M100ForConditionalGeneration(
        M2M100Config(
            vocab_size=len(entries),
            **network_of(config),
            encoder_layerdrop=0.0,
            decoder_layerdrop=0.0,
            pad_token_id=ids[PAD_ID],
            bos_token_id=ids[BOS_ID],
            eos_token_id=ids[EOS_ID],
            decoder_start_token_id=ids[EOS_ID],
        )
    )
    theirs.load_state_dict(theirs.state_dict() | weights_with([entries, entries], entries, model))
    return theirs


def m2m100_tokenizer_files(vocabulary: M2M100Vocabulary, direction: Direction) -> dict[str, str | bytes]:
    """Return the files of the tokenizer as they came; only the languages that it begins with may be other ones."""
    config = json.loads(vocabulary.files[TOKENIZER_CONFIG_FILE])
    languages = {name: code.strip("_") for name, code in zip(("src_lang", "tgt_lang"), direction.tags, strict=True)}
    if languages.items() <= config.items():
        return {**vocabulary.files}
    return {**vocabulary.files, TOKENIZER_CONFIG_FILE: json.dumps(config | languages, indent=2) + "\n"}
