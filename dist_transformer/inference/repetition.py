"""Rules against loops: no n-gram twice, and a penalty for tokens that a hypothesis has already (Keskar et al. 2019).

They are those of the transformers library: the penalty changes log probabilities in a beam search, and logits in a
greedy one, where positive ones are divided by it.
"""

from collections.abc import Callable

import torch

from dist_transformer.inference.decoding import Search

Adjust = Callable[[torch.Tensor, torch.Tensor, slice], torch.Tensor]
"""Takes logits and log probabilities of next tokens, shape (R, V), and their rows among all hypotheses; returns the log
probabilities as they are to be."""


class Repetition:
    """Tokens of k hypotheses in each of N slots, and what their next tokens must not repeat.

    Args:
        longest: room for the tokens of a hypothesis, C.
    """

    def __init__(self, settings: Search, *, slots: int, longest: int, device: torch.device) -> None:
        self._penalty, self._size = settings.repetition_penalty, settings.no_repeat_ngram_size
        self._is_greedy = settings.beam == 1
        self._tokens_NkC = torch.zeros((slots, settings.beam, longest), dtype=torch.int64, device=device)

    def adjustment(self, positions_N: torch.Tensor, *, rows: int) -> Adjust:
        """Return what applies the rules to the first `rows` hypotheses of each slot.

        Args:
            positions_N: number of tokens of the hypotheses of each slot.
        """
        tokens_NkC, count_N11 = self._tokens_NkC[:, :rows], positions_N[:, None, None]
        places_C = torch.arange(tokens_NkC.shape[2], device=tokens_NkC.device)
        known_NkC = (places_C < count_N11).expand_as(tokens_NkC)
        seen_BC = tokens_NkC.where(known_NkC, -1).flatten(0, 1)
        again_BC = None
        if self._size is not None:
            # The token at a place completes an n-gram again if the n - 1 tokens before it are the last n - 1.
            again_NkC = known_NkC & (places_C >= self._size - 1) & (count_N11 >= self._size)
            for back in range(1, self._size):
                last_Nk1 = tokens_NkC.gather(2, (count_N11 - back).clamp(min=0).expand(-1, rows, 1))
                again_NkC &= tokens_NkC.roll(back, dims=2) == last_Nk1
            again_BC = tokens_NkC.where(again_NkC, -1).flatten(0, 1)

        def adjust(logits_RV: torch.Tensor, logp_RV: torch.Tensor, part: slice) -> torch.Tensor:
            if self._penalty != 1:
                value_RV = logits_RV if self._is_greedy else logp_RV
                punished_RV = torch.where(value_RV < 0, value_RV * self._penalty, value_RV / self._penalty)
                logp_RV = torch.where(_marked(seen_BC[part], logp_RV), logp_RV + punished_RV - value_RV, logp_RV)
            return logp_RV if again_BC is None else logp_RV.masked_fill(_marked(again_BC[part], logp_RV), -torch.inf)

        return adjust

    def advance(self, positions_N: torch.Tensor, parents_Nk: torch.Tensor, tokens_Nk: torch.Tensor) -> None:
        """Continue each place of the beam from the hypothesis that was at place `parents`, with a token more."""
        self._tokens_NkC.copy_(self._tokens_NkC.gather(1, parents_Nk.unsqueeze(2).expand_as(self._tokens_NkC)))
        self._tokens_NkC.scatter_(2, positions_N[:, None, None].expand(*tokens_Nk.shape, 1), tokens_Nk.unsqueeze(2))

    def keep(self, order_N: torch.Tensor) -> None:
        """Keep the sentences `order`."""
        self._tokens_NkC = self._tokens_NkC[order_N]


def _marked(tokens_RC: torch.Tensor, like_RV: torch.Tensor) -> torch.Tensor:
    """Return which entries of the vocabulary are among the tokens of each row, shape (R, V)."""
    rows, vocabulary = like_RV.shape
    marked = torch.zeros((rows, vocabulary + 1), dtype=torch.bool, device=like_RV.device)
    # The last column takes what stands for no token.
    return marked.scatter_(1, tokens_RC.where(tokens_RC >= 0, vocabulary), True)[:, :-1]
