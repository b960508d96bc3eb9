"""Export of a model folder for another library; it is written only if its outputs agree with ours."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from dist_transformer.base.checks import Check, failed
from dist_transformer.base.errors import UserError
from dist_transformer.base.files import folder_beside, make_folder, move, refuse_content, sync, write_file
from dist_transformer.data.text.files import LineFiles
from dist_transformer.data.vocabulary.tokenizer import Vocabulary
from dist_transformer.export.card import Card
from dist_transformer.export.ctranslate2 import refuse_what_ctranslate2_lacks
from dist_transformer.export.ctranslate2_peer import CTranslate2Peer, write_ctranslate2
from dist_transformer.export.gate import (
    COMPARED_LINES,
    SEARCHED_LINES,
    SEED,
    DevText,
    Gate,
    Progress,
    Search,
    beam,
    dev_size,
    quantised,
    search_ours,
    search_theirs,
    tune,
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
from dist_transformer.export.peer import Exported, require_library
from dist_transformer.inference.decoding import Decoding
from dist_transformer.inference.translator import Translator
from dist_transformer.model.transformer import Transformer
from dist_transformer.model_folder import CARD_FILE, ModelInfo, load_model, read_model_info


@dataclass(frozen=True, kw_only=True, slots=True)
class Export:
    """Results of the comparison."""

    checks: list[Check]
    dev: DevText
    """The lines of the dev text that were translated by beam search."""
    search: Search
    precision: str
    outputs: list[str]
    """Beam search outputs of the exported model on the dev text."""

    def report(self) -> dict[str, Any]:
        """Convert to JSON values."""
        ours, theirs = self.dev.bleu(self.dev.outputs), self.dev.bleu(self.outputs)
        return {
            "bleu": theirs.value,
            "bleu_ours": ours.value,
            "signature": theirs.signature,
            "sentences": len(self.outputs),
            "line_numbers": self.dev.numbers,
            "identical_to_ours": self.dev.identical(self.outputs),
            "length_penalty": self.search.length_penalty,
            "bleu_by_length_penalty": {str(penalty): bleu for penalty, bleu in self.search.tried.items()},
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
    pairs = list(LineFiles(source=settings.source, target=settings.reference).whole_pairs())
    refuse_unfit = refuse_what_marian_lacks if settings.to == "hf" else refuse_what_ctranslate2_lacks
    refuse_unfit(read_model_info(settings.model).model)
    model, tokenizer, info = load_model(settings.model, device)
    info = info.facing(settings.direction, settings.tags)
    translator = Translator(model, tokenizer, device, Decoding(), tags=info.direction.tags)
    dev = dev_text(pairs, translator, info)
    make_folder(settings.out.absolute().parent)
    with folder_beside(settings.out) as folder, folder_beside(settings.out) as quantised_folder:
        job = _Job(settings, device, model, translator, info, dev, len(pairs), progress)
        made = job.run(folder, quantised_folder, show)
        _finish(folder if settings.quantization is None else quantised_folder, settings.out)
    return made


def dev_text(pairs: Sequence[tuple[str, str]], translator: Translator, info: ModelInfo) -> DevText:
    """Sample lines that our model translates whole.

    Raises:
        UserError: there is none.
    """
    lengths = map(len, translator.tokenizer.source.encode_batch([source for source, _ in pairs]))
    fits = [
        (number, *pair)
        for number, (pair, length) in enumerate(zip(pairs, lengths, strict=True), 1)
        if not translator.tokenizer.source.is_blank(pair[0]) and length <= translator.max_source_tokens
    ]
    if not fits:
        raise UserError(
            f"--src has {len(pairs):,} lines, all of them blank or too long: pass dev text, on which the exported "
            "model is compared with the original"
        )
    numbers, sources, references = (list(column) for column in zip(*fits, strict=True))
    whole = DevText(
        numbers=numbers,
        sources=sources,
        references=references,
        target_language=info.target_language,
        lowercase=translator.tokenizer.target.lowercase,
    )
    return whole.sample(COMPARED_LINES)


@dataclass(frozen=True, slots=True)
class _Job:
    settings: ExportSettings
    device: torch.device
    model: Transformer
    translator: Translator
    info: ModelInfo
    dev: DevText
    lines: int
    """Lines of the user's file, of which `dev` is a sample."""
    progress: Progress

    @property
    def tokenizer(self) -> Vocabulary:
        return self.translator.tokenizer

    @property
    def longest(self) -> int:
        return longest_output(self.model.config.max_positions)

    def run(self, folder: Path, quantised_folder: Path, show: Callable[[Sequence[Check]], object]) -> Export:
        self.progress.stage("writing, reading back")
        peer = self._write(folder)
        self._announce()
        checks = [*dev_size(self.dev), *self._models(peer)]
        self._refuse_failed(checks, show)
        dev = search_ours(self.translator, self.dev.sample(SEARCHED_LINES), self.progress)
        search = tune(peer, dev, self.progress)
        checks.append(beam(dev, search))
        outputs, precision, quantization = search.outputs, peer.precision, self.settings.quantization
        if quantization is not None:
            self.progress.stage(f"their beam search, {quantization}")
            peer = self._write(quantised_folder, quantization)
            outputs, precision = search_theirs(peer, dev.sources, search.length_penalty, self.progress), peer.precision
            checks.append(quantised(dev, outputs, quantization=quantization, precision=precision))
            self._refuse_failed(checks, show)
        show(checks)
        made = Export(checks=checks, dev=dev, search=search, precision=precision, outputs=outputs)
        target = folder if quantization is None else quantised_folder
        if self.settings.to == "hf":
            self._write_generation_config(target, search.length_penalty)
        write_file(target / CARD_FILE, str(self._card(made)))
        return made

    def _announce(self) -> None:
        """State beforehand what is compared."""
        self.progress.begin(units(self.dev, quantised=self.settings.quantization is not None))
        compared, searched = len(self.dev.numbers), min(SEARCHED_LINES, len(self.dev.numbers))
        sampled = f" of {self.lines:,}" if compared < self.lines else ""
        self.progress.say(
            f"comparing {compared:,}{sampled} lines, {searched:,} of them by beam search (samples, seed {SEED})"
        )

    def _refuse_failed(self, checks: Sequence[Check], show: Callable[[Sequence[Check]], object]) -> None:
        if names := failed(checks):
            show(checks)
            raise UserError(
                f"{self.settings.out} was not written, because its outputs differ from those of {self.settings.model} "
                f"({', '.join(names)}): see the rows above"
            )

    def _write(self, folder: Path, quantization: str | None = None) -> Exported:
        """Fill a folder, and load it as a user does."""
        tags = self.info.direction.tags
        if self.settings.to == "hf":
            write_huggingface(folder, self.model, self.tokenizer, self.info)
            self._write_generation_config(folder, Decoding().length_penalty)
            numberings = numberings_of(self.tokenizer, self.model.config)
            return HuggingFacePeer(folder, self.device, tags, numberings=numberings)
        write_ctranslate2(folder, self.model, self.tokenizer, tags, quantization=quantization)
        return CTranslate2Peer(folder, self.device, longest=self.longest, tags=self.tokenizer.target.tags, front=tags)

    def _write_generation_config(self, folder: Path, length_penalty: float) -> None:
        write_generation_config(folder, self.tokenizer, self.model.config, length_penalty=length_penalty)

    def _models(self, peer: Exported) -> Iterator[Check]:
        """Compare the models in fp32."""
        tags = self.info.direction.tags
        gate = Gate(self.model, self.tokenizer, peer, self.dev, self.progress, longest=self.longest, tags=tags)
        for check in (gate.token_ids, gate.decoding, gate.log_probabilities, gate.greedy):
            self.progress.stage(check.__name__.replace("_", " "))
            yield check()

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
            dev_name=settings.source.name,
            dev_lines=len(made.dev.sources),
            ours=made.dev.bleu(made.dev.outputs),
            theirs=made.dev.bleu(made.outputs),
            tuned_lines=made.search.tuned_lines,
            length_penalty=made.search.length_penalty,
            tried=made.search.tried,
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
