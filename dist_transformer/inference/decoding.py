"""Settings of decoding and of the model that decodes, for flags, files and Python. The defaults are the paper's."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from dist_transformer.config.schema import (
    FlagRules,
    require,
    require_fraction,
    require_not_negative,
    require_positive,
    setting,
)
from dist_transformer.data.text.protect import KINDS

Precision = Literal["fp32", "bf16", "int8"]
"""Arithmetic. int8 means products of integers in a search; all other operations are in bf16 or fp32."""

# Padded source tokens times beam size. CPU: `base` in fp32 decodes 5.5, 5.6 and 5.9 sentences per CPU second at 4,096,
# 8,192 and 16,384, where outputs as long as their sources take 0.4 GB. CUDA, by calculation: 2,048 hypotheses of
# sentences of up to 31 tokens, for which `base` in bf16 keeps 2.3 GB, and 0.8 GB for the probabilities of 37k words.
BATCH_TOKENS = {"cpu": 16_384, "cuda": 65_536}
"""Default of `batch_tokens` by the kind of device."""
# Samples of a line for the choice among them. Time grows with the square of their number.
_MOST_SAMPLES = 1000
# Least probability of the tokens of these samples; Freitag et al. 2023 found it best.
_EPSILON_OF_MBR = 0.02


@dataclass(frozen=True, kw_only=True, slots=True)
class Loading:
    """The model."""

    direction: str | None = None
    """Direction such as en-de; required if the model has several."""
    tags: tuple[str, ...] | None = setting(None, flag="tag")
    """Tags in front of every source, instead of the direction's."""
    precision: Precision | None = None
    """Arithmetic; int8 is the fastest on a CPU; default: bf16 if the processor has instructions for it, else fp32."""
    device: str | None = None
    """cpu, cuda or, for a single process, cuda:N; default: cuda if there is one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ExactLoading(Loading):
    """The model."""

    precision: Precision = "fp32"
    """Arithmetic; int8 is the fastest on a CPU."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Search:
    """Beam search."""

    beam: int = 4
    """Living hypotheses in each step of the search; 1 is greedy."""
    length_penalty: float = 0.6
    """Exponent of the length penalty: 0 compares log probabilities, 1 nearly their mean per token."""
    max_extra_tokens: int = 50
    """Tokens that the longest output has more than its source."""
    no_repeat_ngram_size: int | None = None
    """Let no sequence of this many tokens come twice in a translation; default: any may."""
    repetition_penalty: float = 1.0
    """Multiply log probabilities of tokens that the translation has already by this; 1 changes nothing."""
    protect: tuple[str, ...] = setting((), commas=True)
    """Keep spans of these kinds as they are, separated by commas: urls, emails, numbers, placeholders such as {name},
    %s and <x1/>."""
    missing_spans: Literal["append", "leave"] = "append"
    """Place of protected spans that the model leaves out: the end, or none."""
    recase: Literal["no", "auto"] = "no"
    """Translate a line in capitals in the usual case, and put its translation in capitals."""
    terms: Path | None = None
    """File with a source term, a tab and its target term per line: the translations of lines that have the former
    should have the latter."""
    batch_tokens: int | None = None
    """Padded source tokens of a batch times beam; default: 16384 on a CPU, 65536 on a GPU."""

    def __post_init__(self) -> None:
        for kind in self.protect:
            require(kind in KINDS, "protect", kind, f"choose among {', '.join(KINDS)}")
        require_positive(self, "beam", "batch_tokens", "no_repeat_ngram_size")
        # With a penalty below 0 a longer hypothesis could gain by losing probability: the stopping rule would be wrong.
        require_not_negative(self, "length_penalty", "max_extra_tokens")
        # Below 1 a hypothesis could gain by growing: the stopping rule would be wrong, too.
        least = "it must be at least 1, which changes nothing; 1.1 is usual"
        require(1 <= self.repetition_penalty < math.inf, "repetition_penalty", self.repetition_penalty, least)


@dataclass(frozen=True, kw_only=True, slots=True)
class SearchOrMbr(Search):
    """Decoding."""

    split_over: int | Literal["no"] | None = None
    """Split lines of several sentences with more tokens than this; no: only lines that are too long for the model;
    default: all, if less than 2% of the training's lines had several, otherwise those with more than any of them."""
    mbr: int | None = None
    """Draw this number of samples of each line, and take the one with the best mean utility, instead of a search."""
    utility: Literal["chrf", "bleu"] = "chrf"
    """Similarity of two samples for the choice of mbr."""
    epsilon: float | None = None
    """Sample only tokens of this probability or more; default: all, or 0.02 with mbr."""
    seed: int = 1
    """Seed of all random choices."""

    def __post_init__(self) -> None:
        Search.__post_init__(self)
        most = f"set 2 to {_MOST_SAMPLES:,} samples per line, 100 is usual"
        require(self.mbr is None or 2 <= self.mbr <= _MOST_SAMPLES, "mbr", self.mbr, most)
        if self.mbr is not None and self.epsilon is None:
            object.__setattr__(self, "epsilon", _EPSILON_OF_MBR)
        require_positive(self, "split_over")
        require_fraction(self, "epsilon")
        require_not_negative(self, "seed")


@dataclass(frozen=True, kw_only=True, slots=True)
class Decoding(SearchOrMbr):
    """Decoding."""

    nbest: int | None = None
    """Give this number of translations per line with their scores, best first; default: the best, as plain text."""
    alignment: bool = False
    """Write which words of a line became which words of its translation, as pairs such as 0-0 1-2."""
    markup: Literal["html"] | None = None
    """Translate the text between tags, and set the tags around the words that belong to theirs; default: tags are
    text."""
    sample: bool = False
    """Draw each token from the model, instead of a search."""
    distinct: bool = False
    """Replace a sample whose text was drawn before by a further one."""
    top_k: int | None = None
    """Sample from this number of most probable tokens; default: all."""
    top_p: float | None = None
    """Sample from the most probable tokens that have together at least this probability; default: all."""
    temperature: float = 1.0
    """Sample from p^(1 / temperature): below 1 probable tokens become more probable, above 1 less."""
    least_growth: int = setting(4, python_only=True)
    """Tokens by which a living hypothesis may still grow and win, when a quarter of its own are fewer."""

    def __post_init__(self) -> None:
        SearchOrMbr.__post_init__(self)
        require_positive(self, "nbest", "top_k", "top_p", "temperature")
        require(self.top_p is None or self.top_p <= 1, "top_p", self.top_p, "it must be a probability, up to 1")
        most = self.results if self.sample else self.mbr or self.beam
        of = "samples of mbr" if self.mbr else "hypotheses of beam"
        require(self.results <= most, "nbest", self.nbest, f"it must be 1 up to the {most:,} {of}")

    @property
    def results(self) -> int:
        """Number of translations of a line."""
        return 1 if self.nbest is None else self.nbest

    @property
    def samples(self) -> int:
        """Number of samples of a line; 0: a search."""
        return self.mbr or (self.results if self.sample else 0)


RULES = FlagRules(
    needs={
        "--top-k --top-p --temperature --distinct": "--sample",
        "--distinct": "--nbest",
        # Only the scores of samples depend on it.
        "--length-penalty with --sample": "--nbest",
        "--epsilon": "--sample --mbr",
        "--utility": "--mbr",
        "--seed": "--sample --mbr",
        "--missing-spans": "--protect",
        "--alignment": "--nbest",
    },
    conflicts={
        ("--beam --no-repeat-ngram-size --repetition-penalty", "--sample"): "which draws samples without a search",
        ("--beam --length-penalty --no-repeat-ngram-size --repetition-penalty", "--mbr"): (
            "which draws samples without a search"
        ),
        ("--markup", "--nbest --alignment --sample --mbr"): "which are for text without tags",
        ("--sample", "--mbr"): "which draws samples of its own",
    },
)
"""When the flags of `Decoding` have an effect."""
