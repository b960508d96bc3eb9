"""Corpus scores against raw reference text, each with the signature that makes it comparable.

Compare systems by sacreBLEU's scores. Tokenised BLEU, on text that is tokenised by the rules of Moses, is the score of
papers before sacreBLEU; it depends on the tokeniser, which the signature names.
"""

import importlib.metadata
import re
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from dist_transformer.base.errors import UserError, caution
from dist_transformer.config.language_codes import base_language, bleu_tokenizer

if TYPE_CHECKING:
    from dist_transformer.inference.translation import Translation

# Same as Perl's s/(\S)-(\S)/$1 ##AT##-##AT## $2/g, which the paper's English-German scores use: a single letter between
# two hyphens belongs to the first match, and the second hyphen stays.
_HYPHEN = re.compile(r"(\S)-(\S)"), r"\1 ##AT##-##AT## \2"
_COLUMNS = 80
# Lines of tokenised text from which sacreBLEU warns.
_MANY_ENDS = 100


class Score(NamedTuple):
    """BLEU and chrF: 0 to 100, higher is better. TER: edits per 100 reference words, lower is better."""

    value: float
    signature: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Scores:
    """All scores of one set of hypotheses."""

    language: str
    lowercase: bool
    """Whether scores ignore case. `bleu_cased` never does, `ter` always does."""
    bleu_cased: Score
    bleu_lowercase: Score
    bleu_tokenized: Score | None
    """Tokenised BLEU; None for languages without spaces, such as Chinese, because Moses splits at spaces."""
    bleu_compound_split: Score | None
    """Tokenised BLEU with hyphens split from words, usually 0.7 to 1 higher; None except for German."""
    chrf: Score
    chrf_pp: Score
    """chrF++: chrF with words and pairs of words in addition to characters."""
    ter: Score

    @property
    def bleu(self) -> Score:
        """sacreBLEU, the headline."""
        return self.bleu_lowercase if self.lowercase else self.bleu_cased

    def report(self) -> dict[str, Any]:
        """Convert to JSON values; a score that the language does not have is null."""
        names = ("bleu", *(field.name for field in fields(self) if field.name not in ("language", "lowercase")))
        scores: dict[str, Score | None] = {name: getattr(self, name) for name in names}
        return {
            **{name: None if score is None else score.value for name, score in scores.items()},
            "signature": self.bleu.signature,
            "signatures": {name: score.signature for name, score in scores.items() if score is not None},
        }

    def __str__(self) -> str:
        """Lay out a table and the signatures in 80 columns."""
        headline = {self.lowercase: " (the headline)"}
        case = "case ignored" if self.lowercase else "case counts"
        rows: list[tuple[str, Score | None, str]] = [
            ("BLEU", self.bleu_cased, f"sacreBLEU, case counts{headline.get(False, '')}"),
            ("BLEU -lc", self.bleu_lowercase, f"sacreBLEU, case ignored{headline.get(True, '')}"),
            ("BLEU tokenised", self.bleu_tokenized, f"by Moses, {case}: as in older papers"),
            ("BLEU compound split", self.bleu_compound_split, "tokenised, and hyphens split"),
            ("chrF", self.chrf, case),
            ("chrF++", self.chrf_pp, f"with words and word pairs, {case}"),
            ("TER", self.ter, "case ignored; lower is better"),
        ]
        table = [f"{name:19} {score.value:6.2f}  {what}" for name, score, what in rows if score is not None]
        if self.bleu_tokenized is None:
            table.append(f"no tokenised BLEU: Moses splits at spaces, which does not suit {self.language}")
        signatures = [_aligned(name, score.signature) for name, score, _ in rows if score is not None]
        return "\n".join([*table, "signatures:", *signatures])


def corpus_bleu(
    hypotheses: Sequence[str], references: Sequence[str], *, target_language: str, lowercase: bool = False
) -> Score:
    """Compute sacreBLEU of hypotheses against one reference each, both as raw text.

    Args:
        lowercase: compare without case (sacreBLEU's `-lc`; the signature says `case:lc`).

    Raises:
        UserError: their numbers differ, or there are none.
    """
    _check_counts(hypotheses, references)
    return _scored(metric_of("bleu", target_language, lowercase=lowercase), hypotheses, [references])


def corpus_chrf(hypotheses: Sequence[str], references: Sequence[str], *, lowercase: bool = False) -> Score:
    """Compute sacreBLEU's chrF in the same way."""
    _check_counts(hypotheses, references)
    return _scored(metric_of("chrf", lowercase=lowercase), hypotheses, [references])


def count_edits(
    hypotheses: Sequence[str], references: Sequence[str], *, target_language: str
) -> tuple[float, float, str]:
    """Count the edits and the words of the references, whose sums over the parts of a text give its TER.

    A sentence takes about 2 ms, and up to 0.2 s if its words stand in another order, so the parts are worth sharing.

    Returns:
        edits, words, and the signature of the metric; without sentences, it is empty.
    """
    metric = metric_of("ter", target_language)
    found = [metric.sentence_score(each, [one]) for each, one in zip(hypotheses, references, strict=True)]
    signature = str(metric.get_signature()) if found else ""
    return sum(score.num_edits for score in found), sum(score.ref_length for score in found), signature


def edit_rate(edits: float, words: float) -> float:
    """Return the edits per 100 words of the references, as sacreBLEU does for references without any word."""
    return 100 * (edits / words if words > 0 else float(edits > 0))


def metric_of(name: str, target_language: str = "", *, lowercase: bool = False, effective_order: bool = False) -> Any:
    """Return a metric of sacreBLEU.

    Args:
        name: `bleu`, the main score; `chrf`, of character n-grams up to 6; `chrf_pp`, also of word n-grams up to 2;
            `ter`, which ignores case by convention.
        target_language: needed by `bleu` and `ter`, which split text into words.
        effective_order: whether `bleu` has only the orders that a hypothesis has, as for single sentences.
    """
    # Imported late: it loads readers of many formats, and only evaluation needs it.
    from sacrebleu.metrics import BLEU, CHRF, TER

    if name == "bleu":
        # `force` only suppresses sacreBLEU's warning, which `score` gives once.
        tokenize = bleu_tokenizer(target_language)
        return BLEU(tokenize=tokenize, lowercase=lowercase, effective_order=effective_order, force=True)
    if name == "ter":
        # In text without spaces a sentence would be one word, and any error would be 100%.
        by_character = bleu_tokenizer(target_language) != "13a"
        return TER(normalized=by_character, asian_support=by_character)
    return CHRF(word_order=2 if name == "chrf_pp" else 0, lowercase=lowercase)


class Closest:
    """Choice of the hypothesis with the best sentence BLEU, as Kim and Rush (2016) make targets for a student.

    The BLEU of a sentence is sacreBLEU's, with only the orders that the hypothesis has.

    Args:
        lowercase: compare without case, for a model that writes no capitals.
    """

    def __init__(self, language: str, *, lowercase: bool) -> None:
        self._metric = metric_of("bleu", language, lowercase=lowercase, effective_order=True)

    def __call__(self, translation: "Translation", reference: str) -> "Translation":
        """Keep one hypothesis of a line; among equal ones, the one that the model finds best."""
        best = max(translation.hypotheses, key=lambda one: self._metric.sentence_score(one.text, [reference]).score)
        return replace(translation, hypotheses=(best,))


def score(
    hypotheses: Sequence[str], *references: Sequence[str], target_language: str, lowercase: bool = False
) -> Scores:
    """Compute all scores of hypotheses against references, all as raw text.

    Args:
        references: one list, or several if each line has several references.
        lowercase: ignore case in all scores except `bleu_cased`.

    Raises:
        UserError: their numbers differ, or there are none.
    """
    for each in references:
        _check_counts(hypotheses, each)
    if (ends := sum(line.rstrip().endswith(" .") for line in hypotheses)) >= _MANY_ENDS:
        caution(
            f"{ends:,} translations end in a full stop after a space, as tokenised text does: detokenise them, "
            "otherwise their scores are not comparable"
        )
    tokenized, compound_split = (
        _tokenized_bleu(hypotheses, references, base_language(target_language), lowercase)
        if bleu_tokenizer(target_language) == "13a"
        else (None, None)
    )
    return Scores(
        language=target_language,
        lowercase=lowercase,
        bleu_cased=_scored(metric_of("bleu", target_language), hypotheses, references),
        bleu_lowercase=_scored(metric_of("bleu", target_language, lowercase=True), hypotheses, references),
        bleu_tokenized=tokenized,
        bleu_compound_split=compound_split,
        chrf=_scored(metric_of("chrf", lowercase=lowercase), hypotheses, references),
        chrf_pp=_scored(metric_of("chrf_pp", lowercase=lowercase), hypotheses, references),
        ter=_scored(metric_of("ter", target_language), hypotheses, references),
    )


def _tokenized_bleu(
    hypotheses: Sequence[str], references: Sequence[Sequence[str]], language: str, lowercase: bool
) -> tuple[Score, Score | None]:
    """Compute tokenised BLEU, and for German also with hyphens split."""
    from sacrebleu.metrics.bleu import BLEU
    from sacremoses import MosesTokenizer

    moses = MosesTokenizer(lang=language)

    # Lowercase before tokenising: Moses recognises abbreviations by their capitals and keeps their full stop. Otherwise
    # hypotheses without capitals and references with capitals would be tokenised by different rules.
    def cut(lines: Sequence[str]) -> list[str]:
        lines = [line.lower() for line in lines] if lowercase else lines
        return [moses.tokenize(line, aggressive_dash_splits=False, return_str=True, escape=False) for line in lines]

    cut_hypotheses, *cut_references = map(cut, (hypotheses, *references))
    rules = {"tok": f"moses-{language}", "sacremoses": importlib.metadata.version("sacremoses")}
    metric = BLEU(tokenize="none", lowercase=lowercase, force=True)
    tokenized = _scored(metric, cut_hypotheses, cut_references, rules)
    if language != "de":
        return tokenized, None
    hypotheses, *references = ([split_hyphens(line) for line in lines] for lines in (cut_hypotheses, *cut_references))
    rules = {"tok": rules["tok"], "hyphens": "##AT##-##AT##", "sacremoses": rules["sacremoses"]}
    return tokenized, _scored(metric, hypotheses, references, rules)


def split_hyphens(line: str) -> str:
    """Split hyphens in tokenised text: `web-basiert` → `web ##AT##-##AT## basiert`."""
    pattern, replacement = _HYPHEN
    return pattern.sub(replacement, line)


def _scored(
    metric: Any, hypotheses: Sequence[str], references: Sequence[Sequence[str]], rules: dict[str, str] | None = None
) -> Score:
    """Score with a metric. `rules` are entries for the signature that describe how the text was processed."""
    value = metric.corpus_score(list(hypotheses), [list(each) for each in references]).score
    signature = metric.get_signature()
    for key, rule in (rules or {}).items():
        signature.update(key, rule)
    return Score(value, str(signature))


def _check_counts(hypotheses: Sequence[str], references: Sequence[str]) -> None:
    if len(hypotheses) != len(references):
        raise UserError(
            "hypotheses and references must have the same number of lines "
            f"({len(hypotheses):,} and {len(references):,}): line i of one must correspond to line i of the other"
        )
    if not references:
        raise UserError("there are no references: use a file with at least one line")


def _aligned(name: str, signature: str) -> str:
    """Lay out one signature; a long one is wrapped after a `|`."""
    lines = [""]
    for part in re.findall(r"[^|]+\|?", signature):
        if len(lines[-1]) + len(part) > _COLUMNS - 20:
            lines.append("")
        lines[-1] += part
    return "\n".join(f"{'' if i else name:19} {line}" for i, line in enumerate(lines))
