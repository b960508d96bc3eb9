"""Checks that an exported model gives the same outputs as ours; otherwise the export is not written.

They compare token ids, decoded texts, log-probabilities of given targets and greedy search, in fp32, on a sample of the
user's own text, or of a built-in one, and on hostile strings.
"""

import random
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

from dist_transformer.base.checks import Check, failed
from dist_transformer.base.errors import UserError
from dist_transformer.data.text.lines import read_lines
from dist_transformer.data.text.pairs import LineFiles
from dist_transformer.data.text.toy_corpus import make_toy_corpus
from dist_transformer.data.vocabulary.tokenizer import BOS_ID, EOS_ID, PAD_ID, UNK_ID
from dist_transformer.export.hostile import HOSTILE
from dist_transformer.export.libraries import IdPair, Peer, in_batches, longest_output
from dist_transformer.inference.scoring import read_targets
from dist_transformer.inference.translator import Translator

LARGEST_DIFFERENCE = 1e-4
"""Largest difference between a token's log-probabilities in fp32, if the highest logit is at most `USUAL_SPREAD` above
the mean; otherwise in proportion to that, because rounding is. At a spread of 18, transformers and ours differed by
1.5e-5 (74M random parameters)."""
USUAL_SPREAD = 10.0
LEAST_IDENTICAL = 0.995
"""Least share of lines with the same greedy output; rounding can change a choice between almost equal tokens."""

_FAR = 1e9

COMPARED_LINES = 1000
"""Most lines of the user's text that are compared. With fewer, a limit of 99.5% of lines means little."""
SEED = 1
"""Seed of the samples of lines."""

Show = Callable[[Sequence[Check]], object]
"""Display of all checks that ran, whether they passed or not."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DevText:
    """Text to compare with."""

    numbers: list[int]
    """Numbers of the lines in the user's file, from 1."""
    sources: list[str]
    targets: list[str]
    """Texts whose log-probabilities are compared."""

    def sample(self, most: int) -> "DevText":
        """Return a random sample of at most `most` lines, in order; it depends on the seed and the number of lines."""
        rows = sorted(random.Random(SEED).sample(range(len(self.numbers)), min(most, len(self.numbers))))
        columns: tuple[Any, ...] = (self.numbers, self.sources, self.targets)
        numbers, sources, targets = ([column[i] for i in rows] for column in columns)
        return DevText(numbers=numbers, sources=sources, targets=targets)


def dev_text(source: Path | None, reference: Path | None, translator: Translator) -> DevText:
    """Sample lines of a text that are neither blank nor too long for the model; by default, of the toy corpus.

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
    tokenizer = translator.tokenizer.source
    ids = tokenizer.encode_batch([text for text, _ in pairs])
    fits = [
        (number, *pair)
        for number, (pair, row) in enumerate(zip(pairs, ids, strict=True), 1)
        if not tokenizer.is_blank(pair[0]) and len(row) <= translator.max_source_tokens
    ]
    if not fits:
        raise UserError(
            f"--src has {len(pairs):,} lines, all of them blank or too long: pass other text, or leave --src out"
        )
    numbers, sources, targets = (list(column) for column in zip(*fits, strict=True))
    return DevText(numbers=numbers, sources=sources, targets=targets).sample(COMPARED_LINES)


@dataclass(frozen=True, kw_only=True, slots=True)
class Gate:
    """Checks of a model of another program, in fp32."""

    translator: Translator
    """Ours, with the tags in front of every source."""
    peer: Peer
    progress: tqdm
    """Progress in units of a greedy output, which takes most of the time."""
    later: int = 0
    """Units of work that the caller does afterwards."""
    most: int = sys.maxsize
    """Most tokens of a text that the models read or write, if their positions are more."""

    @property
    def longest(self) -> int:
        """Most tokens per greedy output."""
        return min(self.most, longest_output(self.translator.model.config.max_positions))

    def compare(self, dev: DevText, read: DevText) -> list[Check]:
        """Compare the tokenizers on a text, and the models on a part of it."""
        source, target = self.translator.tokenizer.source, self.translator.tokenizer.target
        prefix, begun, model = self.translator.tag_ids, self.translator.target_tag_ids, self.translator.model
        hostile = [*filter(self.peer.reads, HOSTILE)]
        texts = [*filter(self.peer.reads, (*dev.sources, *dev.targets)), *hostile]
        self.progress.reset(len(read.numbers) + len(HOSTILE) + self.later)
        self.progress.set_description_str("token ids")
        ours = [[*prefix, *ids, EOS_ID] for ids in source.encode_batch(texts)]
        same = f"the same for {len(dev.sources):,} lines and {len(hostile)} hostile strings"
        token_ids = _compared("token ids", texts, ours, self.peer.encode(texts), same, "different ids for")
        self.progress.set_description_str("decoding")
        side = target if self.translator.tokenizer.sizes[1] else source
        # Libraries differ in how they write <unk>, which no search chooses.
        rows = [[token for token in row if token != UNK_ID] for row in side.encode_batch(texts)]
        decoded, same = [target.decode(row) for row in rows], "the same text for all these ids"
        decoding = _compared("decoding", texts, decoded, self.peer.decode(rows), same, "different text for the ids of")
        room = min(self.most, model.config.max_positions - 1)
        # The target of each hostile string is the next one.
        sides = ([*read.sources, *hostile], [*read.targets, *hostile[1:], hostile[0]])
        encoded = zip(source.encode_batch(sides[0]), target.encode_batch(sides[1]), strict=True)
        pairs = [([*prefix, *ids][:room], [*begun, *targets][:room]) for ids, targets in encoded]
        self.progress.set_description_str("log probabilities")
        log_probabilities, allowed = self._log_probabilities(pairs)
        self.progress.set_description_str("greedy")
        # Neither we nor CTranslate2 search for an empty text.
        greedy = self._greedy([ids for ids, _ in pairs if len(ids) > len(prefix)], allowed)
        return [*_size(dev), token_ids, decoding, log_probabilities, greedy]

    def _log_probabilities(self, pairs: Sequence[IdPair]) -> tuple[Check, float]:
        """Compare the log-probabilities of given targets; return the difference that is allowed, too."""
        model, spread = self.translator.model, 0.0

        def read(logits_TV: torch.Tensor, targets_T: torch.Tensor) -> torch.Tensor:
            nonlocal spread
            spread = max(spread, float((logits_TV.amax(1) - logits_TV.mean(1)).max()))
            return logits_TV.gather(1, targets_T[:, None])[:, 0] - logits_TV.logsumexp(1)

        ours, theirs = read_targets(model, pairs, read, device=model.device), self.peer.log_probabilities(pairs)
        allowed = LARGEST_DIFFERENCE * max(1.0, spread / USUAL_SPREAD)
        if [*map(len, ours)] != [*map(len, theirs)]:
            return Check.that(False, name="log-probabilities", found="the numbers of tokens differ"), allowed
        differences = np.abs(np.concatenate(ours) - np.concatenate(theirs))
        worst = float(differences.max())
        tokens = f"those of {len(differences):,} given target tokens"
        found = f"{tokens} differ by at most {worst:.1e}; {allowed:.1e} is allowed"
        # NaN fails this comparison.
        return Check.that(worst <= allowed, name="log-probabilities", found=found), allowed

    def _greedy(self, sources: list[list[int]], allowed: float) -> Check:
        """Check greedy outputs: each of their tokens must be our most probable one after the tokens before it.

        Tokens that are as probable as that one, up to the difference that log-probabilities may have, count as it.
        """
        outputs = in_batches(
            lambda part: self.peer.greedy(part, self.longest), sources, [*map(len, sources)], done=self.progress.update
        )
        model, target, begun = self.translator.model, self.translator.tokenizer.target, self.translator.target_tag_ids
        never = [PAD_ID, UNK_ID, BOS_ID, *target.tag_ids(target.tags)]

        def gap(logits_TV: torch.Tensor, targets_T: torch.Tensor) -> torch.Tensor:
            logits_TV[:, never] = -torch.inf
            # A tag is never the most probable one, though outputs may begin with one.
            return (logits_TV.amax(1) - logits_TV.gather(1, targets_T[:, None])[:, 0]).clamp(max=_FAR)

        pairs, same = [*zip(sources, outputs, strict=True)], 0
        for output, gaps in zip(outputs, read_targets(model, pairs, gap, device=model.device), strict=True):
            # An output at the limit may not have ended.
            compared = gaps[len(begun) :] if len(output) < self.longest - 1 else gaps[len(begun) : -1]
            same += output[: len(begun)] == begun and all(each <= allowed for each in compared)
        return Check.that(
            same >= LEAST_IDENTICAL * len(outputs),
            name="greedy search",
            found=f"{same:,} of {len(outputs):,} outputs are identical; {LEAST_IDENTICAL:.1%} must be",
        )


def _size(dev: DevText) -> list[Check]:
    """Warn of a small text."""
    lines = len(dev.numbers)
    if lines >= COMPARED_LINES:
        return []
    found = f"only {lines:,} lines were compared, so rare differences may be missed"
    remedy = f"pass {COMPARED_LINES:,} lines of text or more"
    return [Check(name="dev text", found=found, state="warn", remedy=remedy)]


def _compared(
    name: str, texts: list[str], ours: Sequence[object], theirs: Sequence[object], same: str, different: str
) -> Check:
    wrong = [text for text, mine, found in zip(texts, ours, theirs, strict=True) if mine != found]
    if not wrong:
        return Check(name=name, found=same)
    first = wrong[0] if len(wrong[0]) <= 40 else f"{wrong[0][:40]}…"
    return Check(name=name, found=f"{different} {len(wrong):,} texts, the first: {first!a}", state="fail")


def refuse_failed(checks: Sequence[Check], show: Show, out: Path, original: Path) -> None:
    """Show the checks and raise a UserError if one of them failed."""
    if names := failed(checks):
        show(checks)
        raise UserError(
            f"{out} was not written, because its outputs differ from those of {original} "
            f"({', '.join(names)}): see the rows above"
        )
