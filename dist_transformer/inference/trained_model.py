"""A trained model in memory: translate, score and read attention from Python."""

import os
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import torch

from dist_transformer.base.errors import UserError
from dist_transformer.config.command_line import read_keywords
from dist_transformer.data.text.pairs import refuse_surrogates
from dist_transformer.data.vocabulary.tokenizer import Vocabulary
from dist_transformer.inference.aligned.alignment import align, link_tokens
from dist_transformer.inference.attention_maps import Attention, attention_of
from dist_transformer.inference.decoding import RULES, Decoding, ExactLoading
from dist_transformer.inference.ensemble import DecodingModel
from dist_transformer.inference.loading import load_joint
from dist_transformer.inference.scoring import PairScore, encode_pairs, longest_line, refuse_long, score_pairs
from dist_transformer.inference.translation import Alignment, ScoredText, count_notes, noted
from dist_transformer.inference.translator import Translator
from dist_transformer.model.products import Products
from dist_transformer.model_folder import ModelInfo
from dist_transformer.runtime.device import find_device

Lines: TypeAlias = str | Iterable[str]
"""Lines of text: a str, which may have several, or a list or other iterable of them."""


@dataclass(frozen=True, slots=True)
class TrainedModel:
    """A model, or an ensemble, in memory; `dist_transformer.load` makes it."""

    model: DecodingModel
    tokenizer: Vocabulary
    info: ModelInfo
    device: torch.device
    _products: Products = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_products", Products(in_int8=self.model.in_int8))

    @classmethod
    def load(cls, path: str | os.PathLike[str] | Sequence[str | os.PathLike[str]], **settings: Any) -> "TrainedModel":
        """Load a model folder, or several as an ensemble.

        Args:
            path: folder that `average` wrote. Those of a list become an ensemble: each step of a search, and each
                score, uses the mean of the models' probabilities, with shares if paths end with `:2`. They must have
                one vocabulary.
            settings: `device`: `cpu`, `cuda` or `cuda:N`; default: a GPU if there is one.
                `precision`: `fp32` (the default), `bf16`, or `int8`: translation multiplies integers, on a CPU; the
                rest is in bf16 or fp32.
                `direction`: direction such as `en-de`; required if the model has several.
                `tags`: tags in front of every source, instead of the direction's.

        Raises:
            UserError: a model folder is damaged, the device cannot be used, there is no such direction, or the models
                of an ensemble have different vocabularies.
        """
        loading = read_keywords(ExactLoading, settings, "load", also=("path",)).build(ExactLoading)
        paths = [path] if isinstance(path, str | os.PathLike) else list(path)
        if not paths:
            raise UserError("path has no model folder: pass at least one")
        device = find_device(loading.device)
        return cls(*load_joint(list(map(Path, paths)), loading, device), device)

    def translate(self, lines: Lines, *, prefixes: Lines | None = None, **settings: Any) -> Any:
        """Translate lines, as the command `translate` does.

        Args:
            lines: a str, which may have several lines, or a list or other iterable of lines; a blank line gives a blank
                one.
            prefixes: text that each translation begins with, as the target vocabulary normalizes it: a str for the
                lines of a str, or a list, with an empty one for no prefix. It may end inside a word. A line whose
                prefix has several sentences is translated as a whole.
            settings: those of the class `Decoding`, with the names and defaults of the command's flags.
                Search: `beam`, living hypotheses; 1 is greedy. `length_penalty`, exponent of the length penalty.
                `max_extra_tokens`, maximum number of tokens that an output has more than its source.
                `nbest`: the best translations per line with their scores, log p divided by ((5 + length) / 6) to the
                power of `length_penalty`.
                `batch_tokens`: padded source tokens of a batch times beam.
                `split_over`: lines of several sentences with more tokens are split at the ends of the sentences, and a
                warning counts them. By default all, if the model was trained on less than 2% of such lines, otherwise
                those with more than any source in the training; `"no"`: only lines that are too long for the model.
                `markup`: `"html"`: set tags around the words that belong to theirs; each line is a document, and so is
                a str. `terms`: file with a source term, a tab and its target term per line.
                `alignment`: with `nbest`, align the words of a line and its translations (`ScoredText.alignment`).
                `sample`, `top_k`, `top_p`, `epsilon`, `temperature`, `distinct`, `seed`: see `sample`. `mbr`,
                `utility`: see `mbr`.

        A warning counts the translations that were cut at the maximum length, too.

        Returns:
            A str for a str, and a list of str for lines. With `nbest`, `sample` or `mbr`, a list of `ScoredText` for
            each line, best first or in the order in which they were drawn.

        Raises:
            UserError: lines or prefixes that are no text of one line each, a setting out of range or without effect,
                weights that are not finite, or a prefix that does not fit its line.
        """
        return self._translate("translate", lines, prefixes, **settings)

    def sample(
        self, lines: Lines, *, samples: int = 1, prefixes: Lines | None = None, **settings: Any
    ) -> list[list[ScoredText]]:
        """Draw translations of lines from the model, as the command `translate --sample` does.

        Args:
            samples: samples per line, in the order in which they are drawn.
            prefixes: as for `translate`.
            settings: `top_k`: number of most probable tokens to draw from. `top_p`: draw from the most probable tokens
                that have together at least this probability. `epsilon`: draw from tokens of at least this probability.
                `temperature`: draw from p^(1 / temperature).
                `distinct`: replace a sample whose text was drawn before by a further one.
                `seed`: seed of the random numbers, which depend on the line's number and the sample's number otherwise.
                `length_penalty`, of the score, `max_extra_tokens`, `batch_tokens`, `split_over`: as for `translate`.

        Raises:
            UserError: `translate` would raise it.
        """
        return self._translate("sample", lines, prefixes, sample=True, nbest=samples, **settings)

    def mbr(
        self, lines: Lines, *, samples: int, prefixes: Lines | None = None, **settings: Any
    ) -> list[list[ScoredText]]:
        """Choose among samples of each line by their expected utility, as the command `translate --mbr` does.

        Args:
            samples: samples per line, which are also each other's references.
            prefixes: as for `translate`.
            settings: `utility`: `chrf` or `bleu`, sacreBLEU's score of a sentence.
                `nbest`: texts per line, best first; the score is the expected utility, 0 to 100.
                `epsilon`: least probability of the tokens of a sample. `seed`: seed of the samples.
                `max_extra_tokens`, `batch_tokens`, `split_over`: as for `translate`.

        Raises:
            UserError: `translate` would raise it.
        """
        return self._translate("mbr", lines, prefixes, mbr=samples, **settings)

    def _translate(self, method: str, lines: Lines, prefixes: Lines | None, **settings: Any) -> Any:
        decoding = read_keywords(Decoding, settings, method, also=("prefixes",)).build(Decoding, rules=RULES)
        translator = Translator(self.model, self.tokenizer, self.device, decoding, self.info, products=self._products)
        begun = None if prefixes is None else _as_lines("prefixes", prefixes, split=True)
        if decoding.markup is None:
            texts = _as_lines("lines", lines, split=True)
        else:
            texts = _as_texts("lines", [lines] if isinstance(lines, str) else lines)
        translations = translator.translate(texts, prefixes=begun)
        for note in noted(count_notes(translations)):
            # Of the line that called the method.
            warnings.warn(note, stacklevel=3)
        if decoding.nbest is not None or decoding.samples:
            return [list(translation.hypotheses) for translation in translations]
        texts = [translation.text for translation in translations]
        return "\n".join(texts) if isinstance(lines, str) else texts

    def score(self, src: Iterable[str], tgt: Iterable[str], *, batch_tokens: int | None = None) -> list[PairScore]:
        """Compute log p(tgt[i] | src[i]) as a sum and per token, in natural logarithms.

        Raises:
            UserError: the lists differ in length, or a line has more tokens than the model has room for.
        """
        src, tgt = _equally_many(src, tgt)
        model, tags = self.model, self.info.direction.tags
        return score_pairs(model, self.tokenizer, src, tgt, device=self.device, tags=tags, batch_tokens=batch_tokens)

    def align(self, src: Iterable[str], tgt: Iterable[str]) -> list[Alignment]:
        """Align given translations: which words of src[i] became which ones of tgt[i].

        Raises:
            UserError: `score` would raise it.
        """
        (src, tgt), tags = _equally_many(src, tgt), self.info.direction.tags
        pairs = encode_pairs(self.tokenizer, src, tgt, tags)
        refuse_long(self.model, pairs, first_line=1)
        linked = link_tokens(self.model, pairs, front=len(self.tokenizer.fronts(tags)[0]))
        return [
            align(self.model, self.tokenizer, *each)
            for each in zip(zip(src, tgt, strict=True), pairs, linked, strict=True)
        ]

    def attention(self, src: str, tgt: str) -> Attention:
        """Return the attention of every layer and head while the model reads `src` and produces `tgt`.

        Raises:
            UserError: a sentence has more tokens than the model has room for, or the model is an ensemble.
        """
        ((source, target),) = encode_pairs(self.tokenizer, [src], [tgt], self.info.direction.tags)
        longest = longest_line(self.model)
        if max(len(source), len(target)) > longest:
            raise UserError(f"the model has room for {longest:,} tokens of each sentence: use shorter sentences")
        return attention_of(self.model, self.tokenizer, source, target)


def _equally_many(src: Iterable[str], tgt: Iterable[str]) -> tuple[list[str], list[str]]:
    src, tgt = _as_lines("src", src), _as_lines("tgt", tgt)
    if len(src) != len(tgt):
        raise UserError(f"src and tgt must have the same number of lines ({len(src):,} and {len(tgt):,})")
    return src, tgt


def _as_lines(name: str, values: Lines, *, split: bool = False) -> list[str]:
    """Make a list of lines; a line may end with a line break, as lines of a file do.

    Args:
        split: whether a str is several lines.

    Raises:
        UserError: the argument `name` is something else.
    """
    texts = _as_texts(name, values.split("\n") if split and isinstance(values, str) else values)
    lines = [text.removesuffix("\n").removesuffix("\r") for text in texts]
    for place, line in enumerate(lines):
        if "\n" in line:
            raise UserError(f"{name}[{place}] has several lines: pass them one by one, as by text.split('\\n')")
    return lines


def _as_texts(name: str, values: Iterable[str]) -> list[str]:
    # Python would read a str as a list of characters.
    if isinstance(values, str | bytes) or not isinstance(values, Iterable):
        found = "a string" if isinstance(values, str) else f"{values!r:.60}"
        raise UserError(f"{name} is {found}: pass a list of lines")
    texts = list(values)
    for place, text in enumerate(texts):
        if not isinstance(text, str):
            raise UserError(f"{name}[{place}] is {text!r:.60}, which is not a str: pass text, or leave it out")
        refuse_surrogates(text, f"{name}[{place}]")
    return texts
