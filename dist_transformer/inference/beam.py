"""Beam search with the length penalty of GNMT (section 6.1), batched over sentences.

    score(y) = log P(y | x) / lp(|y|),   lp(n) = ((5 + n) / 6)^α          (Wu et al. 2016, equation 14)

|y| counts the `</s>`. Each step extends the k living hypotheses of a sentence and takes the best 2k extensions. Those
that end with `</s>` compete for the k finished places by score, and the best k others are the next living hypotheses.
At most k extensions can end, so k always remain. Equal numbers are ordered by place in the beam, then by token id.

log P only falls and lp only grows, so a living hypothesis of n tokens scores at most log P / lp(m + 1) when it ends
with m tokens. The search of a sentence ends when this is too little with m = n + max(⌊n / 4⌋, 4). With the longest m
instead (tensor2tensor; here a large `least_growth`) nothing is lost for certain, but the search takes up to a third
more steps, in which almost no hypothesis wins.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.nn import functional

from dist_transformer.data.vocabulary.tokenizer import BOS_ID, EOS_ID, PAD_ID
from dist_transformer.inference.batches import Running, best_extensions, evaluating
from dist_transformer.inference.decoding import Decoding
from dist_transformer.inference.ensemble import DecodingModel

# Steps between checks for sentences that are done. On CUDA a check makes the host wait for the device.
_STEPS_BETWEEN_LOOKS = {"cpu": 1, "cuda": 8}
# Steps before the recording of a CUDA graph, in which libraries initialize themselves.
_WARM_UP_STEPS = 3
# Mark of a slot without a sentence.
_IDLE = -1


@dataclass(frozen=True, kw_only=True, slots=True)
class Hypothesis:
    """Output of a search or a sample."""

    tokens: list[int]
    """Token ids without `<s>` and `</s>`."""
    score: float
    """Score log_probability / lp(len(tokens) + 1)."""
    log_probability: float
    """Log probability of the tokens and the `</s>`."""
    is_cut: bool = False
    """Whether it has the maximum length, where another token was more probable than `</s>`."""


def beam_search(
    model: DecodingModel,
    sources: Sequence[Sequence[int]],
    *,
    settings: Decoding,
    slots: int | None = None,
    **how: Any,
) -> list[list[Hypothesis]]:
    """Search for the `nbest` best hypotheses of each source, best first.

    The search of a sentence ends when its best living hypothesis would not beat the hypotheses to be returned even if
    it grew by a quarter (at least `least_growth` tokens) without losing probability. An output has at most
    len(source) + max_extra_tokens tokens. A hypothesis of this length must take `</s>` next, with the probability that
    the model gives it, and then competes like any other. `<pad>`, `<unk>`, `<s>` and the tokens `never` (the
    vocabulary's tags) are never chosen; the probabilities of the others stay the model's.

    Args:
        sources: token ids without special tokens, each shorter than the model's `max_positions`; they should be of
            similar length.
        slots: number of sentences to search at a time, in their order; the next one takes the slot of one that ended.
            All steps then have the same shapes, and on CUDA they are a graph. None: all sentences begin together, and
            steps get smaller as sentences end.
        how: `never`, `prefixes`, `given` and `linear` of `Running`.

    Returns:
        One list per source, in order. It has fewer than `nbest` hypotheses only if no more exist within the length.
    """
    if not sources:
        return []
    with evaluating(model), torch.inference_mode():
        return _Search(model, sources, settings, slots, **how).run()


@dataclass(slots=True)
class _Beams:
    """Hypotheses of N slots: k living and k ended ones, best first; c = 2k candidates, room for C tokens.

    The living hypotheses of an idle slot have a probability of 0, like those of a sentence whose search has ended, so
    further steps change nothing.
    """

    last_Nk: torch.Tensor
    """Next input token of each living hypothesis, initially `<s>`."""
    alive_NkC: torch.Tensor
    alive_logp_Nk: torch.Tensor
    ended_NkC: torch.Tensor
    ended_length_Nk: torch.Tensor
    """Lengths that count the `</s>`, which is not stored."""
    ended_logp_Nk: torch.Tensor
    ended_score_Nk: torch.Tensor
    ended_cut_Nk: torch.Tensor
    """1 if the hypothesis was cut at the maximum length, otherwise 0."""
    limit_N: torch.Tensor
    """Maximum tokens of an output, without `</s>`."""

    @classmethod
    def idle(cls, slots: int, beam_size: int, room: int, device: torch.device) -> "_Beams":
        def full(value: float, *more: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
            return torch.full((slots, *more), value, dtype=dtype, device=device)

        return cls(
            last_Nk=full(BOS_ID, beam_size),
            alive_NkC=full(PAD_ID, beam_size, room),
            alive_logp_Nk=full(-torch.inf, beam_size, dtype=torch.float32),
            ended_NkC=full(PAD_ID, beam_size, room),
            ended_length_Nk=full(0, beam_size),
            ended_logp_Nk=full(-torch.inf, beam_size, dtype=torch.float32),
            ended_score_Nk=full(-torch.inf, beam_size, dtype=torch.float32),
            ended_cut_Nk=full(0, beam_size),
            limit_N=full(0),
        )

    def begin(self, slots_n: torch.Tensor, limit_n: torch.Tensor) -> None:
        self.last_Nk.index_fill_(0, slots_n, BOS_ID)
        # All k hypotheses are `<s>`: only the first may be extended.
        self.alive_logp_Nk.index_fill_(0, slots_n, -torch.inf)[:, 0].index_fill_(0, slots_n, 0.0)
        self.ended_score_Nk.index_fill_(0, slots_n, -torch.inf)
        self.limit_N.index_copy_(0, slots_n, limit_n)

    def keep(self, order_N: torch.Tensor) -> None:
        for name in _Beams.__dataclass_fields__:
            setattr(self, name, getattr(self, name)[order_N])


class _Search(Running):
    """Search in N slots, each with one sentence and its k hypotheses."""

    def __init__(
        self,
        model: DecodingModel,
        sources: Sequence[Sequence[int]],
        settings: Decoding,
        slots: int | None,
        **how: Any,
    ) -> None:
        self.refills, count = slots is not None, min(slots or len(sources), len(sources))
        how |= {"slots": count, "beam_size": settings.beam, "fixed_shapes": self.refills}
        super().__init__(model, sources, settings, **how)
        self.results: list[list[Hypothesis]] = [[] for _ in sources]
        self.waiting = deque(range(len(sources)))
        self.sentence_of_slot = np.full(count, _IDLE)
        self.beams = _Beams.idle(count, settings.beam, self.longest, self.device)
        lengths = torch.arange(self.longest + 1, device=self.device)
        # lp(n) at place n.
        self.penalties = ((5 + lengths.float()) / 6) ** settings.length_penalty

    def run(self) -> list[list[Hypothesis]]:
        step = _recorded(self._step, self.device) if self.refills and self.device.type == "cuda" else self._step
        self._begin(np.arange(len(self.sentence_of_slot)))
        while (busy_N := self.sentence_of_slot != _IDLE).any():
            for _ in range(_STEPS_BETWEEN_LOOKS[self.device.type]):
                step()
            done_N = busy_N & (self.beams.alive_logp_Nk[:, 0] == -torch.inf).cpu().numpy()
            if done_N.any():
                self._collect(np.flatnonzero(done_N))
                if self.refills:
                    self._begin(np.flatnonzero(done_N))
                else:
                    order, order_N = self.keep_slots(~done_N)
                    self.sentence_of_slot = self.sentence_of_slot[order]
                    self.beams.keep(order_N)
        return self.results

    def _begin(self, slots: np.ndarray) -> None:
        """Put the next sentences into these slots; slots stay idle when no sentence is left."""
        slots = slots[: len(self.waiting)]
        if not len(slots):
            return
        sentences = [self.waiting.popleft() for _ in slots]
        self.sentence_of_slot[slots] = sentences
        slots_n = torch.from_numpy(slots).to(self.device)
        self.begin_sentences(slots_n, sentences)
        self.beams.begin(slots_n, torch.from_numpy(self.limits[sentences]).to(self.device))

    def _step(self) -> None:
        """Extend every living hypothesis by a token."""
        beams, beam = self.beams, self.settings.beam
        positions_N = self.state.positions_N
        # All hypotheses begin with `<s>`, so one of them shows the best extensions of the first step.
        is_first = self.state.end == 0 and 2 * beam <= self.model.config.output_size
        rows = 1 if is_first else beam
        hidden_BD = self.model.decode_step(beams.last_Nk[:, :rows].flatten(), self.state)
        logp_Nc, parent_Nc, token_Nc, is_cut_Nc = best_extensions(
            self.model,
            hidden_BD,
            beams.alive_logp_Nk[:, :rows],
            linear=self.state.linear,
            count=2 * beam,
            never=self.never,
            ends_only_N=positions_N >= beams.limit_N,
            adjust=self.adjustment(rows=rows),
        )
        for place, token in enumerate(self.given):
            # All hypotheses are still the first one.
            is_given_N1 = (positions_N == place).unsqueeze(1)
            token_Nc = token_Nc.masked_fill(is_given_N1, token)
            first_Nc = functional.pad(beams.alive_logp_Nk[:, :1], (0, 2 * beam - 1), value=-torch.inf)
            logp_Nc = torch.where(is_given_N1, first_Nc, logp_Nc)
        is_end_Nc = token_Nc == EOS_ID
        self._add_ended(logp_Nc, parent_Nc, is_end_Nc, is_cut_Nc)

        # A stable sort by "ends" leaves the others in front, in their order.
        order_Nk = is_end_Nc.byte().sort(dim=1, stable=True).indices[:, :beam]
        parent_Nk = parent_Nc.gather(1, order_Nk)
        beams.alive_logp_Nk.copy_(logp_Nc.gather(1, order_Nk))
        beams.last_Nk.copy_(token_Nc.gather(1, order_Nk))
        place_Nk1 = positions_N[:, None, None].expand(-1, beam, 1)
        alive_NkT = beams.alive_NkC[:, :, : self.state.end]
        alive_NkT.copy_(_rows(alive_NkT, parent_Nk)).scatter_(2, place_Nk1, beams.last_Nk.unsqueeze(2))
        self.end_step(parent_Nk, beams.last_Nk)
        self._give_up()

    def _add_ended(
        self, logp_Nc: torch.Tensor, parent_Nc: torch.Tensor, is_end_Nc: torch.Tensor, is_cut_Nc: torch.Tensor
    ) -> None:
        """Let candidates that end compete with the hypotheses that ended before."""
        beams = self.beams
        length_N1 = (self.state.positions_N + 1).unsqueeze(1)
        score_Nc = torch.where(is_end_Nc, logp_Nc / self.penalties[length_N1], -torch.inf)
        scores = torch.cat([beams.ended_score_Nk, score_Nc], dim=1)
        order_Nk = scores.sort(dim=1, descending=True, stable=True).indices[:, : self.settings.beam]
        beams.ended_score_Nk.copy_(scores.gather(1, order_Nk))
        beams.ended_logp_Nk.copy_(torch.cat([beams.ended_logp_Nk, logp_Nc], dim=1).gather(1, order_Nk))
        lengths = torch.cat([beams.ended_length_Nk, length_N1.expand_as(parent_Nc)], dim=1)
        beams.ended_length_Nk.copy_(lengths.gather(1, order_Nk))
        beams.ended_cut_Nk.copy_(torch.cat([beams.ended_cut_Nk, is_cut_Nc.long()], dim=1).gather(1, order_Nk))
        alive_NkT, ended_NkT = (tokens_NkC[:, :, : self.state.end] for tokens_NkC in (beams.alive_NkC, beams.ended_NkC))
        ended_NkT.copy_(_rows(torch.cat([ended_NkT, _rows(alive_NkT, parent_Nc)], dim=1), order_Nk))

    def _give_up(self) -> None:
        """End the search of each sentence whose best living hypothesis cannot win any more."""
        beams, tokens_N = self.beams, self.state.positions_N
        growth_N = (tokens_N // 4).clamp(min=self.settings.least_growth)
        length_N = torch.minimum(tokens_N + growth_N, beams.limit_N) + 1
        bound_N = beams.alive_logp_Nk[:, 0] / self.penalties[length_N]
        # Not "≥", because the search must also end if the numbers of a model are not finite.
        ends_N = ~(beams.ended_score_Nk[:, self.settings.results - 1] < bound_N)
        beams.alive_logp_Nk.masked_fill_(ends_N.unsqueeze(1), -torch.inf)

    def _collect(self, slots: np.ndarray) -> None:
        rows, beams = torch.from_numpy(slots).to(self.device), self.beams
        ended = (beams.ended_NkC, beams.ended_length_Nk, beams.ended_cut_Nk)
        columns = (*ended, beams.ended_score_Nk, beams.ended_logp_Nk)
        tokens, lengths, cuts, scores, logps = (column[rows, : self.settings.results].tolist() for column in columns)
        for i, sentence in enumerate(self.sentence_of_slot[slots]):
            self.results[sentence] = [
                Hypothesis(tokens=row[: length - 1], score=score, log_probability=logp, is_cut=bool(cut))
                for row, length, cut, score, logp in zip(
                    tokens[i], lengths[i], cuts[i], scores[i], logps[i], strict=True
                )
                if score > -torch.inf
            ]
        self.sentence_of_slot[slots] = _IDLE


def _recorded(step: Callable[[], None], device: torch.device) -> Callable[[], object]:
    """Record the step as a CUDA graph, which the host launches with one call. All slots are idle meanwhile."""
    with torch.cuda.device(device):
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(_WARM_UP_STEPS):
                step()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        # Other threads, which pin memory or watch collectives, are not affected by the recording.
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            step()
    return graph.replay


def _rows(tokens_NjC: torch.Tensor, index_Nk: torch.Tensor) -> torch.Tensor:
    """Select the token rows `index` of each sentence, shape (N, k, C)."""
    return tokens_NjC.gather(1, index_Nk.unsqueeze(2).expand(-1, -1, tokens_NjC.shape[2]))
