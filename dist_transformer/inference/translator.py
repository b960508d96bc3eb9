"""Lines of text to lines of text: tokens, batches of similar length, beam search, text; alone or dealt over ranks."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from dist_transformer.data.tokenizer import Tokenizer
from dist_transformer.distributed import gather_objects, on_all_ranks, rank, world_size
from dist_transformer.errors import UserError
from dist_transformer.inference.batches import Batch, make_batches
from dist_transformer.inference.beam import BeamSettings, beam_search
from dist_transformer.model.transformer import Transformer

# Padded source tokens times beam size. CPU: `base` in fp32 decodes 5.5, 5.6 and 5.9 sentences a CPU second at 4,096,
# 8,192 and 16,384, where outputs as long as their sources take 0.4 GB. CUDA, by calculation: 2,048 hypotheses of
# sentences of up to 31 tokens, for which `base` in bf16 keeps 2.3 GB, and 0.8 GB for the probabilities of 37k words.
BATCH_TOKENS = {"cpu": 16384, "cuda": 65536}
# Whether the next sentence begins where one is done. On a CPU that took 1.5 times as long as steps that get smaller:
# all of them attend to the room of the longest.
_REFILLS = {"cpu": False, "cuda": True}


@dataclass(frozen=True, kw_only=True, slots=True)
class ScoredText:
    text: str
    """One line: line breaks are spaces."""
    score: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Refusal:
    """A line that was too long to translate."""

    line: int
    """Counted from 1."""
    tokens: int
    limit: int
    """Longest source that is translated, in tokens."""

    def __str__(self) -> str:
        return (
            f"line {self.line} has {self.tokens} tokens and the limit is {self.limit}: "
            "its translation is empty, split the line"
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Translation:
    """Of one line; a blank or refused line has one empty hypothesis."""

    hypotheses: tuple[ScoredText, ...]
    """Best first, at least one."""
    refusal: Refusal | None = None

    @property
    def text(self) -> str:
        return self.hypotheses[0].text


_EMPTY = (ScoredText(text="", score=0.0),)


class Translator:
    """Translates with one model.

    Batches are formed from the whole input, sorted by length, so the same lines give the same batches in any order and
    on any number of ranks.

    Args:
        max_batch_tokens: padded source tokens of the sentences in search at a time, times beam size; a default for the
            device when not given.
        max_source_tokens: longer lines are refused; when not given, what leaves positions for an output of
            max_extra_tokens more, and half of the positions at least.
    """

    def __init__(
        self,
        model: Transformer,
        tokenizer: Tokenizer,
        device: torch.device,
        settings: BeamSettings,
        *,
        max_batch_tokens: int | None = None,
        max_source_tokens: int | None = None,
    ) -> None:
        # The source's `</s>` and the target's `<s>` take a position.
        positions = model.config.max_positions - 1
        self.model, self.tokenizer, self.settings = model.to(device), tokenizer, settings
        self.refills = _REFILLS[device.type]
        self.max_batch_tokens = BATCH_TOKENS[device.type] if max_batch_tokens is None else max_batch_tokens
        default = max(positions - settings.max_extra_tokens, (positions + 1) // 2)
        self.max_source_tokens = default if max_source_tokens is None else max_source_tokens
        if self.max_batch_tokens < 1:
            raise UserError(f"max_batch_tokens is {self.max_batch_tokens}: give a number above 0")
        if not 1 <= self.max_source_tokens <= positions:
            raise UserError(
                f"max_source_tokens is {self.max_source_tokens}: "
                f"give 1 to {positions:,}, for the model has {positions + 1:,} positions"
            )

    def translate(self, lines: Sequence[str]) -> list[Translation]:
        """A translation for each line, in order."""
        sources = self.tokenizer.encode_batch(list(lines))
        return self._assemble(lines, sources, self._decode(self.batches(lines, sources), sources))

    def translate_distributed(self, lines: Sequence[str]) -> list[Translation]:
        """The same on every rank, from the same lines on every rank; each rank decodes its share of the batches.

        Raises:
            UserError: on every rank, when decoding failed on one.
        """
        sources = self.tokenizer.encode_batch(list(lines))
        share = self.batches(lines, sources)[rank() :: world_size()]
        decoded = on_all_ranks(lambda: self._decode(share, sources))
        everything: dict[int, tuple[ScoredText, ...]] = {}
        for part in gather_objects(decoded):
            everything.update(part)
        return self._assemble(lines, sources, everything)

    def batches(self, lines: Sequence[str], sources: Sequence[Sequence[int]]) -> list[Batch]:
        """Of the lines to decode."""
        places = [i for i in range(len(lines)) if not _is_blank(lines[i]) and len(sources[i]) <= self.max_source_tokens]
        return make_batches(
            places, [len(source) + 1 for source in sources], beam_size=self.settings.beam_size,
            max_tokens=self.max_batch_tokens, refills=self.refills,
        )  # fmt: skip

    def _decode(self, batches: list[Batch], sources: Sequence[list[int]]) -> dict[int, tuple[ScoredText, ...]]:
        decoded = {}
        for batch in batches:
            try:
                found = beam_search(
                    self.model, [sources[i] for i in batch.places], settings=self.settings, slots=batch.slots
                )  # fmt: skip
            except torch.OutOfMemoryError:
                raise UserError(
                    f"the device has not enough memory for max_batch_tokens {self.max_batch_tokens}: give a lower one"
                ) from None
            for i, hypotheses in zip(batch.places, found, strict=True):
                texts = (_one_line(self.tokenizer.decode(hypothesis.tokens)) for hypothesis in hypotheses)
                decoded[i] = tuple(
                    ScoredText(text=text, score=hypothesis.score)
                    for text, hypothesis in zip(texts, hypotheses, strict=True)
                )
        return decoded

    def _assemble(
        self, lines: Sequence[str], sources: Sequence[list[int]], decoded: dict[int, tuple[ScoredText, ...]]
    ) -> list[Translation]:
        translations = []
        for i, source in enumerate(sources):
            refusal = None
            if len(source) > self.max_source_tokens and not _is_blank(lines[i]):
                refusal = Refusal(line=i + 1, tokens=len(source), limit=self.max_source_tokens)
            translations.append(Translation(hypotheses=decoded.get(i) or _EMPTY, refusal=refusal))
        return translations


def _is_blank(line: str) -> bool:
    return not line or line.isspace()


def _one_line(text: str) -> str:
    return " ".join(text.splitlines())
