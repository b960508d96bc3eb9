"""A model folder, loaded: translate, score and look at attention from Python."""

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import overload

import torch

from dist_transformer.data.tokenizer import Tokenizer
from dist_transformer.errors import UserError
from dist_transformer.inference.attention_maps import attention_maps
from dist_transformer.inference.beam import BeamSettings
from dist_transformer.inference.options import as_dtype
from dist_transformer.inference.pieces import BEGIN, readable_pieces
from dist_transformer.inference.scoring import PairScore, longest_line, score_pairs
from dist_transformer.inference.translator import ScoredText, Translator
from dist_transformer.model.products import Products
from dist_transformer.model.transformer import Transformer
from dist_transformer.model_folder import ModelInfo, load_model
from dist_transformer.runtime.device import find_device


@dataclass(frozen=True, kw_only=True, slots=True)
class Attention:
    """softmax(Q Kᵀ / √d_k) of every layer and head, fp32 on the CPU; every row sums to 1.

    L layers, H heads, S = len(source) pieces, T = len(target) pieces; both end with `</s>`.
    """

    source: list[str]
    """Pieces of the source as a reader knows them: a space is `▁`."""
    target: list[str]
    """Row i of `decoder` and `cross` is the step that makes `target[i]`."""
    seen: list[str]
    """Columns of `decoder`: what its steps have seen, `<s>` first."""
    encoder: torch.Tensor
    """Self-attention of the encoder, shape (L, H, S, S)."""
    decoder: torch.Tensor
    """Self-attention of the decoder, shape (L, H, T, T): zero above the diagonal."""
    cross: torch.Tensor
    """What each step looks at in the source, shape (L, H, T, S)."""


@dataclass(frozen=True, slots=True)
class TrainedModel:
    """A model in memory; `dist_transformer.load` makes it."""

    model: Transformer
    tokenizer: Tokenizer
    info: ModelInfo
    device: torch.device
    _products: Products = field(default_factory=Products, init=False, repr=False, compare=False)

    @classmethod
    def load(
        cls,
        path: str | os.PathLike[str],
        *,
        device: str | None = None,
        precision: str = "fp32",
        direction: str | None = None,
        tags: Sequence[str] | None = None,
    ) -> "TrainedModel":
        """Load a model folder.

        Args:
            path: what `average` wrote.
            device: `cpu`, `cuda` or `cuda:N`; not given: a GPU where there is one.
            precision: `fp32` or `bf16`.
            direction: such as `en-de`; needed where the model has several.
            tags: in front of every source, in place of the direction's.

        Raises:
            UserError: the folder is no sound model, the device cannot be used, or there is no such direction.
        """
        where = find_device(device)
        model, tokenizer, info = load_model(Path(path), where, as_dtype(precision))
        return cls(model, tokenizer, info.facing(direction, tags), where)

    # A text is a sequence of texts, too: the first that fits is meant.
    @overload
    def translate(  # type: ignore[overload-overlap]
        self,
        lines: str,
        *,
        beam: int = ...,
        nbest: None = ...,
        length_penalty: float = ...,
        max_extra_tokens: int = ...,
        batch_tokens: int | None = ...,
    ) -> str: ...

    @overload
    def translate(
        self,
        lines: Sequence[str],
        *,
        beam: int = ...,
        nbest: None = ...,
        length_penalty: float = ...,
        max_extra_tokens: int = ...,
        batch_tokens: int | None = ...,
    ) -> list[str]: ...

    @overload
    def translate(
        self,
        lines: Sequence[str],
        *,
        beam: int = ...,
        nbest: int,
        length_penalty: float = ...,
        max_extra_tokens: int = ...,
        batch_tokens: int | None = ...,
    ) -> list[list[ScoredText]]: ...

    def translate(
        self,
        lines: str | Sequence[str],
        *,
        beam: int = 4,
        nbest: int | None = None,
        length_penalty: float = 0.6,
        max_extra_tokens: int = 50,
        batch_tokens: int | None = None,
    ) -> str | list[str] | list[list[ScoredText]]:
        """Translate lines by beam search, as the command `translate` does.

        Args:
            lines: one line gives one text, several lines a list; a blank line gives a blank one.
            beam: hypotheses in search; 1 is greedy.
            nbest: give the best `nbest` of each line, best first, with their scores: log p / ((5 + length) / 6) to the
                power of `length_penalty`.
            max_extra_tokens: an output has at most so many tokens more than its source.
            batch_tokens: padded source tokens of a batch times beam; a default for the device when not given.

        Raises:
            UserError: a setting out of range, or weights that are not finite.
        """
        settings = BeamSettings(
            beam_size=beam,
            length_penalty=length_penalty,
            max_extra_tokens=max_extra_tokens,
            nbest=1 if nbest is None else nbest,
        )
        tags = self.info.direction.tags
        translator = Translator(
            self.model,
            self.tokenizer,
            self.device,
            settings,
            tags=tags,
            max_batch_tokens=batch_tokens,
            products=self._products,
        )
        translations = translator.translate([lines] if isinstance(lines, str) else lines)
        if nbest is not None:
            return [list(translation.hypotheses) for translation in translations]
        texts = [translation.text for translation in translations]
        return texts[0] if isinstance(lines, str) else texts

    def score(self, src: Sequence[str], tgt: Sequence[str], *, batch_tokens: int | None = None) -> list[PairScore]:
        """Give log p(tgt[i] | src[i]), the sum and each token's, in natural logarithms.

        Raises:
            UserError: the lists differ in length, or a line has more tokens than the model has room for.
        """
        _refuse_text(src=src, tgt=tgt)
        if len(src) != len(tgt):
            raise UserError(f"src has {len(src):,} lines and tgt {len(tgt):,}: give as many")
        return score_pairs(
            self.model,
            self.tokenizer,
            src,
            tgt,
            device=self.device,
            tags=self.info.direction.tags,
            max_batch_tokens=batch_tokens,
        )

    def attention(self, src: str, tgt: str) -> Attention:
        """Give the attention of every layer and head while the model reads `src` and makes `tgt`.

        Raises:
            UserError: a sentence has more tokens than the model has room for.
        """
        source = [*self.tokenizer.tag_ids(self.info.direction.tags), *self.tokenizer.encode(src)]
        target = self.tokenizer.encode(tgt)
        longest = longest_line(self.model)
        if max(len(source), len(target)) > longest:
            raise UserError(f"the model has room for {longest:,} tokens of each sentence: give shorter ones")
        maps = attention_maps(self.model, source, target)
        target_pieces = readable_pieces(self.tokenizer, target)
        return Attention(
            source=readable_pieces(self.tokenizer, source),
            target=target_pieces,
            seen=[BEGIN, *target_pieces[:-1]],
            encoder=maps.encoder_LHSS,
            decoder=maps.decoder_LHTT,
            cross=maps.cross_LHTS,
        )


def _refuse_text(**arguments: object) -> None:
    """A text is a sequence of texts to Python, each of one character."""
    for name, value in arguments.items():
        if isinstance(value, str):
            raise UserError(f"{name} is a text: give a list of lines")
