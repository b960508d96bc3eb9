"""Corpus scores against raw reference text, each with the signature that makes it comparable.

sacreBLEU's scores are the ones to compare by. Beside them stands tokenised BLEU, on text that was cut by the rules of
Moses, which is what papers before sacreBLEU print: it depends on the tokeniser, and the signature names it.
"""

import importlib.metadata
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from dist_transformer.errors import UserError

# Every other language is tokenised by "13a", mteval's. For Japanese and Korean sacreBLEU also has tokenisers by
# dictionary, which need more packages; characters need none, and the signature says so.
_TOKENIZERS = {"zh": "zh", "ja": "char", "ko": "char", "th": "char", "lo": "char", "km": "char", "my": "char"}
# As Perl's s/(\S)-(\S)/$1 ##AT##-##AT## $2/g, by which the paper's English-German scores are computed: a single letter
# between two hyphens belongs to the first match, and the second hyphen stays.
_HYPHEN = re.compile(r"(\S)-(\S)"), r"\1 ##AT##-##AT## \2"
_COLUMNS = 80


class Score(NamedTuple):
    """BLEU and chrF: 0 to 100, higher is better. TER: edits per 100 reference words, lower is better."""

    value: float
    signature: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Scores:
    """All scores of one set of hypotheses."""

    language: str
    lowercase: bool
    """Case is ignored by all scores but `bleu_cased` and, by convention always, `ter`."""
    bleu_cased: Score
    bleu_lowercase: Score
    bleu_tokenized: Score | None
    """None for Chinese, Japanese and the like: Moses cuts at spaces."""
    bleu_compound_split: Score | None
    """Tokenised, and hyphens between letters are words too: usually 0.7 to 1 more. None but for German."""
    chrf: Score
    chrf_pp: Score
    """chrF++: chrF with words and pairs of words beside the characters."""
    ter: Score

    @property
    def bleu(self) -> Score:
        """sacreBLEU, the headline."""
        return self.bleu_lowercase if self.lowercase else self.bleu_cased

    def report(self) -> dict[str, Any]:
        """As JSON values; a score that the language does not have is null."""
        names = (
            "bleu",
            "bleu_cased",
            "bleu_lowercase",
            "bleu_tokenized",
            "bleu_compound_split",
            "chrf",
            "chrf_pp",
            "ter",
        )
        scores: dict[str, Score | None] = {name: getattr(self, name) for name in names}
        return {
            **{name: None if score is None else score.value for name, score in scores.items()},
            "signature": self.bleu.signature,
            "signatures": {name: score.signature for name, score in scores.items() if score is not None},
        }

    def __str__(self) -> str:
        """A table and the signatures, in 80 columns."""
        headline = {self.lowercase: " (the headline)"}
        case = "case ignored" if self.lowercase else "case counts"
        rows: list[tuple[str, Score | None, str]] = [
            ("BLEU", self.bleu_cased, f"sacreBLEU, case counts{headline.get(False, '')}"),
            ("BLEU -lc", self.bleu_lowercase, f"sacreBLEU, case ignored{headline.get(True, '')}"),
            ("BLEU tokenised", self.bleu_tokenized, f"by Moses, {case}: as older papers print it"),
            ("BLEU compound split", self.bleu_compound_split, "tokenised, and hyphens split"),
            ("chrF", self.chrf, case),
            ("chrF++", self.chrf_pp, f"with words and pairs of them, {case}"),
            ("TER", self.ter, "case ignored; lower is better"),
        ]
        table = [f"{name:19} {score.value:6.2f}  {what}" for name, score, what in rows if score is not None]
        if self.bleu_tokenized is None:
            table.append(f"no tokenised BLEU: Moses cuts at spaces, which does not suit {self.language}")
        signatures = [_aligned(name, score.signature) for name, score, _ in rows if score is not None]
        return "\n".join([*table, "signatures:", *signatures])


def bleu_tokenizer(language: str) -> str:
    """sacreBLEU's tokeniser for text of `language`, such as "de", "zh" or "zh-CN"."""
    return _TOKENIZERS.get(_base(language), "13a")


def corpus_bleu(
    hypotheses: Sequence[str], references: Sequence[str], *, target_language: str, lowercase: bool = False
) -> Score:
    """sacreBLEU of hypotheses against one reference each, both as raw text.

    Args:
        lowercase: compare without case (sacreBLEU's `-lc`; the signature says `case:lc`).

    Raises:
        UserError: their numbers differ, or there are none.
    """
    _check_counts(hypotheses, references)
    return _scored(bleu_metric(target_language, lowercase=lowercase), hypotheses, [references])


def bleu_metric(target_language: str, *, lowercase: bool) -> Any:
    """Return sacreBLEU's metric of the headline."""
    from sacrebleu.metrics.bleu import BLEU

    return BLEU(tokenize=bleu_tokenizer(target_language), lowercase=lowercase)


def chrf_pp_metric(*, lowercase: bool) -> Any:
    """Return sacreBLEU's chrF++: character n-grams up to 6, word n-grams up to 2."""
    from sacrebleu.metrics.chrf import CHRF

    return CHRF(word_order=2, lowercase=lowercase)


def score(
    hypotheses: Sequence[str], *references: Sequence[str], target_language: str, lowercase: bool = False
) -> Scores:
    """Score hypotheses against references, all as raw text, in every way.

    Args:
        references: one list, or several where there are several translations of each line.
        lowercase: ignore case, in all scores but `bleu_cased`.

    Raises:
        UserError: their numbers differ, or there are none.
    """
    # Late: pulls in readers of many formats, and only evaluation needs it.
    from sacrebleu.metrics.chrf import CHRF
    from sacrebleu.metrics.ter import TER

    for each in references:
        _check_counts(hypotheses, each)
    tokenizer = bleu_tokenizer(target_language)
    by_character = tokenizer != "13a"
    chrf = CHRF(lowercase=lowercase)
    # TER ignores case by convention. Without spaces a sentence would be one word, and any error in it 100%.
    ter = TER(normalized=by_character, asian_support=by_character)
    tokenized, compound_split = (
        (None, None) if by_character else _tokenized_bleu(hypotheses, references, _base(target_language), lowercase)
    )
    return Scores(
        language=target_language,
        lowercase=lowercase,
        bleu_cased=_scored(bleu_metric(target_language, lowercase=False), hypotheses, references),
        bleu_lowercase=_scored(bleu_metric(target_language, lowercase=True), hypotheses, references),
        bleu_tokenized=tokenized,
        bleu_compound_split=compound_split,
        chrf=_scored(chrf, hypotheses, references),
        chrf_pp=_scored(chrf_pp_metric(lowercase=lowercase), hypotheses, references),
        ter=_scored(ter, hypotheses, references),
    )


def _tokenized_bleu(
    hypotheses: Sequence[str], references: Sequence[Sequence[str]], language: str, lowercase: bool
) -> tuple[Score, Score | None]:
    """Tokenised BLEU, and for German also with hyphens split.

    Text is lowercased first: a full stop stays with a word that Moses knows as an abbreviation, and it knows them by
    their capitals, so hypotheses without capitals and references with them would be cut by different rules.
    """
    from sacrebleu.metrics.bleu import BLEU
    from sacremoses import MosesTokenizer

    moses = MosesTokenizer(lang=language)

    def cut(lines: Sequence[str]) -> list[str]:
        lines = [line.lower() for line in lines] if lowercase else lines
        return [moses.tokenize(line, aggressive_dash_splits=False, return_str=True, escape=False) for line in lines]

    cut_hypotheses, *cut_references = map(cut, (hypotheses, *references))
    rules = {"tok": f"moses-{language}", "sacremoses": importlib.metadata.version("sacremoses")}
    # `force` only keeps sacreBLEU from warning of text that is tokenised already.
    metric = BLEU(tokenize="none", lowercase=lowercase, force=True)
    tokenized = _scored(metric, cut_hypotheses, cut_references, rules)
    if language != "de":
        return tokenized, None
    hypotheses, *references = ([split_hyphens(line) for line in lines] for lines in (cut_hypotheses, *cut_references))
    rules = {"tok": rules["tok"], "hyphens": "##AT##-##AT##", "sacremoses": rules["sacremoses"]}
    return tokenized, _scored(metric, hypotheses, references, rules)


def split_hyphens(line: str) -> str:
    """`web-basiert` → `web ##AT##-##AT## basiert`, in tokenised text."""
    pattern, replacement = _HYPHEN
    return pattern.sub(replacement, line)


def _scored(
    metric: Any, hypotheses: Sequence[str], references: Sequence[Sequence[str]], rules: dict[str, str] | None = None
) -> Score:
    """`rules` are entries of the signature: what was done to the text before."""
    value = metric.corpus_score(list(hypotheses), [list(each) for each in references]).score
    signature = metric.get_signature()
    for key, rule in (rules or {}).items():
        signature.update(key, rule)
    return Score(value, str(signature))


def _check_counts(hypotheses: Sequence[str], references: Sequence[str]) -> None:
    if len(hypotheses) != len(references):
        raise UserError(
            f"there are {len(hypotheses):,} hypotheses and {len(references):,} references: "
            "give files where line i of one is the translation of line i of the other"
        )
    if not references:
        raise UserError("there are no references: give a file with at least one line")


def _base(language: str) -> str:
    """`zh_Hant` → `zh`."""
    return language.replace("_", "-").split("-")[0].lower()


def _aligned(name: str, signature: str) -> str:
    """One row of the signatures; a long one goes on below, cut after a `|`."""
    lines = [""]
    for part in re.findall(r"[^|]+\|?", signature):
        if len(lines[-1]) + len(part) > _COLUMNS - 20:
            lines.append("")
        lines[-1] += part
    return "\n".join(f"{'' if i else name:19} {line}" for i, line in enumerate(lines))
