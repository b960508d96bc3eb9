"""A folder for `AutoModelForSeq2SeqLM` and `AutoTokenizer` of `transformers`, and the model loaded from it."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch

from dist_transformer.base.errors import UserError
from dist_transformer.base.files import write_file
from dist_transformer.config.settings import ModelConfig
from dist_transformer.data.vocabulary.tokenizer import BOS_ID, PAD_ID, UNK_ID, Vocabulary
from dist_transformer.export.marian import Numbering, Numberings, marian_model, numberings_of
from dist_transformer.export.peer import LENGTH_PENALTY, IdPair, in_batches
from dist_transformer.export.sentencepiece_files import SOURCE_FILE, language_code, marian_tokenizer_files
from dist_transformer.export.tokenizer_files import CONFIG_FILE, tokenizer_config, whole_tokenizer
from dist_transformer.model.transformer import Transformer
from dist_transformer.model_folder import TOKENIZER_FILE, ModelInfo

GENERATION_FILE = "generation_config.json"
BEAM_SIZE = 4

# By default, prepared pairs have at most 256 tokens per side, so the model has not learned longer outputs.
_LONGEST_OUTPUT = 256
# Target tokens whose logits are held at once: 119 MB for 58,101 entries, and two times that while they are read.
_LOGIT_ROWS = 512


def longest_output(max_positions: int) -> int:
    """Return the most tokens per output; `<s>` takes one position."""
    return min(max_positions - 1, _LONGEST_OUTPUT)


def write_huggingface(folder: Path, model: Transformer, tokenizer: Vocabulary, info: ModelInfo) -> None:
    """Fill `folder`, except for the file of `write_generation_config`.

    Args:
        info: of one direction.

    Raises:
        UserError: `MarianMTModel` does not support the model.
    """
    marian = marian_model(model, numberings_of(tokenizer, model.config))
    _quiet()
    marian.save_pretrained(folder)
    if tokenizer.source.library == tokenizer.target.library == "sentencepiece":
        for name, content in marian_tokenizer_files(tokenizer, info).items():
            write_file(folder / name, content)
    elif tokenizer.sizes[1]:
        raise UserError(
            "transformers has no tokenizer for two vocabularies, unless both are of SentencePiece: export it with "
            "--to ctranslate2"
        )
    else:
        write_file(folder / TOKENIZER_FILE, whole_tokenizer(tokenizer.source, info.direction.tags, knows_specials=True))
        write_file(folder / CONFIG_FILE, tokenizer_config(model.config.max_positions))


def write_generation_config(folder: Path, tokenizer: Vocabulary, config: ModelConfig) -> None:
    """Write the default search settings of `generate`."""
    ids = numberings_of(tokenizer, config)[1]
    never = {PAD_ID, UNK_ID, BOS_ID, *tokenizer.target.tag_ids(tokenizer.target.tags)}
    settings = {
        "num_beams": BEAM_SIZE,
        "length_penalty": LENGTH_PENALTY,
        "max_new_tokens": longest_output(config.max_positions),
        # The search continues until no unfinished hypothesis can become the best one.
        "early_stopping": "never",
        "suppress_tokens": sorted({*ids.of([*never])}),
        "decoder_start_token_id": ids.begin,
        "bos_token_id": ids.begin,
        "eos_token_id": ids.end,
        "pad_token_id": ids.pad,
    }
    write_file(folder / GENERATION_FILE, json.dumps(settings, indent=2) + "\n")


class HuggingFacePeer:
    """An exported folder, loaded with `transformers` as by a user."""

    precision = "float32"

    def __init__(
        self, folder: Path, device: torch.device, tags: Sequence[str] = (), *, numberings: Numberings | None = None
    ) -> None:
        """Load the folder.

        Args:
            tags: tags in front of every source.
            numberings: ids of the folder, from and to which ours are converted; None: they are the same.
        """
        from transformers import AutoTokenizer

        _quiet()
        self.is_marian = (folder / SOURCE_FILE).exists()
        # A MarianTokenizer reads the tag in the text; the other one adds tags itself.
        self.front = language_code(*tags) if self.is_marian else ""
        self.tokenizer: Any = AutoTokenizer.from_pretrained(folder)
        self.model: Any = _load(folder).to(device).eval()
        config = self.model.config
        self.begin, self.end = config.decoder_start_token_id, config.eos_token_id
        self.numberings = numberings or (
            Numbering(range(config.vocab_size)),
            Numbering(range(config.decoder_vocab_size)),
        )
        self.ours = [numbering.ours() for numbering in self.numberings]
        self.never: list[int] = []
        """Tokens that greedy search does not choose, beside those of the folder's settings."""

    def reads(self, text: str) -> bool:
        # A MarianTokenizer takes `>>de<<` at the beginning for a tag, and no table of SentencePiece removes U+0000.
        return not (self.is_marian and (text.startswith(">>") or "\0" in text))

    def encode(self, lines: Sequence[str]) -> list[list[int]]:
        rows = self.tokenizer([self.front + line for line in lines], verbose=False)["input_ids"]
        return [[self.ours[0][token] for token in row] for row in rows]

    def decode(self, ids: Sequence[Sequence[int]]) -> list[str]:
        rows = [self.numberings[1].of(row) for row in ids]
        return cast(list[str], self.tokenizer.batch_decode(rows, skip_special_tokens=True))

    @torch.inference_mode()
    def log_probabilities(self, pairs: Sequence[IdPair]) -> list[np.ndarray]:
        found = [np.empty(0)] * len(pairs)
        for places in in_batches([max(map(len, pair)) + 1 for pair in pairs], _LOGIT_ROWS):
            sources, outputs = (
                [numbering.of(pairs[i][side]) for i in places] for side, numbering in enumerate(self.numberings)
            )
            tokens, mask = self._padded([[*row, self.end] for row in sources], side=0)
            targets, target_mask = self._padded([[self.begin, *row] for row in outputs], side=1)
            labels, _ = self._padded([[*row, self.end] for row in outputs], side=1)
            logits = self.model(
                input_ids=tokens, attention_mask=mask, decoder_input_ids=targets, decoder_attention_mask=target_mask
            ).logits
            values = (logits.gather(2, labels[:, :, None])[:, :, 0] - logits.logsumexp(2)).cpu().numpy()
            for row, i in enumerate(places):
                found[i] = values[row, : len(pairs[i][1]) + 1]
        return found

    @torch.inference_mode()
    def greedy(self, sources: Sequence[list[int]], longest: int) -> list[list[int]]:
        found: list[list[int]] = [[] for _ in sources]
        for places in in_batches([len(source) for source in sources]):
            tokens, mask = self._padded([[*self.numberings[0].of(sources[i]), self.end] for i in places], side=0)
            rows = self.model.generate(
                input_ids=tokens,
                attention_mask=mask,
                max_new_tokens=longest,
                num_beams=1,
                **({"suppress_tokens": [*self.never, self.numberings[1].pad]} if self.never else {}),
                # These settings are for beams only.
                early_stopping=False,
                length_penalty=1.0,
            ).tolist()
            for i, row in zip(places, rows, strict=True):
                end = row.index(self.end) if self.end in row else len(row)
                found[i] = [self.ours[1][token] for token in row[1:end]]
        return found

    @torch.inference_mode()
    def translate(self, lines: Sequence[str]) -> list[str]:
        texts = [""] * len(lines)
        for places in in_batches([len(line) for line in lines]):
            texts_in = [self.front + lines[i] for i in places]
            inputs = self.tokenizer(texts_in, padding=True, return_tensors="pt").to(self.model.device)
            rows = self.model.generate(**inputs)
            for i, text in zip(places, self.tokenizer.batch_decode(rows, skip_special_tokens=True), strict=True):
                texts[i] = text
        return texts

    def _padded(self, sentences: list[list[int]], *, side: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Pad sentences; return ids and mask."""
        longest, pad = max(map(len, sentences)), self.numberings[side].pad
        tokens = torch.tensor([row + [pad] * (longest - len(row)) for row in sentences])
        mask = torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in sentences])
        return tokens.to(self.model.device), mask.to(self.model.device)


def _load(folder: Path) -> Any:
    """Load a model in fp32.

    Raises:
        UserError: its weights are missing or damaged, or are not those of its config.json.
    """
    from transformers import AutoModelForSeq2SeqLM
    from transformers.utils import logging

    verbosity = logging.get_verbosity()
    # It reports what this function raises.
    logging.set_verbosity(logging.CRITICAL)
    try:
        model, found = AutoModelForSeq2SeqLM.from_pretrained(
            folder, dtype=torch.float32, output_loading_info=True, ignore_mismatched_sizes=True
        )
    # Each format of weights has errors of its own.
    except Exception as error:
        if type(error).__name__ == "UnpicklingError":
            raise UserError(f"{folder} has weights that hold more than tensors: nothing of them was run") from None
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise UserError(f"transformers cannot load {folder} ({reason:.200}): pass the whole folder") from None
    finally:
        logging.set_verbosity(verbosity)
    for problem in ("missing", "unexpected", "mismatched"):
        # Those with another shape come with both shapes.
        if names := sorted(key if isinstance(key, str) else key[0] for key in found[f"{problem}_keys"]):
            raise UserError(
                f"{folder} has weights that do not fit its config.json ({problem}: {names[0]}): pass the whole folder"
            )
    return model


def _quiet() -> None:
    """Disable the library's progress bars."""
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
