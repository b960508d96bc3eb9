"""README.md of an exported model, with the metadata that model hubs read."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from dist_transformer.base.checks import Check
from dist_transformer.base.markdown import fill_card
from dist_transformer.config.language_codes import base_language
from dist_transformer.evaluation.bleu import Score
from dist_transformer.export import ctranslate2_peer
from dist_transformer.export.ctranslate2 import SUPPRESSED
from dist_transformer.export.peer import LENGTH_PENALTY
from dist_transformer.export.sentencepiece_files import MODEL_FILE, language_code
from dist_transformer.model_folder import TOKENIZER_FILE, ModelInfo

_FILES = {"tokenizers": TOKENIZER_FILE, "sentencepiece": MODEL_FILE}


@dataclass(frozen=True, kw_only=True)
class Card:
    """Contents of an exported model's README."""

    name: str
    library: str
    """`transformers` or `ctranslate2`."""
    info: ModelInfo
    """Description of the model, for the exported direction."""
    tags: Sequence[str]
    """Tags of the targets' vocabulary, which are never part of an output."""
    tokenizer_libraries: tuple[str, ...]
    """Libraries that read the tokenizer's file, or those of sources and of targets: `tokenizers` or `sentencepiece`."""
    parameters: int
    license: str | None
    dev_name: str
    """File name of the dev text."""
    dev_lines: int
    bleu: Score | None
    """BLEU of the exported model on the dev text, if it has references."""
    longest: int
    """Most tokens per output."""
    checks: Sequence[Check]

    def __str__(self) -> str:
        from huggingface_hub import EvalResult, ModelCardData

        info, libraries = self.info, self.tokenizer_libraries
        pair = f"{info.source_language}-{info.target_language}"
        results = self.bleu and [
            EvalResult(
                task_type="translation",
                task_name=f"Translation {pair}",
                dataset_type=self.dev_name,
                dataset_name=f"{self.dev_name} (dev text, {self.dev_lines:,} lines)",
                dataset_config=pair,
                metric_type="bleu",
                metric_name="sacreBLEU",
                metric_value=round(self.bleu.value, 2),
                metric_args={"signature": self.bleu.signature},
            )
        ]
        metadata = ModelCardData(
            language=list(dict.fromkeys(map(base_language, (info.source_language, info.target_language)))),
            license=self.license,
            pipeline_tag="translation",
            library_name=self.library,
            tags=["translation"],
            metrics=["bleu"] if results else None,
            model_name=self.name,
            eval_results=results or None,
        )
        sides = zip(("tokenizer", "target"), ("", ctranslate2_peer.TARGET), libraries, strict=False)
        return fill_card(
            Path(__file__).with_name("card.md.j2"),
            metadata,
            **vars(self),
            front=language_code(*info.direction.tags) if libraries[0] == "sentencepiece" else "",
            files=[(variable, f"{prefix}{_FILES[reader]}", reader) for variable, prefix, reader in sides],
            length_penalty=LENGTH_PENALTY,
            beam=ctranslate2_peer.BEAM_SIZE,
            patience=ctranslate2_peer.PATIENCE,
            never=[*SUPPRESSED, *([tag] for tag in self.tags)],
        )
