"""Checks that an exported model gives the same outputs as ours; otherwise the export is not written.

They compare token ids, decoded texts, log-probabilities of given targets, greedy search and the BLEU of beam search, in
fp32, on the user's own text and on hostile strings. For a quantised model they compare BLEU.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from dist_transformer.base.checks import Check
from dist_transformer.data.vocabulary.tokenizer import BOS_ID, EOS_ID, PAD_ID, UNK_ID, Vocabulary
from dist_transformer.evaluation.bleu import Score, corpus_bleu
from dist_transformer.export.hostile import HOSTILE
from dist_transformer.export.peer import IdPair, Peer
from dist_transformer.inference.scoring import read_targets, score_ids
from dist_transformer.model.transformer import Transformer

LARGEST_DIFFERENCE = 1e-4
"""Largest difference between a token's log-probabilities in fp32."""
LEAST_IDENTICAL = 0.995
"""Least share of lines with the same greedy output; rounding can change a choice between almost equal tokens."""
BLEU_TOLERANCE = 0.2
QUANTISED_LOSS = 0.5
"""BLEU that a quantised model may lose."""

LENGTH_PENALTIES = (0.2, 0.4, 0.6)
"""Values of α to try. The libraries divide by length^α and we by ((5 + length) / 6)^0.6, so the best α is not 0.6.
For lengths of 10 to 100, an α of 0.4 to 0.57 gives the same ratios. With a higher α, `generate` searches longer: ten
times as long at 1 as at 0.2."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DevText:
    """Dev text, and our model's translations of it."""

    sources: list[str]
    references: list[str]
    outputs: list[str]
    """Beam search outputs of our model."""
    target_language: str
    lowercase: bool
    """Whether BLEU ignores case, because the model's text is lowercased."""

    def bleu(self, outputs: Sequence[str]) -> Score:
        return corpus_bleu(outputs, self.references, target_language=self.target_language, lowercase=self.lowercase)

    def identical(self, outputs: Sequence[str]) -> int:
        """Count the lines that are identical to ours."""
        return sum(ours == theirs for ours, theirs in zip(self.outputs, outputs, strict=True))


@dataclass(frozen=True, kw_only=True, slots=True)
class Search:
    """Beam search of an exported model on the dev text."""

    length_penalty: float
    outputs: list[str]
    bleu: Score
    tried: dict[float, float]
    """BLEU by length penalty."""


def tune(peer: Peer, dev: DevText, progress: Callable[[str], object]) -> Search:
    """Choose a length penalty for the exported model's beam search.

    It is the one with the highest BLEU within the tolerance of ours, or, if none is within it, with the BLEU closest to
    ours. Among equals, it is the one with more lines identical to ours.
    """
    ours = dev.bleu(dev.outputs).value
    found = []
    for penalty in LENGTH_PENALTIES:
        progress(f"their beam search, length penalty {penalty}")
        outputs = peer.translate(dev.sources, penalty)
        found.append((penalty, outputs, dev.bleu(outputs)))

    def worth(entry: tuple[float, list[str], Score]) -> tuple[float, float, int]:
        _, outputs, bleu = entry
        beyond = max(0.0, abs(bleu.value - ours) - BLEU_TOLERANCE)
        return -beyond, bleu.value, dev.identical(outputs)

    penalty, outputs, bleu = max(found, key=worth)
    tried = {penalty: bleu.value for penalty, _, bleu in found}
    return Search(length_penalty=penalty, outputs=outputs, bleu=bleu, tried=tried)


class Gate:
    """Checks of one exported model in fp32."""

    def __init__(
        self,
        model: Transformer,
        tokenizer: Vocabulary,
        peer: Peer,
        dev: DevText,
        *,
        longest: int,
        tags: Sequence[str] = (),
    ) -> None:
        """Encode the texts that the checks compare.

        Args:
            longest: most tokens per greedy output.
            tags: tags in front of every source.
        """
        self.model, self.tokenizer, self.peer, self.dev, self.longest = model, tokenizer, peer, dev, longest
        self.prefix = tokenizer.source.tag_ids(tags)
        room = model.config.max_positions - 1
        texts = [*dev.sources, *HOSTILE]
        # The target of each hostile string is the next one.
        targets = [*dev.references, *HOSTILE[1:], HOSTILE[0]]
        sides = (tokenizer.source.encode_batch(texts), tokenizer.target.encode_batch(targets))
        self.pairs: list[IdPair] = [
            ([*self.prefix, *source][:room], target[:room]) for source, target in zip(*sides, strict=True)
        ]
        self.texts = [*dev.sources, *dev.references, *HOSTILE]
        self.counted = f"{len(dev.sources):,} lines and {len(HOSTILE)} hostile strings"

    def token_ids(self) -> Check:
        ours = [[*self.prefix, *ids, EOS_ID] for ids in self.tokenizer.source.encode_batch(self.texts)]
        wrong = _differing(ours, self.peer.encode(self.texts))
        found = f"the same for {self.counted}"
        if wrong:
            found = f"different ids for {len(wrong):,} texts, the first: {_shown(self.texts[wrong[0]])}"
        return Check.that(not wrong, name="token ids", found=found)

    def decoding(self) -> Check:
        ids = self.tokenizer.source.encode_batch(self.texts)
        wrong = _differing([self.tokenizer.target.decode(row) for row in ids], self.peer.decode(ids))
        found = "the same text for all these ids"
        if wrong:
            found = f"different text for the ids of {len(wrong):,} texts, the first: {_shown(self.texts[wrong[0]])}"
        return Check.that(not wrong, name="decoding", found=found)

    def log_probabilities(self) -> Check:
        scores = score_ids(self.model, self.pairs, device=self.model.embedding.device)
        ours = [np.array(score.token_log_probabilities) for score in scores]
        theirs = self.peer.log_probabilities(self.pairs)
        if [len(row) for row in ours] != [len(row) for row in theirs]:
            return Check.that(False, name="log-probabilities", found="the numbers of tokens differ")
        worst = float(np.abs(np.concatenate(ours) - np.concatenate(theirs)).max())
        counted = f"of {sum(map(len, ours)):,} given target tokens"
        return Check.that(
            # NaN fails this comparison.
            worst <= LARGEST_DIFFERENCE,
            name="log-probabilities",
            found=f"those {counted} differ by at most {worst:.1e}; {LARGEST_DIFFERENCE:.0e} is allowed",
        )

    def greedy(self) -> Check:
        """Check greedy outputs: each of their tokens must be our most probable one after the tokens before it."""
        # Neither we nor CTranslate2 search for an empty text.
        sources = [source for source, _ in self.pairs if len(source) > len(self.prefix)]
        outputs = self.peer.greedy(sources, self.longest)
        pairs = list(zip(sources, outputs, strict=True))
        same = 0
        for output, choices in zip(outputs, self._choices(pairs), strict=True):
            # An output at the limit may not have ended.
            ended = [*output, EOS_ID] if len(output) < self.longest - 1 else output
            same += choices[: len(ended)] == ended
        return Check.that(
            same >= LEAST_IDENTICAL * len(pairs),
            name="greedy search",
            found=f"{same:,} of {len(pairs):,} outputs are identical; {LEAST_IDENTICAL:.1%} must be",
        )

    def _choices(self, pairs: Sequence[IdPair]) -> list[list[float]]:
        """Find our most probable token after each prefix of the targets, from the empty prefix on."""
        target = self.tokenizer.target
        never = [PAD_ID, UNK_ID, BOS_ID, *target.tag_ids(target.tags)]

        def read(logits_TV: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
            logits_TV[:, never] = -torch.inf
            return logits_TV.argmax(1)

        return read_targets(self.model, pairs, read, device=self.model.embedding.device)

    def beam(self, search: Search) -> Check:
        ours, theirs = self.dev.bleu(self.dev.outputs), search.bleu
        same = self.dev.identical(search.outputs)
        return Check.that(
            abs(ours.value - theirs.value) <= BLEU_TOLERANCE,
            name="beam search",
            found=f"{theirs.value:.2f} BLEU with length penalty {search.length_penalty}, ours {ours.value:.2f}; a "
            f"difference of {BLEU_TOLERANCE} is allowed; {same:,} of {len(self.dev.outputs):,} outputs are identical "
            f"({theirs.signature})",
        )


def quantised(dev: DevText, outputs: Sequence[str], *, quantization: str, precision: str) -> Check:
    """Check the BLEU of a quantised model."""
    ours, theirs = dev.bleu(dev.outputs), dev.bleu(outputs)
    loss = ours.value - theirs.value
    return Check.that(
        loss <= QUANTISED_LOSS,
        name=quantization,
        found=f"{theirs.value:.2f} BLEU, {abs(loss):.2f} {'less' if loss > 0 else 'more'} than ours; "
        f"a loss of {QUANTISED_LOSS} is allowed; computed here in {precision}; {dev.identical(outputs):,} of "
        f"{len(outputs):,} outputs are identical to ours",
    )


def _differing(ours: Sequence[object], theirs: Sequence[object]) -> list[int]:
    return [i for i, (mine, found) in enumerate(zip(ours, theirs, strict=True)) if mine != found]


def _shown(text: str) -> str:
    return ascii(text if len(text) <= 40 else f"{text[:40]}…")
