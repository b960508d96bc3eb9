"""Checks that an exported model gives the same outputs as ours; otherwise the export is not written.

They compare token ids, decoded texts, log-probabilities of given targets and greedy search, in fp32, on a sample of the
user's own text, or of a built-in one, and on hostile strings. The BLEU of beam search may differ, because the libraries
search in other ways: that is a warning.
"""

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np
import torch

from dist_transformer.base.checks import Check
from dist_transformer.base.errors import UserError
from dist_transformer.data.text.lines import read_lines
from dist_transformer.data.text.pairs import LineFiles
from dist_transformer.data.text.toy_corpus import make_toy_corpus
from dist_transformer.data.vocabulary.tokenizer import BOS_ID, EOS_ID, PAD_ID, UNK_ID, Vocabulary
from dist_transformer.evaluation.bleu import Score, corpus_bleu
from dist_transformer.export.hostile import HOSTILE
from dist_transformer.export.peer import Exported, IdPair, Peer, in_batches
from dist_transformer.inference.scoring import read_targets
from dist_transformer.inference.translator import Translator
from dist_transformer.model.transformer import Transformer

LARGEST_DIFFERENCE = 1e-4
"""Largest difference between a token's log-probabilities in fp32, if the highest logit is at most `USUAL_SPREAD` above
the mean; otherwise in proportion to that, because rounding is. At a spread of 18, transformers and ours differed by
1.5e-5 (74M random parameters)."""
USUAL_SPREAD = 10.0
LEAST_IDENTICAL = 0.995
"""Least share of lines with the same greedy output; rounding can change a choice between almost equal tokens."""
BLEU_TOLERANCE = 0.2
"""Difference of BLEU above which there is a warning."""
QUANTISED_LOSS = 0.5
"""BLEU that a quantised model may lose."""

COMPARED_LINES = 1000
"""Most lines of the user's text that are compared. With fewer, a limit of 99.5% of lines means little."""
SEARCHED_LINES = 500
"""Most of these lines that are translated by beam search, which takes most of the time."""
BUILT_IN_LINES = 60
"""Lines of the built-in text that the models read and translate; the others compare ids and texts of ids."""
SEED = 1
"""Seed of the samples of lines."""
# Rough cost of a line: greedy search, our beam search, theirs.
_GREEDY, _OURS, _THEIRS = 1, 2, 4

Row = TypeVar("Row")
Result = TypeVar("Result")


class Progress(Protocol):
    """Display of a comparison while it runs."""

    def say(self, line: str) -> object:
        """Show a line that stays."""

    def begin(self, total: int) -> object:
        """State the units of work of all stages."""

    def stage(self, name: str) -> object:
        """Name the stage that begins."""

    def advance(self, units: int) -> object:
        """Add finished units of work."""


def in_parts(
    work: Callable[[list[Row]], Sequence[Result]],
    rows: Sequence[Row],
    lengths: Sequence[int],
    done: Callable[[int], object],
) -> list[Result]:
    """Compute a result per row, in batches of similar length; `done` gets the number of rows of each."""
    found: dict[int, Result] = {}
    for places in in_batches(lengths):
        found.update(zip(places, work([rows[i] for i in places]), strict=True))
        done(len(places))
    return [found[i] for i in range(len(rows))]


@dataclass(frozen=True, kw_only=True, slots=True)
class DevText:
    """Text to compare with, and our model's translations of it."""

    numbers: list[int]
    """Numbers of the lines in the user's file, from 1."""
    sources: list[str]
    targets: list[str]
    """Texts whose log-probabilities are compared."""
    has_references: bool
    """Whether the targets are references, of which there is a BLEU."""
    is_built_in: bool
    outputs: list[str] = field(default_factory=list)
    """Beam search outputs of our model; empty before the search."""
    target_language: str = ""
    lowercase: bool = False
    """Whether BLEU ignores case, because the model's text is lowercased."""

    def sample(self, most: int) -> "DevText":
        """Return a random sample of at most `most` lines, in order; it depends on the seed and the number of lines."""
        rows = sorted(random.Random(SEED).sample(range(len(self.numbers)), min(most, len(self.numbers))))
        return replace(
            self,
            numbers=[self.numbers[i] for i in rows],
            sources=[self.sources[i] for i in rows],
            targets=[self.targets[i] for i in rows],
        )

    def bleu(self, outputs: Sequence[str]) -> Score | None:
        """Compute BLEU; None without references."""
        if not self.has_references:
            return None
        return corpus_bleu(outputs, self.targets, target_language=self.target_language, lowercase=self.lowercase)

    def identical(self, outputs: Sequence[str]) -> int:
        """Count the lines that are identical to ours."""
        return sum(ours == theirs for ours, theirs in zip(self.outputs, outputs, strict=True))


def dev_text(
    source: Path | None, reference: Path | None, tokenizer: Vocabulary, *, most_tokens: int | None = None, **more: Any
) -> DevText:
    """Sample lines of a text that are neither blank nor longer than `most_tokens`; by default, of the toy corpus.

    Args:
        more: other fields of the result.

    Raises:
        UserError: there is no such line.
    """
    if source is not None and reference is not None:
        pairs = list(LineFiles(source=source, target=reference).whole_pairs())
    elif source is not None:
        lines = list(read_lines(source))
        # Any text has log-probabilities.
        pairs = list(zip(lines, reversed(lines), strict=True))
    else:
        pairs = make_toy_corpus(train_pairs=COMPARED_LINES, valid_pairs=1, test_pairs=1).train
    lengths = map(len, tokenizer.source.encode_batch([text for text, _ in pairs]))
    fits = [
        (number, *pair)
        for number, (pair, length) in enumerate(zip(pairs, lengths, strict=True), 1)
        if not tokenizer.source.is_blank(pair[0]) and (most_tokens is None or length <= most_tokens)
    ]
    if not fits:
        raise UserError(
            f"--src has {len(pairs):,} lines, all of them blank or too long: pass other text, or leave --src out"
        )
    numbers, sources, targets = (list(column) for column in zip(*fits, strict=True))
    whole = DevText(
        numbers=numbers,
        sources=sources,
        targets=targets,
        has_references=reference is not None,
        is_built_in=source is None,
        **more,
    )
    return whole.sample(COMPARED_LINES)


def units(read: DevText, *, searched: int = 0) -> int:
    """Return the units of work of a comparison, about proportional to its time."""
    return _GREEDY * (len(read.numbers) + len(HOSTILE)) + (_OURS + _THEIRS) * searched


def search_ours(translator: Translator, dev: DevText, progress: Progress) -> DevText:
    """Add our translations to a dev text."""

    def work(lines: list[str]) -> list[str]:
        return [translation.text for translation in translator.translate(lines)]

    progress.stage("our beam search")
    outputs = in_parts(work, dev.sources, list(map(len, dev.sources)), lambda n: progress.advance(_OURS * n))
    return replace(dev, outputs=outputs)


def search_theirs(peer: Exported, dev: DevText, progress: Progress) -> list[str]:
    """Translate a dev text by the exported model's beam search."""
    progress.stage("their beam search")
    lengths = list(map(len, dev.sources))
    return in_parts(peer.translate, dev.sources, lengths, lambda n: progress.advance(_THEIRS * n))


def compare(
    model: Transformer,
    tokenizer: Vocabulary,
    peer: Peer,
    dev: DevText,
    read: DevText,
    progress: Progress,
    **limits: Any,
) -> Iterator[Check]:
    """Compare the tokenizers on a text, and the models on a part of it.

    Args:
        limits: further arguments of `Gate`.
    """
    texts, models = (Gate(model, tokenizer, peer, each, progress, **limits) for each in (dev, read))
    yield from dev_size(dev)
    for check in (texts.token_ids, texts.decoding, models.log_probabilities, models.greedy):
        progress.stage(check.__name__.replace("_", " "))
        yield check()


class Gate:
    """Checks of one exported model in fp32."""

    def __init__(
        self,
        model: Transformer,
        tokenizer: Vocabulary,
        peer: Peer,
        dev: DevText,
        progress: Progress,
        *,
        longest: int,
        given: int | None = None,
        tags: Sequence[str] = (),
    ) -> None:
        """Encode the texts that the checks compare.

        Args:
            longest: most tokens per greedy output.
            given: most tokens of a text that the models read; None: as many as ours has positions for.
            tags: tags in front of every source.
        """
        self.model, self.tokenizer, self.peer, self.dev, self.longest = model, tokenizer, peer, dev, longest
        self.progress, self.allowed = progress, LARGEST_DIFFERENCE
        self.prefix = tokenizer.source.tag_ids(tags)
        room = given or model.config.max_positions - 1
        hostile = [*filter(peer.reads, HOSTILE)]
        texts = [*dev.sources, *hostile]
        # The target of each hostile string is the next one.
        targets = [*dev.targets, *hostile[1:], hostile[0]]
        sides = (tokenizer.source.encode_batch(texts), tokenizer.target.encode_batch(targets))
        self.pairs: list[IdPair] = [
            ([*self.prefix, *source][:room], target[:room]) for source, target in zip(*sides, strict=True)
        ]
        self.texts = [*filter(peer.reads, (*dev.sources, *dev.targets)), *hostile]
        self.counted = f"{len(dev.sources):,} lines and {len(hostile)} hostile strings"

    def token_ids(self) -> Check:
        ours = [[*self.prefix, *ids, EOS_ID] for ids in self.tokenizer.source.encode_batch(self.texts)]
        wrong = _differing(ours, self.peer.encode(self.texts))
        found = f"the same for {self.counted}"
        if wrong:
            found = f"different ids for {len(wrong):,} texts, the first: {_shown(self.texts[wrong[0]])}"
        return Check.that(not wrong, name="token ids", found=found)

    def decoding(self) -> Check:
        # Libraries differ in how they write <unk>, which no search chooses.
        side = self.tokenizer.target if self.tokenizer.sizes[1] else self.tokenizer.source
        rows = side.encode_batch(self.texts)
        ids = [[token for token in row if token != UNK_ID] for row in rows]
        wrong = _differing([self.tokenizer.target.decode(row) for row in ids], self.peer.decode(ids))
        found = "the same text for all these ids"
        if wrong:
            found = f"different text for the ids of {len(wrong):,} texts, the first: {_shown(self.texts[wrong[0]])}"
        return Check.that(not wrong, name="decoding", found=found)

    def log_probabilities(self) -> Check:
        spread = 0.0

        def read(logits_TV: torch.Tensor, targets_T: torch.Tensor) -> torch.Tensor:
            nonlocal spread
            spread = max(spread, float((logits_TV.amax(1) - logits_TV.mean(1)).max()))
            return logits_TV.gather(1, targets_T[:, None])[:, 0] - logits_TV.logsumexp(1)

        ours = read_targets(self.model, self.pairs, read, device=self.model.embedding.device)
        self.allowed = LARGEST_DIFFERENCE * max(1.0, spread / USUAL_SPREAD)
        theirs = self.peer.log_probabilities(self.pairs)
        if [len(row) for row in ours] != [len(row) for row in theirs]:
            return Check.that(False, name="log-probabilities", found="the numbers of tokens differ")
        worst = float(np.abs(np.concatenate(ours) - np.concatenate(theirs)).max())
        counted = f"of {sum(map(len, ours)):,} given target tokens"
        return Check.that(
            # NaN fails this comparison.
            worst <= self.allowed,
            name="log-probabilities",
            found=f"those {counted} differ by at most {worst:.1e}; {self.allowed:.1e} is allowed",
        )

    def greedy(self) -> Check:
        """Check greedy outputs: each of their tokens must be our most probable one after the tokens before it.

        Tokens that are as probable as that one, up to the difference that log-probabilities may have, count as it.
        """
        # Neither we nor CTranslate2 search for an empty text.
        sources = [source for source, _ in self.pairs if len(source) > len(self.prefix)]
        outputs = in_parts(
            lambda part: self.peer.greedy(part, self.longest),
            sources,
            list(map(len, sources)),
            lambda n: self.progress.advance(_GREEDY * n),
        )
        pairs = list(zip(sources, outputs, strict=True))
        same = 0
        for output, gaps in zip(outputs, self._gaps(pairs), strict=True):
            # An output at the limit may not have ended.
            compared = gaps if len(output) < self.longest - 1 else gaps[:-1]
            same += all(gap <= self.allowed for gap in compared)
        return Check.that(
            same >= LEAST_IDENTICAL * len(pairs),
            name="greedy search",
            found=f"{same:,} of {len(pairs):,} outputs are identical; {LEAST_IDENTICAL:.1%} must be",
        )

    def _gaps(self, pairs: Sequence[IdPair]) -> list[list[float]]:
        """Compute how much less probable each target token is than our most probable one, as a difference of logs."""
        target = self.tokenizer.target
        never = [PAD_ID, UNK_ID, BOS_ID, *target.tag_ids(target.tags)]

        def read(logits_TV: torch.Tensor, targets_T: torch.Tensor) -> torch.Tensor:
            logits_TV[:, never] = -torch.inf
            return logits_TV.amax(1) - logits_TV.gather(1, targets_T[:, None])[:, 0]

        return read_targets(self.model, pairs, read, device=self.model.embedding.device)


def dev_size(dev: DevText) -> list[Check]:
    """Warn of a small text of the user's."""
    lines = len(dev.numbers)
    if lines >= COMPARED_LINES or dev.is_built_in:
        return []
    found = f"only {lines:,} lines were compared, so rare differences may be missed"
    remedy = f"pass {COMPARED_LINES:,} lines of text or more"
    return [Check(name="dev text", found=found, state="warn", remedy=remedy)]


def beam(dev: DevText, outputs: Sequence[str], *, precision: str, quantization: str | None) -> Check:
    """Compare the outputs and the BLEU of the beam searches.

    A quantised model may lose little. Otherwise a difference is a warning, because the other checks compare the models.
    """
    ours, theirs = dev.bleu(dev.outputs), dev.bleu(outputs)
    name = quantization or "beam search"
    same = f"{dev.identical(outputs):,} of {len(outputs):,} outputs are identical to ours; computed here in {precision}"
    if ours is None or theirs is None:
        remedy = "pass --src and --ref, to see what BLEU it loses"
        return Check(name=name, found=same, state="ok" if quantization is None else "warn", remedy=remedy)
    found = f"{theirs.value:.2f} BLEU, ours {ours.value:.2f}; {same} ({theirs.signature})"
    if quantization is not None:
        is_close = ours.value - theirs.value <= QUANTISED_LOSS
        return Check.that(is_close, name=name, found=f"{found}; a loss of {QUANTISED_LOSS} is allowed")
    return Check(
        name=name,
        found=f"{found}; a difference of {BLEU_TOLERANCE} is usual",
        state="ok" if abs(ours.value - theirs.value) <= BLEU_TOLERANCE else "warn",
        remedy="the models agree and their searches differ: try other values of length_penalty with the library",
    )


def _differing(ours: Sequence[object], theirs: Sequence[object]) -> list[int]:
    return [i for i, (mine, found) in enumerate(zip(ours, theirs, strict=True)) if mine != found]


def _shown(text: str) -> str:
    return ascii(text if len(text) <= 40 else f"{text[:40]}…")
