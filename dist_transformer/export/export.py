"""Export of a model folder for another library; it is written only if its outputs agree with ours."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from dist_transformer.base.checks import Check, failed
from dist_transformer.base.errors import UserError
from dist_transformer.base.files import folder_beside, make_folder, move, refuse_content, sync, write_file
from dist_transformer.data.vocabulary.tokenizer import Vocabulary
from dist_transformer.export.card import Card
from dist_transformer.export.ctranslate2 import refuse_what_ctranslate2_lacks
from dist_transformer.export.ctranslate2_peer import CTranslate2Peer, write_ctranslate2
from dist_transformer.export.gate import (
    BUILT_IN_LINES,
    SEARCHED_LINES,
    SEED,
    DevText,
    Progress,
    beam,
    compare,
    dev_text,
    search_ours,
    search_theirs,
    units,
)
from dist_transformer.export.huggingface import (
    HuggingFacePeer,
    longest_output,
    write_generation_config,
    write_huggingface,
)
from dist_transformer.export.libraries import LIBRARIES, ExportSettings
from dist_transformer.export.marian import numberings_of, refuse_what_marian_lacks
from dist_transformer.export.peer import LENGTH_PENALTY, Exported, require_library
from dist_transformer.inference.decoding import Decoding
from dist_transformer.inference.translator import Translator
from dist_transformer.model.transformer import Transformer
from dist_transformer.model_folder import CARD_FILE, ModelInfo, load_model, read_model_info


@dataclass(frozen=True, kw_only=True, slots=True)
class Export:
    """Results of the comparison."""

    checks: list[Check]
    dev: DevText
    """The lines that were translated by beam search."""
    precision: str
    outputs: list[str]
    """Beam search outputs of the exported model on these lines."""

    def report(self) -> dict[str, Any]:
        """Convert to JSON values."""
        ours, theirs = self.dev.bleu(self.dev.outputs), self.dev.bleu(self.outputs)
        return {
            "bleu": theirs and theirs.value,
            "bleu_ours": ours and ours.value,
            "signature": theirs and theirs.signature,
            "sentences": len(self.outputs),
            "line_numbers": self.dev.numbers,
            "identical_to_ours": self.dev.identical(self.outputs),
            "length_penalty": LENGTH_PENALTY,
            "precision": self.precision,
            "checks": [{"name": check.name, "found": check.found, "state": check.state} for check in self.checks],
        }


def export(
    settings: ExportSettings,
    device: torch.device,
    *,
    progress: Progress,
    show: Callable[[Sequence[Check]], object],
) -> Export:
    """Export a model: write the folder if all checks pass.

    Args:
        show: called once with all checks that ran, whether they passed or not.

    Raises:
        UserError: a check failed, the text or the model is unfit, or the folder cannot be written. Nothing is left on
            disk.
    """
    require_library(LIBRARIES[settings.to])
    refuse_content(settings.out)
    refuse_unfit = refuse_what_marian_lacks if settings.to == "hf" else refuse_what_ctranslate2_lacks
    refuse_unfit(read_model_info(settings.model).model)
    model, tokenizer, info = load_model(settings.model, device)
    info = info.facing(settings.direction, settings.tags)
    translator = Translator(model, tokenizer, device, Decoding(), tags=info.direction.tags)
    dev = dev_text(
        settings.source,
        settings.reference,
        tokenizer,
        most_tokens=translator.max_source_tokens,
        target_language=info.target_language,
        lowercase=tokenizer.target.lowercase,
    )
    make_folder(settings.out.absolute().parent)
    with folder_beside(settings.out) as folder, folder_beside(settings.out) as quantised_folder:
        job = _Job(settings, device, model, translator, info, dev, progress, show)
        made = job.run(folder, quantised_folder)
        _finish(folder if settings.quantization is None else quantised_folder, settings.out)
    return made


@dataclass(frozen=True, slots=True)
class _Job:
    settings: ExportSettings
    device: torch.device
    model: Transformer
    translator: Translator
    info: ModelInfo
    dev: DevText
    progress: Progress
    show: Callable[[Sequence[Check]], object]

    @property
    def tokenizer(self) -> Vocabulary:
        return self.translator.tokenizer

    @property
    def longest(self) -> int:
        return longest_output(self.model.config.max_positions)

    def run(self, folder: Path, quantised_folder: Path) -> Export:
        quantization, tags = self.settings.quantization, self.info.direction.tags
        self.progress.stage("writing, reading back")
        peer = self._write(folder)
        read = self.dev.sample(BUILT_IN_LINES) if self.dev.is_built_in else self.dev
        searched = read.sample(SEARCHED_LINES)
        self.progress.begin(units(read, searched=len(searched.numbers)))
        self.progress.say(
            f"comparing {len(read.numbers):,} lines, {len(searched.numbers):,} of them by beam search (seed {SEED})"
        )
        limits = {"longest": self.longest, "tags": tags}
        checks = list(compare(self.model, self.tokenizer, peer, self.dev, read, self.progress, **limits))
        self._refuse_failed(checks)
        dev = search_ours(self.translator, searched, self.progress)
        if quantization is not None:
            peer = self._write(quantised_folder, quantization)
        outputs = search_theirs(peer, dev, self.progress)
        checks.append(beam(dev, outputs, precision=peer.precision, quantization=quantization))
        self._refuse_failed(checks)
        self.show(checks)
        made = Export(checks=checks, dev=dev, precision=peer.precision, outputs=outputs)
        write_file((folder if quantization is None else quantised_folder) / CARD_FILE, str(self._card(made)))
        return made

    def _refuse_failed(self, checks: Sequence[Check]) -> None:
        if names := failed(checks):
            self.show(checks)
            raise UserError(
                f"{self.settings.out} was not written, because its outputs differ from those of {self.settings.model} "
                f"({', '.join(names)}): see the rows above"
            )

    def _write(self, folder: Path, quantization: str | None = None) -> Exported:
        """Fill a folder, and load it as a user does."""
        tags = self.info.direction.tags
        if self.settings.to == "hf":
            write_huggingface(folder, self.model, self.tokenizer, self.info)
            write_generation_config(folder, self.tokenizer, self.model.config)
            numberings = numberings_of(self.tokenizer, self.model.config)
            return HuggingFacePeer(folder, self.device, tags, numberings=numberings)
        write_ctranslate2(folder, self.model, self.tokenizer, tags, quantization=quantization)
        return CTranslate2Peer(folder, self.device, longest=self.longest, tags=self.tokenizer.target.tags, front=tags)

    def _card(self, made: Export) -> Card:
        settings, source, target = self.settings, self.tokenizer.source, self.tokenizer.target
        has_two = self.tokenizer.sizes[1] > 0
        return Card(
            name=settings.name or settings.out.absolute().name,
            library=LIBRARIES[settings.to],
            info=self.info,
            tags=self.tokenizer.target.tags,
            tokenizer_libraries=(source.library, target.library)[: 1 + has_two],
            parameters=sum(parameter.numel() for parameter in self.model.parameters()),
            license=settings.license,
            dev_name="" if settings.source is None else settings.source.name,
            dev_lines=len(made.dev.sources),
            bleu=made.dev.bleu(made.outputs),
            longest=self.longest,
            checks=made.checks,
        )


def _finish(folder: Path, out: Path) -> None:
    """Flush the folder and move it into place."""
    rights = (folder / CARD_FILE).stat().st_mode & 0o777
    for file in folder.iterdir():
        # Libraries may write files that only their owner can read.
        file.chmod(rights)
        sync(file)
    sync(folder)
    # This also replaces an empty folder.
    move(folder, out)
