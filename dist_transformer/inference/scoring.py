"""Log probability of given translations under a model, log p(target | source), on one or several ranks.

A target is read in one pass, as in training. The distribution is the model's own: without label smoothing, and without
the rules of search, such as never to choose `<unk>`.
"""

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch.nn import functional

from dist_transformer.base.errors import UserError
from dist_transformer.data.text.pairs import LineFiles
from dist_transformer.data.vocabulary.tokenizer import BOS_ID, EOS_ID, Vocabulary
from dist_transformer.inference.batches import pack_sentences
from dist_transformer.inference.ensemble import DecodingModel
from dist_transformer.model.loss import logit_rows
from dist_transformer.runtime.distributed import (
    broadcast_object,
    by_main,
    gather_objects,
    on_all_ranks,
    rank,
    world_size,
)

# Lines that are held in memory, and from which batches are formed.
_LINES_AT_ONCE = 10_000
BATCH_TOKENS = {"cpu": 4096, "cuda": 32768}

IdPair = tuple[list[int], list[int]]


@dataclass(frozen=True, kw_only=True, slots=True)
class PairScore:
    """Log probability of one target, given its source."""

    log_probability: float
    """Natural logarithm of p(target `</s>` | source): the sum over tokens."""
    token_log_probabilities: tuple[float, ...]
    """Natural logarithm of the probability of each of `tokens`."""
    tokens: tuple[int, ...]
    """Ids of the target, `</s>` last."""


def score_pairs(
    model: DecodingModel,
    tokenizer: Vocabulary,
    sources: Sequence[str],
    targets: Sequence[str],
    *,
    device: torch.device,
    tags: Sequence[str] = (),
    batch_tokens: int | None = None,
) -> list[PairScore]:
    """Score `targets[i]` as a translation of `sources[i]`.

    Collective: every rank must call it. All ranks must give the same lines.

    Batches are formed from all pairs, sorted by length, and the ranks share them. So the scores do not depend on the
    number of ranks, and every rank gets all of them. An empty line is `</s>` alone.

    Args:
        model: model in evaluation mode.
        tags: tags of the direction.
        batch_tokens: tokens per batch, counted on the longer side of each pair; None: a default for the device. A
            longer pair is a batch of its own.

    Raises:
        UserError: a pair has more tokens than the model has positions; the message gives the number of its line, from
            1, and nothing is computed. Or a rank failed. The error is the same on every rank.
    """
    pairs = encode_pairs(tokenizer, sources, targets, tags)
    refuse_long(model, pairs, first_line=1)
    given = len(tokenizer.fronts(tags)[1])
    return score_ids(model, pairs, given=given, device=device, batch_tokens=batch_tokens)


def score_ids(
    model: DecodingModel,
    pairs: Sequence[IdPair],
    *,
    given: int = 0,
    device: torch.device,
    batch_tokens: int | None = None,
) -> list[PairScore]:
    """Score pairs as `score_pairs` does, from ids without special tokens that fit the model's positions.

    Collective: every rank must call it.

    Args:
        given: tags at the beginning of each target, which are not scored.
    """

    def read(logits_TV: torch.Tensor, labels_T: torch.Tensor) -> torch.Tensor:
        return logits_TV.log_softmax(-1).gather(1, labels_T.unsqueeze(1)).squeeze(1)

    values = read_targets(model, pairs, read, device=device, batch_tokens=batch_tokens)
    return [
        PairScore(
            log_probability=math.fsum(found[given:]),
            token_log_probabilities=tuple(found[given:]),
            tokens=(*target[given:], EOS_ID),
        )
        for (_, target), found in zip(pairs, values, strict=True)
    ]


def read_targets(
    model: DecodingModel,
    pairs: Sequence[IdPair],
    read: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    *,
    device: torch.device,
    batch_tokens: int | None = None,
) -> list[list[float]]:
    """Compute one number per target token of each pair, `</s>` last, in one pass over the pair.

    Collective: every rank must call it.

    Args:
        read: computes the numbers, shape (T,), from logits, shape (T, V), and the target ids, shape (T,).
    """
    limit = BATCH_TOKENS[device.type] if batch_tokens is None else batch_tokens
    if limit < 1:
        raise UserError(f"batch_tokens is {limit}: it must be above 0")
    model.to(device)
    batches = make_batches(pairs, limit)
    share = batches[rank() :: world_size()]
    values: list[np.ndarray] = [np.empty(0)] * len(batches)
    computed = on_all_ranks(lambda: [_read_batch(model, [pairs[i] for i in places], read, device) for places in share])
    # As numbers of JSON, 300,000 took half a second on each rank; as text of their bytes, 0.01 s.
    for number, part in enumerate(gather_objects([np.asarray(numbers).tobytes().hex() for numbers in computed])):
        values[number :: world_size()] = [np.frombuffer(bytes.fromhex(text)) for text in part]
    found: list[list[float]] = [[]] * len(pairs)
    for places, batch_values in zip(batches, values, strict=True):
        start = 0
        for i in places:
            end = start + len(pairs[i][1]) + 1
            found[i] = batch_values[start:end].tolist()
            start = end
    return found


def score_files(
    model: DecodingModel,
    tokenizer: Vocabulary,
    files: LineFiles,
    *,
    device: torch.device,
    tags: Sequence[str] = (),
    batch_tokens: int | None = None,
    look: Callable[[Sequence[str], Sequence[str]], object] = lambda *_: None,
) -> Iterator[list[PairScore]]:
    """Score files of any size as `score_pairs` does; yield the scores of 10,000 lines at a time, in order.

    Collective: every rank must call it. The files are read twice, because all lines are checked before the first one
    is scored.

    Args:
        look: called on rank 0 with the first 10,000 sources and targets, before any is scored.

    Raises:
        UserError: `score_pairs` failed, or a file is a pipe or cannot be read, or their lengths differ.
    """

    def check() -> None:
        for number, chunk in enumerate(_chunks(files)):
            sources, targets = zip(*chunk, strict=True)
            if number == 0:
                look(sources, targets)
            first_line = number * _LINES_AT_ONCE + 1
            refuse_long(model, encode_pairs(tokenizer, sources, targets, tags), first_line=first_line)

    # Only one rank reads, so that all ranks have the same text even if a file changes meanwhile.
    by_main(check)
    chunks = _chunks(files)
    while chunk := broadcast_object(by_main(lambda: next(chunks, []))):
        sources, targets = zip(*chunk, strict=True)
        yield score_pairs(model, tokenizer, sources, targets, device=device, tags=tags, batch_tokens=batch_tokens)


def _chunks(files: LineFiles) -> Iterator[list[tuple[str, str]]]:
    pairs = files.whole_pairs()
    while chunk := list(itertools.islice(pairs, _LINES_AT_ONCE)):
        yield chunk


def encode_pairs(
    tokenizer: Vocabulary, sources: Sequence[str], targets: Sequence[str], tags: Sequence[str]
) -> list[IdPair]:
    """Return the ids of each pair without special tokens, with the tags in front."""
    front, target_front = tokenizer.fronts(tags)
    source_ids = tokenizer.source.encode_batch(list(sources))
    target_ids = tokenizer.target.encode_batch(list(targets))
    return [
        ([*front, *source], [*target_front, *target]) for source, target in zip(source_ids, target_ids, strict=True)
    ]


def not_finite(what: str) -> UserError:
    """Build the error about numbers of a model that are not finite, although its weights are."""
    return UserError(
        f"the model computes numbers that are not finite for {what}, because its weights are too large, as after a "
        "training that diverged: use an earlier checkpoint, or --precision fp32 if it computes in bf16"
    )


def longest_line(model: DecodingModel) -> int:
    """Return the maximum tokens of a source or a target; `</s>` and `<s>` take one position each."""
    return model.config.max_positions - 1


def refuse_long(model: DecodingModel, pairs: Sequence[IdPair], *, first_line: int) -> None:
    longest = longest_line(model)
    for line, (source, target) in enumerate(pairs, first_line):
        if max(len(source), len(target)) > longest:
            raise UserError(
                f"line {line:,} has {len(source):,} source and {len(target):,} target tokens, and the model has room "
                f"for {longest:,} of each: split the line, or leave it out of both files"
            )


def make_batches(pairs: Sequence[IdPair], max_tokens: int) -> list[list[int]]:
    """Group pairs of similar length, by place; longest first, so that a lack of memory shows early."""
    batches: list[list[int]] = []
    tokens = max_tokens
    for i in sorted(range(len(pairs)), key=lambda i: (-len(pairs[i][1]), -len(pairs[i][0]), i)):
        size = max(map(len, pairs[i])) + 1
        if tokens + size > max_tokens:
            batches.append([])
            tokens = 0
        batches[-1].append(i)
        tokens += size
    return batches


@torch.no_grad()
def _read_batch(
    model: DecodingModel,
    batch: Sequence[IdPair],
    read: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    device: torch.device,
) -> list[float]:
    """Compute the numbers of all target tokens of a batch, end to end; `</s>` ends each sentence."""
    source = pack_sentences([[*source, EOS_ID] for source, _ in batch], device)
    target = pack_sentences([[BOS_ID, *target] for _, target in batch], device)
    labels_T = torch.tensor([i for _, target in batch for i in (*target, EOS_ID)], device=device)
    config = model.config
    try:
        hidden_TD = model.decode(target, model.encode(source), source)
        _, rows = logit_rows(len(labels_T), config.output_size, config.width, device.type)
        blocks = zip(hidden_TD.split(rows), labels_T.split(rows), strict=True)
        found = [read(model.project(hidden_RD, functional.linear).float(), labels_R) for hidden_RD, labels_R in blocks]
    except torch.OutOfMemoryError:
        raise UserError("out of memory in a batch: lower --batch-tokens") from None
    if not (values_T := torch.cat(found)).isfinite().all():
        raise not_finite("a probability")
    return values_T.tolist()
