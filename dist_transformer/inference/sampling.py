"""Sampling: each token of a translation is drawn from the model, for back-translation.

    P(token) ∝ p(token)^(1 / temperature)   among the tokens that are left

`top_k` leaves the k most probable tokens, `top_p` the fewest most probable ones that have together at least this
probability (the nucleus of Holtzman et al. 2020), and `epsilon` those of at least this probability (Hewitt et al. 2022,
section 4.1). Together they leave what each of them leaves. All go by p at temperature 1, and the most probable token is
always left.

Back-translated text is more useful for training if it is sampled, without a limit or from the 10 most probable tokens,
than if it is the result of beam search (Edunov et al. 2018, section 3).

Random numbers are a pure function of the seed and of a sample's key (its line, part and number). Each sample has a
generator of its own, whose t-th number draws token t. So a line has the same samples in any batch and on any number of
ranks, and its first ones do not depend on how many there are.
The intervals of the candidates are ordered by token id, not by probability. A rounding error then moves the border
between two candidates only by its own size, and changes a sample only if a random number is that close to a border.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch.nn import functional

from dist_transformer.data.vocabulary.tokenizer import BOS_ID, EOS_ID
from dist_transformer.inference.batches import Running, evaluating, largest
from dist_transformer.inference.beam import Hypothesis
from dist_transformer.inference.decoding import Decoding
from dist_transformer.inference.ensemble import DecodingModel
from dist_transformer.inference.prefixes import Prefixes

# Logits that are computed at a time; without top_k each of them takes 28 bytes.
_ELEMENTS = {"cpu": 2**19, "cuda": 2**27}
# Draws per distinct sample, at most.
_MOST_TRIES = 10


def sample_several(
    model: DecodingModel,
    sources: Sequence[Sequence[int]],
    keys: Sequence[tuple[int, ...]],
    *,
    settings: Decoding,
    text_of: Callable[[Sequence[int]], str],
    prefixes: Prefixes | None = None,
    **how: Any,
) -> list[list[Hypothesis]]:
    """Draw `settings.samples` outputs for each source, in the order of their numbers.

    The number of a sample, from 0, is the last part of its key. Distinct samples are the first ones of their texts; a
    source has fewer if ten times as many samples have no more texts.

    Args:
        text_of: decodes the tokens of an output, to find equal texts.
        prefixes, how: as for `sample`.
    """
    found: list[dict[str | int, Hypothesis]] = [{} for _ in sources]
    for drawn in range(0, settings.samples * (_MOST_TRIES if settings.distinct else 1), settings.samples):
        numbers = range(drawn, drawn + settings.samples)
        rows = [(i, number) for i, each in enumerate(found) if len(each) < settings.samples for number in numbers]
        outputs = sample(
            model,
            [sources[i] for i, _ in rows],
            [(*keys[i], number) for i, number in rows],
            settings=settings,
            prefixes=prefixes and Prefixes(prefixes.texts, [prefixes.rows[i] for i, _ in rows]),
            **how,
        )
        for (i, number), output in zip(rows, outputs, strict=True):
            found[i].setdefault(text_of(output.tokens) if settings.distinct else number, output)
    return [list(each.values())[: settings.samples] for each in found]


def sample(
    model: DecodingModel,
    sources: Sequence[Sequence[int]],
    keys: Sequence[tuple[int, ...]],
    *,
    settings: Decoding,
    **how: Any,
) -> list[Hypothesis]:
    """Draw one output for each source, in order.

    `<pad>`, `<unk>`, `<s>` and the tokens `never` (the vocabulary's tags) are never drawn. An output of
    len(source) + max_extra_tokens tokens must end.

    Args:
        sources: token ids without special tokens, each shorter than the model's `max_positions`.
        keys: key of each sentence, which seeds its random numbers.
        settings: the distribution to draw from. `length_penalty` affects the scores alone.
        how: `never`, `prefixes` and `linear` of `Running`. Until its prefix is covered, an output is drawn from the
            tokens that are allowed, in proportion to their probabilities.

    Returns:
        Outputs with their log probabilities under the model, over all tokens and without temperature.
    """
    if not sources:
        return []
    with evaluating(model), torch.inference_mode():
        return _Sampler(model, sources, keys, settings, **how).run()


class _Sampler(Running):
    """Sampling of sentences that begin together; those that are done leave the batch."""

    def __init__(
        self,
        model: DecodingModel,
        sources: Sequence[Sequence[int]],
        keys: Sequence[tuple[int, ...]],
        settings: Decoding,
        **how: Any,
    ) -> None:
        super().__init__(model, sources, settings, slots=len(sources), beam_size=1, **how)
        numbers = [np.random.default_rng([settings.seed, *key]).random(self.longest) for key in keys]
        self.numbers_NT = torch.from_numpy(np.stack(numbers)).to(self.device)
        self.begin_sentences(torch.arange(len(sources), device=self.device), range(len(sources)))

    def run(self) -> list[Hypothesis]:
        count = len(self.limits)
        tokens: list[list[int]] = [[] for _ in range(count)]
        total_N, sentences_N, is_cut_N = np.zeros(count), np.arange(count), np.zeros(count, dtype=bool)
        last_N = torch.full((count,), BOS_ID, device=self.device)
        step = 0
        while len(sentences_N):
            hidden_ND = self.model.decode_step(last_N, self.state)
            ends_only_N = torch.from_numpy(self.limits[sentences_N] <= step).to(self.device)
            last_N, logp_N, is_cut = self._draw(hidden_ND, self.numbers_NT[:, step], ends_only_N)
            if step < len(self.given):
                last_N, logp_N = torch.full_like(last_N, self.given[step]), torch.zeros_like(logp_N)
            self.end_step(torch.zeros_like(last_N).unsqueeze(1), last_N.unsqueeze(1))
            drawn_N = last_N.cpu().numpy()
            total_N[sentences_N] += logp_N.double().cpu().numpy()
            is_cut_N[sentences_N] = is_cut.cpu().numpy()
            kept_N = drawn_N != EOS_ID
            for sentence, token in zip(sentences_N[kept_N], drawn_N[kept_N], strict=True):
                tokens[sentence].append(int(token))
            if not kept_N.all():
                order, order_N = self.keep_slots(kept_N)
                sentences_N = sentences_N[order]
                self.numbers_NT, last_N = self.numbers_NT[order_N], last_N[order_N]
            step += 1
        penalties = [((5 + len(one) + 1) / 6) ** self.settings.length_penalty for one in tokens]
        return [
            Hypothesis(tokens=one, score=float(total / penalty), log_probability=float(total), is_cut=bool(is_cut))
            for one, total, penalty, is_cut in zip(tokens, total_N, penalties, is_cut_N, strict=True)
        ]

    def _draw(
        self, hidden_ND: torch.Tensor, numbers_N: torch.Tensor, ends_only_N: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Draw tokens; return them, their log probabilities under the model, and which ones replace another token.

        Each has the shape (N,). At the maximum length, `</s>` replaces all others.
        """
        rows = max(1, _ELEMENTS[self.device.type] // self.model.config.output_size)
        adjust = self.adjustment(rows=1)
        tokens, values, cuts = [], [], []
        for start in range(0, len(hidden_ND), rows):
            part = slice(start, start + rows)
            logits_RV = self.model.project(hidden_ND[part], self.state.linear)
            logp_RV = torch.log_softmax(logits_RV.float(), dim=-1)
            open_RV = logp_RV.index_fill(1, self.never, -torch.inf)
            if adjust is not None:
                open_RV = adjust(logits_RV, open_RV, part)
            token_R = draw(open_RV, numbers_N[part], self.settings)
            ends_R = ends_only_N[part]
            cuts.append(ends_R & (token_R != EOS_ID))
            token_R = torch.where(ends_R, EOS_ID, token_R)
            tokens.append(token_R)
            values.append(logp_RV.gather(1, token_R.unsqueeze(1)).squeeze(1))
        return torch.cat(tokens), torch.cat(values), torch.cat(cuts)


def draw(logp_RV: torch.Tensor, numbers_R: torch.Tensor, settings: Decoding) -> torch.Tensor:
    """Draw one token from each row of log probabilities, shape (R,).

    Args:
        logp_RV: log probabilities; -inf for tokens that must not be drawn.
        numbers_R: fp64 random numbers in [0, 1): the point of the cumulative distribution that selects the token.
    """
    vocabulary = logp_RV.shape[1]
    logp_RV = _truncated(logp_RV, settings)
    if settings.top_k is None or settings.top_k >= vocabulary:
        value_RX, token_RX = logp_RV, None
    else:
        token_RX = largest(logp_RV, settings.top_k)[1].sort(dim=1).values
        value_RX = logp_RV.gather(1, token_RX)
    # The largest is scaled to 1 first; otherwise all powers would be 0 at a low temperature.
    power_RX = ((value_RX - value_RX.amax(1, keepdim=True)).double() / settings.temperature).exp()
    sums_RX = power_RX.cumsum(1)
    place_R1 = (sums_RX <= numbers_R.unsqueeze(1) * sums_RX[:, -1:]).sum(1, keepdim=True)
    # A number that rounds up to the whole sum belongs to the last token.
    place_R1 = place_R1.clamp(max=sums_RX.shape[1] - 1)
    return (place_R1 if token_RX is None else token_RX.gather(1, place_R1)).squeeze(1)


def _truncated(logp_RV: torch.Tensor, settings: Decoding) -> torch.Tensor:
    """Exclude the tokens that `top_p` and `epsilon` leave out, by their probabilities among all that may be drawn."""
    if settings.top_p is None and settings.epsilon is None:
        return logp_RV
    p_RV = logp_RV.double().softmax(1)
    if settings.epsilon is not None:
        is_out_RV = (p_RV < settings.epsilon) & (p_RV < p_RV.amax(1, keepdim=True))
        logp_RV = logp_RV.masked_fill(is_out_RV, -torch.inf)
    if settings.top_p is not None:
        sorted_RV, order_RV = p_RV.sort(dim=1, descending=True, stable=True)
        before_RV = functional.pad(sorted_RV.cumsum(1)[:, :-1], (1, 0))
        is_out_RV = torch.empty_like(before_RV, dtype=torch.bool).scatter_(1, order_RV, before_RV >= settings.top_p)
        logp_RV = logp_RV.masked_fill(is_out_RV, -torch.inf)
    return logp_RV
