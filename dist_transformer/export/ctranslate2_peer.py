"""A folder that CTranslate2 loads, with its tokenizer, and the model loaded from it."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer as Backend

from dist_transformer.base.files import write_file
from dist_transformer.data.vocabulary.tokenizer import EOS_ID, Tokenizer, Vocabulary
from dist_transformer.export.ctranslate2 import Pieces, save_for_ctranslate2, translate_ids
from dist_transformer.export.peer import LENGTH_PENALTY, SENTENCES, IdPair
from dist_transformer.export.sentencepiece_files import MODEL_FILE, PieceTokenizer
from dist_transformer.export.tokenizer_files import whole_tokenizer
from dist_transformer.model.transformer import Transformer
from dist_transformer.model_folder import TOKENIZER_FILE

TARGET = "target_"
"""Beginning of the names of the targets' files, if they have a vocabulary of their own."""
_VOCABULARY_FILE = "{}_vocabulary.json"
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
    pieces = (tokenizer.source.pieces, tokenizer.target.pieces)
    save_for_ctranslate2(model, pieces, folder, quantization=quantization)
    _write_side(folder, tokenizer.source, "", tags)
    if tokenizer.sizes[1]:
        _write_side(folder, tokenizer.target, TARGET, ())


def _write_side(folder: Path, side: Tokenizer, name: str, tags: Sequence[str]) -> None:
    """Write the tokenizer of one side; `name` is the beginning of its file's name."""
    if side.library == "sentencepiece":
        write_file(folder / f"{name}{MODEL_FILE}", side.library_file)
    else:
        write_file(folder / f"{name}{TOKENIZER_FILE}", whole_tokenizer(side, tags, knows_specials=False))


class _WholeTokenizer:
    """A tokenizer.json that holds all rules, read by `tokenizers`."""

    def __init__(self, file: Path) -> None:
        self._backend = Backend.from_file(str(file))

    def encode(self, lines: Sequence[str]) -> list[list[int]]:
        return [row.ids for row in self._backend.encode_batch(list(lines))]

    def decode(self, ids: Sequence[Sequence[int]]) -> list[str]:
        return [self._backend.decode(list(row)) for row in ids]


def _open_side(
    folder: Path, name: str, pieces: Sequence[str], front: Sequence[str] = ()
) -> _WholeTokenizer | PieceTokenizer:
    model = folder / f"{name}{MODEL_FILE}"
    if model.exists():
        return PieceTokenizer(str(model), pieces, front)
    return _WholeTokenizer(folder / f"{name}{TOKENIZER_FILE}")


def _pieces(folder: Path) -> Pieces:
    """Read the library's own files of the vocabularies: one if both are the same."""
    shared = folder / _VOCABULARY_FILE.format("shared")
    files = [shared] if shared.exists() else [folder / _VOCABULARY_FILE.format(side) for side in ("source", "target")]
    found: list[list[str]] = [json.loads(file.read_bytes()) for file in files]
    return found[0], found[-1]


class CTranslate2Peer:
    """An exported folder, loaded with `ctranslate2` and the library of its tokenizer as by a user."""

    def __init__(
        self,
        folder: Path,
        device: torch.device,
        *,
        longest: int,
        tags: Sequence[str] = (),
        front: Sequence[str] = (),
    ) -> None:
        """Load the folder.

        Args:
            longest: most tokens per output.
            tags: tags of the vocabulary, which are never part of an output.
            front: tags in front of every source.
        """
        import ctranslate2

        self.longest = longest
        self.tags = tags
        self.pieces = _pieces(folder)
        self.reads_nul = not (folder / MODEL_FILE).exists()
        self.tokenizer = _open_side(folder, "", self.pieces[0], front)
        has_two = any((folder / f"{TARGET}{name}").exists() for name in (MODEL_FILE, TOKENIZER_FILE))
        self.detokenizer = _open_side(folder, TARGET, self.pieces[1]) if has_two else self.tokenizer
        self.translator: Any = ctranslate2.Translator(
            str(folder), device=device.type, device_index=device.index or 0, intra_threads=torch.get_num_threads()
        )

    @property
    def precision(self) -> str:
        return str(self.translator.compute_type)

    def reads(self, text: str) -> bool:
        return self.reads_nul or "\0" not in text

    def encode(self, lines: Sequence[str]) -> list[list[int]]:
        return self.tokenizer.encode(lines)

    def decode(self, ids: Sequence[Sequence[int]]) -> list[str]:
        return self.detokenizer.decode(ids)

    def log_probabilities(self, pairs: Sequence[IdPair]) -> list[np.ndarray]:
        found = self.translator.score_batch(
            [[self.pieces[0][token] for token in (*source, EOS_ID)] for source, _ in pairs],
            [[self.pieces[1][token] for token in target] for _, target in pairs],
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

    def translate(self, lines: Sequence[str]) -> list[str]:
        found = translate_ids(
            self.translator,
            self.pieces,
            # Without </s>, which `translate_ids` adds.
            [ids[:-1] for ids in self.encode(lines)],
            beam_size=BEAM_SIZE,
            length_penalty=LENGTH_PENALTY,
            longest=self.longest,
            patience=PATIENCE,
            tags=self.tags,
        )
        return self.decode(found)
