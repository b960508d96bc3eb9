"""What our model says of given targets, token by token: the numbers that an exported model must have, too."""

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch

from dist_transformer.data.tokenizer import BOS_ID, EOS_ID, PAD_ID, UNK_ID
from dist_transformer.export.peer import IdPair
from dist_transformer.model.transformer import Transformer
from dist_transformer.packed import PackedTokens, pack_side

# Target tokens that are computed at a time: their logits take 150 MB with 37,000 words.
_BATCH_TOKENS = 1024
_NEVER_CHOSEN = [PAD_ID, UNK_ID, BOS_ID]


def log_probabilities(model: Transformer, pairs: Sequence[IdPair]) -> list[np.ndarray]:
    """Natural logarithms of the probabilities of each pair's target tokens, `</s>` last."""

    def read(logits_TV: torch.Tensor, labels_T: torch.Tensor) -> torch.Tensor:
        return logits_TV.log_softmax(1).gather(1, labels_T[:, None])[:, 0]

    return _read(model, pairs, read)


def greedy_choices(model: Transformer, pairs: Sequence[IdPair]) -> list[np.ndarray]:
    """The most probable token after each beginning of the targets, the empty one first; never `<pad>`, `<unk>`, `<s>`.

    A target is what greedy search finds when each of its tokens, and `</s>` after them, is the choice at its place.
    """

    def read(logits_TV: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
        logits_TV[:, _NEVER_CHOSEN] = -torch.inf
        return logits_TV.argmax(1)

    return _read(model, pairs, read)


@torch.no_grad()
def _read(
    model: Transformer, pairs: Sequence[IdPair], read: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
) -> list[np.ndarray]:
    found = [np.empty(0)] * len(pairs)
    device = model.embedding.device
    for places in _batches(pairs):
        source = _side([[*pairs[i][0], EOS_ID] for i in places]).to(device)
        target = _side([[BOS_ID, *pairs[i][1]] for i in places]).to(device)
        labels = [[*pairs[i][1], EOS_ID] for i in places]
        logits_TV = model.logits(model.decode(target, model.encode(source), source))
        values_T = read(logits_TV, torch.from_numpy(np.concatenate(labels)).to(device)).cpu().numpy()
        ends = np.cumsum([len(row) for row in labels])
        for i, values in zip(places, np.split(values_T, ends[:-1]), strict=True):
            found[i] = values
    return found


def _batches(pairs: Sequence[IdPair]) -> Iterator[list[int]]:
    """Places of pairs of similar length."""
    batch: list[int] = []
    tokens = 0
    for i in sorted(range(len(pairs)), key=lambda i: (len(pairs[i][1]), len(pairs[i][0]))):
        size = max(map(len, pairs[i])) + 1
        if batch and tokens + size > _BATCH_TOKENS:
            yield batch
            batch, tokens = [], 0
        batch.append(i)
        tokens += size
    if batch:
        yield batch


def _side(sentences: list[list[int]]) -> PackedTokens:
    lengths = np.array([len(sentence) for sentence in sentences])
    tokens = np.concatenate(sentences).astype(np.int64)
    return pack_side(tokens, lengths, size=len(tokens), offset_count=len(sentences) + 1, max_length=int(lengths.max()))
