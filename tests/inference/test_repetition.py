"""Rules against loops, as transformers' own processors of logits apply them to a plain search."""

import pytest
import torch

from dist_transformer.base.errors import UserError
from dist_transformer.inference.beam import Hypothesis, beam_search
from dist_transformer.inference.decoding import Decoding
from dist_transformer.model.transformer import Transformer
from tests.inference.test_beam import BOS, EOS, assert_same, make_model, make_sources, packed, plain_search

# A machine whose GPU is tested may lack it.
transformers = pytest.importorskip("transformers")


@torch.no_grad()
def by_transformers(model: Transformer, source: list[int], settings: Decoding) -> list[Hypothesis]:
    memory_SD = model.encode(packed([[*source, EOS]]))
    rules = transformers.LogitsProcessorList()
    if settings.repetition_penalty != 1:
        rules.append(transformers.RepetitionPenaltyLogitsProcessor(settings.repetition_penalty))
    if settings.no_repeat_ngram_size is not None:
        rules.append(transformers.NoRepeatNGramLogitsProcessor(settings.no_repeat_ngram_size))

    def logp_of(rows: list[list[int]]) -> torch.Tensor:
        one_source, targets = packed([[*source, EOS]] * len(rows)), packed([[BOS, *tokens] for tokens in rows])
        hidden_TD = model.decode(targets, memory_SD.repeat(len(rows), 1), one_source)
        logits = model.logits(hidden_TD[len(rows[0]) :: len(rows[0]) + 1]).float()
        logp, known = torch.log_softmax(logits, dim=-1), torch.tensor([[BOS, *tokens] for tokens in rows])
        return rules(known, logits) - (logits - logp) if settings.beam == 1 else rules(known, logp)

    return plain_search(logp_of, settings, len(source) + settings.max_extra_tokens)


@pytest.mark.parametrize("beam", [1, 3])
@pytest.mark.parametrize("slots", [None, 2])
@pytest.mark.parametrize(
    "rules",
    [
        {"no_repeat_ngram_size": 1},
        {"no_repeat_ngram_size": 2},
        {"repetition_penalty": 1.3},
        {"no_repeat_ngram_size": 3, "repetition_penalty": 1.1},
    ],
)
def test_equals_transformers(rules: dict[str, float], slots: int | None, beam: int) -> None:
    model, sources = make_model(), make_sources(6)
    settings = Decoding(beam=beam, nbest=beam, max_extra_tokens=10, **rules)  # type: ignore[arg-type]
    found = beam_search(model, sources, settings=settings, slots=slots)
    assert_same(found, [by_transformers(model, source, settings) for source in sources])
    plain = beam_search(model, sources, settings=Decoding(beam=beam, nbest=beam, max_extra_tokens=10), slots=slots)
    assert [[one.tokens for one in row] for row in found] != [[one.tokens for one in row] for row in plain]


@pytest.mark.parametrize("penalty", [0.9, float("inf"), float("nan")])
def test_a_penalty_below_1_is_refused(penalty: float) -> None:
    with pytest.raises(UserError, match=r"repetition_penalty .* must be at least 1"):
        Decoding(repetition_penalty=penalty)
