"""Results of an export: figures for programs, and the README.md with the metadata that model hubs read."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dist_transformer.base.checks import Check
from dist_transformer.base.markdown import fill_card
from dist_transformer.config.language_codes import base_language
from dist_transformer.data.vocabulary.m2m100 import M2M100Vocabulary
from dist_transformer.data.vocabulary.tokenizer import Vocabulary
from dist_transformer.evaluation.bleu import Score, corpus_bleu
from dist_transformer.export.ctranslate2 import PATIENCE, SUPPRESSED, tokenizer_files
from dist_transformer.export.gate import DevText
from dist_transformer.export.libraries import BEAM_SIZE, LENGTH_PENALTY, LIBRARIES, ExportSettings, longest_output
from dist_transformer.export.marian_files import splits_text
from dist_transformer.export.tokenizer_files import language_code
from dist_transformer.model_folder import ModelInfo


@dataclass(frozen=True, kw_only=True, slots=True)
class Export:
    """An exported model, compared with ours."""

    settings: ExportSettings
    info: ModelInfo
    """Description of the model, for the exported direction."""
    tokenizer: Vocabulary
    parameters: int
    checks: list[Check]
    dev: DevText
    """The lines that were translated by beam search."""
    precision: str
    """Type of the exported model's arithmetic, such as `float32`."""
    ours: list[str]
    """Beam search outputs of our model on these lines."""
    outputs: list[str]
    """Outputs of the exported model."""

    def bleu(self, outputs: Sequence[str]) -> Score | None:
        """Compute BLEU; None without references."""
        if self.settings.reference is None:
            return None
        language, ignores_case = self.info.target_language, self.tokenizer.target.lowercase
        return corpus_bleu(outputs, self.dev.targets, target_language=language, lowercase=ignores_case)

    @property
    def identical(self) -> int:
        """Number of lines with the same outputs."""
        return sum(ours == theirs for ours, theirs in zip(self.ours, self.outputs, strict=True))

    def report(self) -> dict[str, Any]:
        """Convert to JSON values."""
        ours, theirs = self.bleu(self.ours), self.bleu(self.outputs)
        return {
            "bleu": theirs and theirs.value,
            "bleu_ours": ours and ours.value,
            "signature": theirs and theirs.signature,
            "sentences": len(self.outputs),
            "line_numbers": self.dev.numbers,
            "identical_to_ours": self.identical,
            "length_penalty": LENGTH_PENALTY,
            "precision": self.precision,
            "checks": [{"name": check.name, "found": check.found, "state": check.state} for check in self.checks],
        }

    def card(self) -> str:
        """Write the README.md."""
        from huggingface_hub import EvalResult, ModelCardData

        settings, info, tokenizer, bleu = self.settings, self.info, self.tokenizer, self.bleu(self.outputs)
        tags = info.direction.tags
        begin = tags[1:] if isinstance(tokenizer, M2M100Vocabulary) else ()
        name, library = settings.name or settings.out.absolute().name, LIBRARIES[settings.to]
        pair = f"{info.source_language}-{info.target_language}"
        dev_name = "" if settings.source is None else settings.source.name
        results = bleu and [
            EvalResult(
                task_type="translation",
                task_name=f"Translation {pair}",
                dataset_type=dev_name,
                dataset_name=f"{dev_name} (dev text, {len(self.outputs):,} lines)",
                dataset_config=pair,
                metric_type="bleu",
                metric_name="sacreBLEU",
                metric_value=round(bleu.value, 2),
                metric_args={"signature": bleu.signature},
            )
        ]
        metadata = ModelCardData(
            language=list(dict.fromkeys(map(base_language, (info.source_language, info.target_language)))),
            license=settings.license,
            pipeline_tag="translation",
            library_name=library,
            tags=["translation"],
            metrics=["bleu"] if results else None,
            model_name=name,
            eval_results=results or None,
        )
        return fill_card(
            Path(__file__).with_name("card.md.j2"),
            metadata,
            made=self,
            info=info,
            bleu=bleu,
            name=name,
            library=library,
            dev_name=dev_name,
            splits=settings.to == "marian" and splits_text(tokenizer),
            files=[*tokenizer_files(tokenizer).items()],
            front="" if begin or tokenizer.source.library != "sentencepiece" else language_code(*tags),
            fronts=tags[: len(tags) - len(begin)],
            begin=begin,
            length_penalty=LENGTH_PENALTY,
            beam=BEAM_SIZE,
            patience=PATIENCE,
            longest=longest_output(info.model.max_positions),
            never=[*SUPPRESSED, *([tag] for tag in tokenizer.target.tags)],
        )
