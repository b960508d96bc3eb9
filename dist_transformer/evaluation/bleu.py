"""Corpus scores against raw reference text, by sacreBLEU, each with the signature that makes it comparable."""

from collections.abc import Sequence
from dataclasses import dataclass

from dist_transformer.errors import UserError

# Every other language is tokenised by "13a", mteval's. For Japanese and Korean sacreBLEU also has tokenisers by
# dictionary, which need more packages; characters need none, and the signature says so.
_TOKENIZERS = {"zh": "zh", "ja": "char", "ko": "char", "th": "char", "lo": "char", "km": "char", "my": "char"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Scores:
    """BLEU and chrF: 0 to 100, higher is better. TER: edits per 100 reference words, lower is better."""

    bleu: float
    chrf: float
    ter: float
    bleu_signature: str
    chrf_signature: str
    ter_signature: str

    @property
    def signatures(self) -> dict[str, str]:
        return {"bleu": self.bleu_signature, "chrf": self.chrf_signature, "ter": self.ter_signature}

    def __str__(self) -> str:
        rows = (("BLEU", self.bleu, "bleu"), ("chrF", self.chrf, "chrf"), ("TER", self.ter, "ter"))
        return "\n".join(f"{name:4} {value:6.2f}  {self.signatures[key]}" for name, value, key in rows)


def bleu_tokenizer(language: str) -> str:
    """sacreBLEU's tokeniser for text of `language`, such as "de", "zh" or "zh-CN"."""
    return _TOKENIZERS.get(language.replace("_", "-").split("-")[0].lower(), "13a")


def score(
    hypotheses: Sequence[str], references: Sequence[str], *, target_language: str, lowercase: bool = False
) -> Scores:
    """Score hypotheses against one reference each, both as raw text.

    Args:
        lowercase: compare without case (sacreBLEU's `-lc`; the signatures say `case:lc`).

    Raises:
        UserError: their numbers differ, or there are none.
    """
    # Late: pulls in readers of many formats, and only evaluation needs it.
    from sacrebleu.metrics.bleu import BLEU
    from sacrebleu.metrics.chrf import CHRF
    from sacrebleu.metrics.ter import TER

    if len(hypotheses) != len(references):
        raise UserError(
            f"there are {len(hypotheses):,} hypotheses and {len(references):,} references: "
            "give files where line i of one is the translation of line i of the other"
        )
    if not references:
        raise UserError("there are no references: give a file with at least one line")
    tokenizer = bleu_tokenizer(target_language)
    by_character = tokenizer != "13a"
    bleu = BLEU(tokenize=tokenizer, lowercase=lowercase)
    chrf = CHRF(lowercase=lowercase)
    # TER ignores case by convention. Without spaces a sentence would be one word, and any error in it 100%.
    ter = TER(normalized=by_character, asian_support=by_character)
    values = [metric.corpus_score(list(hypotheses), [list(references)]).score for metric in (bleu, chrf, ter)]
    return Scores(
        bleu=values[0],
        chrf=values[1],
        ter=values[2],
        bleu_signature=str(bleu.get_signature()),
        chrf_signature=str(chrf.get_signature()),
        ter_signature=str(ter.get_signature()),
    )
