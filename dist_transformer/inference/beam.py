"""Beam search with the length penalty of GNMT (section 6.1), batched over sentences.

    score(y) = log P(y | x) / lp(|y|),   lp(n) = ((5 + n) / 6)^α          (Wu et al. 2016, equation 14)

|y| counts the `</s>`. Each step extends the k living hypotheses of a sentence and takes the best 2k extensions: those
that end with `</s>` compete for the k finished places by score, the best k others live on. At most k extensions can
end, so k always remain. Equal numbers are ordered by place in the beam, then by token id.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch.nn import functional

from dist_transformer.data.tokenizer import BOS_ID, EOS_ID, PAD_ID, UNK_ID
from dist_transformer.errors import UserError
from dist_transformer.inference.candidates import best_extensions
from dist_transformer.model.transformer import Transformer
from dist_transformer.packed import pack_side

# Steps between looks at which sentences are done: on CUDA a look makes the host wait for the device.
_STEPS_BETWEEN_LOOKS = {"cpu": 1, "cuda": 8}


@dataclass(frozen=True, kw_only=True, slots=True)
class BeamSettings:
    """The paper's: beam 4, α 0.6, at most source length + 50."""

    beam_size: int = 4
    """Hypotheses that live in each step; 1 is greedy search."""
    length_penalty: float = 0.6
    """α: 0 compares log probabilities, 1 nearly their mean a token."""
    max_extra_tokens: int = 50
    """An output has at most so many tokens more than its source."""
    nbest: int = 1
    """Hypotheses returned for a sentence, best first."""

    def __post_init__(self) -> None:
        if self.beam_size < 1:
            raise UserError(f"beam_size is {self.beam_size}: give 1 (greedy) or more, 4 is usual")
        # Below 0 a longer hypothesis could gain by losing probability, and the stopping rule would be wrong.
        if not 0 <= self.length_penalty < float("inf"):
            raise UserError(f"length_penalty is {self.length_penalty}: give 0 (off) or more, 0.6 is usual")
        if self.max_extra_tokens < 0:
            raise UserError(f"max_extra_tokens is {self.max_extra_tokens}: give 0 or more, 50 is usual")
        if not 1 <= self.nbest <= self.beam_size:
            raise UserError(f"nbest is {self.nbest}: give 1 up to beam_size ({self.beam_size}), or raise beam_size")


@dataclass(frozen=True, kw_only=True, slots=True)
class Hypothesis:
    """An output."""

    tokens: list[int]
    """Without `<s>` and `</s>`."""
    score: float
    """log_probability / lp(len(tokens) + 1)."""
    log_probability: float
    """Of the tokens and the `</s>`."""


def beam_search(
    model: Transformer, sources: Sequence[Sequence[int]], *, settings: BeamSettings
) -> list[list[Hypothesis]]:
    """The `nbest` best hypotheses of each source, best first.

    A sentence's search ends when its best living hypothesis, were it to end at the longest length for free, could not
    beat the hypotheses that would be returned: going on would not change them. An output has at most len(source) +
    max_extra_tokens tokens; a hypothesis that reaches this must take `</s>` next, at the probability that the model
    gives it, and then competes like any other. `<pad>`, `<unk>` and `<s>` are never chosen; the probabilities of the
    others stay the model's.

    Args:
        sources: token ids without special tokens, each shorter than the model's `max_positions`; they are decoded as
            one batch, so they should be of similar length.

    Returns:
        a list for each source, in order; fewer than `nbest` hypotheses only where there are no more so short ones.
    """
    if not sources:
        return []
    was_training = model.training
    model.eval()
    try:
        with torch.inference_mode():
            return _Search(model, sources, settings).run()
    finally:
        model.train(was_training)


class _Search:
    """N sentences in search, k hypotheses each; N shrinks as sentences are done.

    Further shape letters: k living or finished hypotheses, c = 2k candidates, T tokens so far, `<s>` included.
    """

    def __init__(self, model: Transformer, sources: Sequence[Sequence[int]], settings: BeamSettings) -> None:
        self.model, self.settings = model, settings
        self.device = model.embedding.device
        longest = model.config.max_positions - 1
        self.limits = np.array([min(len(source) + settings.max_extra_tokens, longest) for source in sources])
        self.sentences = np.arange(len(sources))
        self.results: list[list[Hypothesis]] = [[] for _ in sources]

        self.never_chosen = torch.tensor([PAD_ID, UNK_ID, BOS_ID], device=self.device)
        self.state = model.start_decoding(*_encode(model, sources), beam_size=settings.beam_size)
        # lp(n) at place n.
        lengths = torch.arange(int(self.limits.max()) + 2, device=self.device)
        self.penalties = ((5 + lengths.float()) / 6) ** settings.length_penalty
        self.last_penalty_N1 = self.penalties[torch.from_numpy(self.limits + 1).to(self.device)].unsqueeze(1)

        shape = (len(sources), settings.beam_size)
        self.alive_NkT = torch.full((*shape, 1), BOS_ID, device=self.device)
        # All k hypotheses are `<s>`: only the first may be extended.
        self.alive_logp_Nk = torch.full(shape, -torch.inf, device=self.device)
        self.alive_logp_Nk[:, 0] = 0.0
        self.ended_NkT = self.alive_NkT
        self.ended_logp_Nk = torch.full(shape, -torch.inf, device=self.device)
        self.ended_score_Nk = self.ended_logp_Nk
        self.ended_length_Nk = torch.zeros(shape, dtype=torch.int64, device=self.device)

    def run(self) -> list[list[Hypothesis]]:
        every = _STEPS_BETWEEN_LOOKS[self.device.type]
        for position in itertools.count():
            self._step(position)
            done_N = self.limits <= position
            if (position + 1) % every == 0:
                done_N |= self._done().cpu().numpy()
            self._collect(np.flatnonzero(done_N))
            if done_N.all():
                return self.results
            if done_N.any():
                self._keep(~done_N)
        raise AssertionError

    def _step(self, position: int) -> None:
        """Extend every living hypothesis by a token."""
        beam = self.settings.beam_size
        hidden_BD = self.model.decode_step(self.alive_NkT[:, :, -1].flatten(), self.state)
        at_limit_N = self.limits <= position
        logp_Nc, parent_Nc, token_Nc = best_extensions(
            self.model, hidden_BD, self.alive_logp_Nk, count=2 * beam, never=self.never_chosen, ends_only=at_limit_N
        )
        is_end_Nc = token_Nc == EOS_ID
        self._add_ended(logp_Nc, parent_Nc, is_end_Nc, position + 1)

        # A stable sort by "ends" leaves the others in front, in their order.
        order_Nk = is_end_Nc.byte().sort(dim=1, stable=True).indices[:, :beam]
        self.alive_logp_Nk = logp_Nc.gather(1, order_Nk)
        parent_Nk = parent_Nc.gather(1, order_Nk)
        grown = (_rows(self.alive_NkT, parent_Nk), token_Nc.gather(1, order_Nk).unsqueeze(2))
        self.alive_NkT = torch.cat(grown, dim=2)
        self.state.reorder(parent_Nk)

    def _add_ended(self, logp_Nc: torch.Tensor, parent_Nc: torch.Tensor, is_end_Nc: torch.Tensor, length: int) -> None:
        """Candidates that end, `length` tokens long with `</s>`, compete with those that ended before."""
        score_Nc = torch.where(is_end_Nc, logp_Nc / self.penalties[length : length + 1], -torch.inf)
        scores = torch.cat([self.ended_score_Nk, score_Nc], dim=1)
        order_Nk = scores.sort(dim=1, descending=True, stable=True).indices[:, : self.settings.beam_size]
        self.ended_score_Nk = scores.gather(1, order_Nk)
        self.ended_logp_Nk = torch.cat([self.ended_logp_Nk, logp_Nc], dim=1).gather(1, order_Nk)
        lengths = torch.cat([self.ended_length_Nk, torch.full_like(parent_Nc, length)], dim=1)
        self.ended_length_Nk = lengths.gather(1, order_Nk)
        tokens = torch.cat([self.ended_NkT, _rows(self.alive_NkT, parent_Nc)], dim=1)
        self.ended_NkT = functional.pad(_rows(tokens, order_Nk), (0, 1), value=PAD_ID)

    def _done(self) -> torch.Tensor:
        """Sentences whose results can no longer change, shape (N,).

        log P only falls and lp only grows, so no descendant of the best living hypothesis scores more than its
        log P / lp(longest).
        """
        bound_N1 = self.alive_logp_Nk[:, :1] / self.last_penalty_N1
        return (self.ended_score_Nk[:, self.settings.nbest - 1].unsqueeze(1) >= bound_N1).squeeze(1)

    def _collect(self, done: np.ndarray) -> None:
        if not len(done):
            return
        rows = torch.from_numpy(done).to(self.device)
        columns = (self.ended_NkT, self.ended_length_Nk, self.ended_score_Nk, self.ended_logp_Nk)
        tokens, lengths, scores, logps = (column[rows, : self.settings.nbest].tolist() for column in columns)
        for i, sentence in enumerate(self.sentences[done]):
            self.results[sentence] = [
                # `<s>` comes first; the length counts the `</s>`, which is not stored.
                Hypothesis(tokens=row[1:length], score=score, log_probability=logp)
                for row, length, score, logp in zip(tokens[i], lengths[i], scores[i], logps[i], strict=True)
                if score > -torch.inf
            ]

    def _keep(self, kept_N: np.ndarray) -> None:
        """Drop the other sentences. The last ones move to the places that become free, so that little is copied."""
        count = kept_N.sum()
        order = np.arange(count)
        moved = np.flatnonzero(~kept_N[:count])
        order[moved] = count + np.flatnonzero(kept_N[count:])
        self.limits, self.sentences = self.limits[order], self.sentences[order]
        rows = torch.from_numpy(order).to(self.device)
        self.state.keep(rows, torch.from_numpy(moved).to(self.device))
        self.alive_NkT, self.alive_logp_Nk = self.alive_NkT[rows], self.alive_logp_Nk[rows]
        self.ended_NkT, self.ended_length_Nk = self.ended_NkT[rows], self.ended_length_Nk[rows]
        self.ended_score_Nk, self.ended_logp_Nk = self.ended_score_Nk[rows], self.ended_logp_Nk[rows]
        self.last_penalty_N1 = self.last_penalty_N1[rows]


def _encode(model: Transformer, sources: Sequence[Sequence[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Memory of the sources, padded, shape (B, S, D), and its additive mask, shape (B, 1, S)."""
    lengths = np.array([len(source) + 1 for source in sources])
    tokens = np.fromiter(itertools.chain.from_iterable((*source, EOS_ID) for source in sources), dtype=np.int64)
    longest = int(lengths.max())
    packed = pack_side(tokens, lengths, size=len(tokens), offset_count=len(sources) + 1, max_length=longest)
    packed = packed.to(model.embedding.device)
    memory_TD = model.encode(packed)
    starts = torch.from_numpy(np.repeat(np.arange(len(sources)) * longest, lengths)).to(memory_TD.device)
    memory_BSD = memory_TD.new_zeros(len(sources) * longest, memory_TD.shape[1])
    memory_BSD[starts + packed.positions_T] = memory_TD
    mask_BS = torch.zeros(len(sources), longest).masked_fill_(
        torch.from_numpy(np.arange(longest) >= lengths[:, None]), -torch.inf
    )
    return memory_BSD.unflatten(0, (-1, longest)), mask_BS.unsqueeze(1).to(memory_TD)


def _rows(tokens_NjT: torch.Tensor, index_Nk: torch.Tensor) -> torch.Tensor:
    """Histories `index` of each sentence, shape (N, k, T)."""
    return tokens_NjT.gather(1, index_Nk.unsqueeze(2).expand(-1, -1, tokens_NjT.shape[2]))
