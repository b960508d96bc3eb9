"""A folder for `AutoModelForSeq2SeqLM` and `AutoTokenizer` of `transformers`, and the model loaded from it."""

import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import torch
from torch.nn.utils.rnn import pad_sequence

from dist_transformer.base.errors import UserError
from dist_transformer.base.files import write_file
from dist_transformer.config.settings import ModelConfig
from dist_transformer.data.vocabulary.tokenizer import BOS_ID, EOS_ID, PAD_ID, UNK_ID, Vocabulary
from dist_transformer.export.libraries import BEAM_SIZE, LENGTH_PENALTY, IdPair, in_batches, longest_output
from dist_transformer.export.marian import ids_of, marian_model, ours_of
from dist_transformer.export.tokenizer_files import SOURCE_FILE, language_code, transformers_files
from dist_transformer.model.transformer import Transformer
from dist_transformer.model_folder import ModelInfo

# Target tokens whose logits are in memory at once: 119 MB for 58,101 entries, and twice that while they are read.
_LOGIT_ROWS = 512


def write_huggingface(folder: Path, model: Transformer, tokenizer: Vocabulary, info: ModelInfo) -> None:
    """Fill `folder` with the model, its tokenizer and the settings of its search.

    Args:
        info: of one direction.

    Raises:
        UserError: `MarianMTModel` does not support the model.
    """
    ids = ids_of(tokenizer, model.config)
    marian = marian_model(model, tokenizer)
    _quiet()
    marian.save_pretrained(folder)
    search = {
        "num_beams": BEAM_SIZE,
        "length_penalty": LENGTH_PENALTY,
        "max_new_tokens": longest_output(model.config.max_positions),
        # The search continues until no unfinished hypothesis can become the best one.
        "early_stopping": "never",
        "suppress_tokens": never_chosen(tokenizer, model.config),
        "decoder_start_token_id": ids[1][BOS_ID],
        "bos_token_id": ids[1][BOS_ID],
        "eos_token_id": ids[1][EOS_ID],
        "pad_token_id": ids[1][PAD_ID],
    }
    write_file(folder / "generation_config.json", json.dumps(search, indent=2) + "\n")
    for name, content in transformers_files(tokenizer, info).items():
        write_file(folder / name, content)


def never_chosen(tokenizer: Vocabulary, config: ModelConfig) -> list[int]:
    """Return the ids in a folder of the tokens that no search chooses."""
    tokens = (PAD_ID, UNK_ID, BOS_ID, *tokenizer.target.tag_ids(tokenizer.target.tags))
    return sorted({ids_of(tokenizer, config)[1][token] for token in tokens})


class HuggingFacePeer:
    """A folder, loaded with `transformers` as by a user."""

    precision = "float32"

    def __init__(self, folder: Path, device: torch.device, tokenizer: Vocabulary, info: ModelInfo) -> None:
        """Load the folder.

        Args:
            tokenizer: ours, by which its ids are converted.
            info: of one direction.
        """
        from transformers import AutoTokenizer

        _quiet()
        self.is_marian = (folder / SOURCE_FILE).exists()
        # A MarianTokenizer reads the tag in the text; the other one adds tags itself.
        self.front = language_code(*info.direction.tags) if self.is_marian else ""
        self.tokenizer: Any = AutoTokenizer.from_pretrained(folder)
        self.model: Any = _load(folder).to(device).eval()
        self.ids = ids_of(tokenizer, info.model)
        self.ours = [ours_of(side) for side in self.ids]

    def reads(self, text: str) -> bool:
        # A MarianTokenizer takes `>>de<<` at the beginning for a tag, and no table of SentencePiece removes U+0000.
        return not (self.is_marian and (text.startswith(">>") or "\0" in text))

    def encode(self, lines: Sequence[str]) -> list[list[int]]:
        rows = self.tokenizer([self.front + line for line in lines], verbose=False)["input_ids"]
        return [[self.ours[0][token] for token in row] for row in rows]

    def decode(self, ids: Sequence[Sequence[int]]) -> list[str]:
        rows = [[self.ids[1][token] for token in row] for row in ids]
        return cast(list[str], self.tokenizer.batch_decode(rows, skip_special_tokens=True))

    def log_probabilities(self, pairs: Sequence[IdPair]) -> list[list[float]]:
        lengths = [max(map(len, pair)) + 1 for pair in pairs]
        return in_batches(self._score, pairs, lengths, tokens=_LOGIT_ROWS)

    @torch.inference_mode()
    def _score(self, pairs: Sequence[IdPair]) -> list[list[float]]:
        targets = self._padded([[BOS_ID, *target, EOS_ID] for _, target in pairs], side=1)
        # Padding follows the tokens, so these do not attend to it.
        inputs = self._inputs([source for source, _ in pairs])
        logits = self.model(**inputs, decoder_input_ids=targets[:, :-1]).logits
        values = logits.gather(2, targets[:, 1:, None])[:, :, 0] - logits.logsumexp(2)
        return [row[: len(target) + 1] for row, (_, target) in zip(values.tolist(), pairs, strict=True)]

    @torch.inference_mode()
    def greedy(self, sources: Sequence[list[int]], longest: int) -> list[list[int]]:
        # The length penalty and this way of stopping are for beams only.
        search = {"num_beams": 1, "early_stopping": False, "length_penalty": 1.0}
        rows = self.model.generate(**self._inputs(sources), max_new_tokens=longest, **search).tolist()
        ended = (itertools.takewhile(lambda token: token != self.ids[1][EOS_ID], row[1:]) for row in rows)
        return [[self.ours[1][token] for token in row] for row in ended]

    @torch.inference_mode()
    def translate(self, lines: Sequence[str]) -> list[str]:
        inputs = self.tokenizer([self.front + line for line in lines], padding=True, return_tensors="pt")
        rows = self.model.generate(**inputs.to(self.model.device))
        return cast(list[str], self.tokenizer.batch_decode(rows, skip_special_tokens=True))

    def _inputs(self, sources: Sequence[list[int]]) -> dict[str, torch.Tensor]:
        tokens = self._padded([[*source, EOS_ID] for source in sources], side=0)
        return {"input_ids": tokens, "attention_mask": tokens.ne(self.ids[0][PAD_ID]).long()}

    def _padded(self, sentences: list[list[int]], *, side: int) -> torch.Tensor:
        """Convert sentences to ids of the folder, and pad them on the right."""
        rows = [torch.tensor([self.ids[side][token] for token in sentence]) for sentence in sentences]
        padded = pad_sequence(rows, batch_first=True, padding_value=self.ids[side][PAD_ID])
        return cast(torch.Tensor, padded.to(self.model.device))


def _load(folder: Path) -> Any:
    """Load a model in fp32.

    Raises:
        UserError: its weights are missing or damaged, or are not those of its config.json.
    """
    from transformers import AutoModelForSeq2SeqLM

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
    for problem in ("missing", "unexpected", "mismatched"):
        # Those with another shape come with both shapes.
        if names := sorted(key if isinstance(key, str) else key[0] for key in found[f"{problem}_keys"]):
            raise UserError(
                f"{folder} has weights that do not fit its config.json ({problem}: {names[0]}): pass the whole folder"
            )
    return model


def _quiet() -> None:
    """Disable the library's progress bars, and its reports of what is an error here."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity(logging.CRITICAL)
