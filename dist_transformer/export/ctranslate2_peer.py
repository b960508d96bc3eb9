"""A folder that CTranslate2 loads, with its tokenizer, and the model loaded from it."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer as Backend

from dist_transformer.base.files import write_file
from dist_transformer.data.vocabulary.tokenizer import EOS_ID, Vocabulary
from dist_transformer.export.ctranslate2 import save_for_ctranslate2, translate_ids
from dist_transformer.export.peer import SENTENCES, IdPair
from dist_transformer.export.tokenizer_files import source_tokenizer
from dist_transformer.model.transformer import Transformer
from dist_transformer.model_folder import TOKENIZER_FILE

BEAM_SIZE = 4
PATIENCE = 2
"""Factor on the beam size. With 1, the search ends with the fourth finished hypothesis, though others may be better."""


def write_ctranslate2(
    folder: Path,
    model: Transformer,
    tokenizer: Vocabulary,
    tags: Sequence[str],
    *,
    quantization: str | None = None,
) -> None:
    """Fill `folder` with the model and its tokenizer.

    Args:
        tags: tags in front of every source.

    Raises:
        UserError: CTranslate2 does not support the model.
    """
    save_for_ctranslate2(model, tokenizer.source.pieces, folder, quantization=quantization)
    write_file(folder / TOKENIZER_FILE, source_tokenizer(tokenizer, tags, knows_specials=False))


class CTranslate2Peer:
    """An exported folder, loaded with `ctranslate2` and `tokenizers` as by a user."""

    def __init__(self, folder: Path, device: torch.device, *, longest: int, tags: Sequence[str] = ()) -> None:
        """Load the folder.

        Args:
            longest: most tokens per output.
            tags: tags of the vocabulary, which are never part of an output.
        """
        import ctranslate2

        self.longest = longest
        self.tags = tags
        self.tokenizer = Backend.from_file(str(folder / TOKENIZER_FILE))
        vocabulary = self.tokenizer.get_vocab(with_added_tokens=True)
        self.pieces = sorted(vocabulary, key=lambda piece: vocabulary[piece])
        self.translator: Any = ctranslate2.Translator(
            str(folder), device=device.type, device_index=device.index or 0, intra_threads=torch.get_num_threads()
        )

    @property
    def precision(self) -> str:
        return str(self.translator.compute_type)

    def encode(self, lines: Sequence[str]) -> list[list[int]]:
        return [row.ids for row in self.tokenizer.encode_batch(list(lines))]

    def decode(self, ids: Sequence[Sequence[int]]) -> list[str]:
        return [self.tokenizer.decode(list(row)) for row in ids]

    def log_probabilities(self, pairs: Sequence[IdPair]) -> list[np.ndarray]:
        found = self.translator.score_batch(
            [[self.pieces[token] for token in (*source, EOS_ID)] for source, _ in pairs],
            [[self.pieces[token] for token in target] for _, target in pairs],
            max_batch_size=SENTENCES,
            max_input_length=0,
        )
        return [np.array(result.log_probs) for result in found]

    def greedy(self, sources: Sequence[list[int]], longest: int) -> list[list[int]]:
        return translate_ids(
            self.translator,
            self.pieces,
            sources,
            beam_size=1,
            length_penalty=0.0,
            longest=longest,
            tags=self.tags,
        )

    def translate(self, lines: Sequence[str], length_penalty: float) -> list[str]:
        found = translate_ids(
            self.translator,
            self.pieces,
            # Without </s>, which `translate_ids` adds.
            [ids[:-1] for ids in self.encode(lines)],
            beam_size=BEAM_SIZE,
            length_penalty=length_penalty,
            longest=self.longest,
            patience=PATIENCE,
            tags=self.tags,
        )
        return self.decode(found)
