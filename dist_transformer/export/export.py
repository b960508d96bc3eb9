"""Export of a model folder for another library; it is written only if its outputs agree with ours."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from dist_transformer.base.checks import Check, failed
from dist_transformer.base.errors import UserError
from dist_transformer.base.files import (
    TOKENIZER_BYTES,
    folder_beside,
    make_folder,
    move,
    read_small,
    refuse_content,
    sync,
    write_file,
)
from dist_transformer.data.text.files import LineFiles
from dist_transformer.data.tokenizer import Tokenizer
from dist_transformer.export.card import Card
from dist_transformer.export.ctranslate2 import refuse_what_ctranslate2_lacks
from dist_transformer.export.ctranslate2_peer import CTranslate2Peer, write_ctranslate2
from dist_transformer.export.gate import DevText, Gate, Search, quantised, tune
from dist_transformer.export.huggingface import (
    HuggingFacePeer,
    longest_output,
    write_generation_config,
    write_huggingface,
)
from dist_transformer.export.libraries import LIBRARIES, QUANTIZATIONS, Target
from dist_transformer.export.marian import refuse_what_marian_lacks
from dist_transformer.export.peer import Peer, require_library
from dist_transformer.inference.beam import BeamSettings
from dist_transformer.inference.translator import Translator
from dist_transformer.model.transformer import Transformer
from dist_transformer.model_folder import CARD_FILE, TOKENIZER_FILE, ModelInfo, load_model, read_model_info

LEAST_LINES = 1000
"""Least lines of dev text; with fewer, limits of 99.5% of lines and 0.2 BLEU mean little."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ExportSettings:
    """The model to export, and the dev text for its checks."""

    model: Path
    """Model folder."""
    to: Target
    out: Path
    """Folder to write; it must be new or empty."""
    source: Path
    """Dev text, one sentence per line."""
    reference: Path
    """Reference translations, line by line."""
    direction: str | None = None
    """Direction of the model, such as `en-de`; needed if it has several."""
    tags: tuple[str, ...] | None = None
    """Tags in front of every source, instead of the direction's."""
    quantization: str | None = None
    """Quantisation for CTranslate2; None: fp32."""
    name: str | None = None
    """Name in the card; default: the folder's name."""
    license: str | None = None
    """License in the card's metadata, in the hub's notation, such as `cc-by-4.0`."""

    def __post_init__(self) -> None:
        if self.quantization is not None and self.to != "ctranslate2":
            raise UserError(
                f"--quantize {self.quantization} is for CTranslate2: give --to ctranslate2, or leave it out"
            )
        if self.quantization not in (None, *QUANTIZATIONS):
            raise UserError(f"--quantize {self.quantization} is unknown: choose one of {', '.join(QUANTIZATIONS)}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Export:
    """Results of the comparison."""

    checks: list[Check]
    dev: DevText
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
    progress: Callable[[str], object],
    show: Callable[[Sequence[Check]], object],
) -> Export:
    """Export a model: write the folder if all checks pass.

    Args:
        progress: called with one line of text at each stage.
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
    progress("our beam search")
    dev = dev_text(pairs, model, tokenizer, info, device)
    tokenizer_json = read_small(settings.model / TOKENIZER_FILE, most=TOKENIZER_BYTES)
    try:
        make_folder(settings.out.absolute().parent)
        with folder_beside(settings.out) as folder, folder_beside(settings.out) as quantised_folder:
            job = _Job(settings, device, model, tokenizer, info, tokenizer_json, dev, progress)
            made = job.run(folder, quantised_folder, show)
            _finish(folder if settings.quantization is None else quantised_folder, settings.out)
    except OSError as error:
        remedy = "free space, or choose another folder"
        raise UserError(f"{settings.out} cannot be written ({error.strerror}): {remedy}") from None
    return made


def dev_text(
    pairs: Sequence[tuple[str, str]], model: Transformer, tokenizer: Tokenizer, info: ModelInfo, device: torch.device
) -> DevText:
    """Select the lines that our model translates whole, and translate them.

    Raises:
        UserError: there are fewer than `LEAST_LINES`.
    """
    translator = Translator(model, tokenizer, device, BeamSettings(), tags=info.direction.tags)
    sources = [source for source, _ in pairs]
    lengths = map(len, tokenizer.encode_batch(sources))
    fits = [
        pair
        for pair, length in zip(pairs, lengths, strict=True)
        if pair[0].strip() and length <= translator.max_source_tokens
    ]
    if len(fits) < LEAST_LINES:
        left_out = f", {len(pairs) - len(fits):,} of them blank or too long" if len(fits) < len(pairs) else ""
        raise UserError(
            f"--src has {len(pairs):,} lines{left_out}: give at least {LEAST_LINES:,} lines of dev text, on which the "
            "exported model is compared with the original"
        )
    return DevText(
        sources=[source for source, _ in fits],
        references=[reference for _, reference in fits],
        outputs=[translation.text for translation in translator.translate([source for source, _ in fits])],
        target_language=info.target_language,
        lowercase=tokenizer.lowercase,
    )


@dataclass(frozen=True, slots=True)
class _Job:
    settings: ExportSettings
    device: torch.device
    model: Transformer
    tokenizer: Tokenizer
    info: ModelInfo
    tokenizer_json: bytes
    dev: DevText
    progress: Callable[[str], object]

    @property
    def longest(self) -> int:
        return longest_output(self.model.config.max_positions)

    def run(self, folder: Path, quantised_folder: Path, show: Callable[[Sequence[Check]], object]) -> Export:
        self.progress("writing, reading back")
        peer = self._write(folder)
        checks, search = self._fp32(peer)
        outputs, precision = (search.outputs if search else []), peer.precision
        quantization = self.settings.quantization
        if search is not None and quantization is not None and not failed(checks):
            self.progress(f"their beam search, {quantization}")
            peer = self._write(quantised_folder, quantization)
            outputs, precision = peer.translate(self.dev.sources, search.length_penalty), peer.precision
            checks.append(quantised(self.dev, outputs, quantization=quantization, precision=precision))
        show(checks)
        if names := failed(checks):
            raise UserError(
                f"{self.settings.out} was not written, because its outputs differ from those of {self.settings.model} "
                f"({', '.join(names)}): see the rows above"
            )
        assert search is not None
        made = Export(checks=checks, dev=self.dev, search=search, precision=precision, outputs=outputs)
        target = folder if quantization is None else quantised_folder
        if self.settings.to == "hf":
            self._write_generation_config(target, search.length_penalty)
        write_file(target / CARD_FILE, str(self._card(made)))
        return made

    def _write(self, folder: Path, quantization: str | None = None) -> Peer:
        """Fill a folder, and load it as a user does."""
        tags = self.info.direction.tags
        if self.settings.to == "hf":
            write_huggingface(folder, self.model, self.tokenizer, self.tokenizer_json, tags)
            self._write_generation_config(folder, BeamSettings().length_penalty)
            return HuggingFacePeer(folder, self.device)
        write_ctranslate2(folder, self.model, self.tokenizer, self.tokenizer_json, tags, quantization=quantization)
        return CTranslate2Peer(folder, self.device, longest=self.longest, tags=self.tokenizer.tags)

    def _write_generation_config(self, folder: Path, length_penalty: float) -> None:
        positions = self.model.config.max_positions
        write_generation_config(folder, self.tokenizer, length_penalty=length_penalty, max_positions=positions)

    def _fp32(self, peer: Peer) -> tuple[list[Check], Search | None]:
        """Run the checks in fp32. Skip the beam search if a cheaper check fails."""
        tags = self.info.direction.tags
        gate = Gate(self.model, self.tokenizer, peer, self.dev, longest=self.longest, tags=tags)
        checks = []
        for check in (gate.token_ids, gate.decoding, gate.log_probabilities, gate.greedy):
            self.progress(check.__name__.replace("_", " "))
            checks.append(check())
        if failed(checks):
            return checks, None
        search = tune(peer, self.dev, self.progress)
        return [*checks, gate.beam(search)], search

    def _card(self, made: Export) -> Card:
        settings = self.settings
        return Card(
            name=settings.name or settings.out.absolute().name,
            folder=settings.out.absolute().name,
            library=LIBRARIES[settings.to],
            info=self.info,
            tags=self.tokenizer.tags,
            parameters=sum(parameter.numel() for parameter in self.model.parameters()),
            license=settings.license,
            dev_name=settings.source.name,
            dev_lines=len(self.dev.sources),
            ours=self.dev.bleu(self.dev.outputs),
            theirs=self.dev.bleu(made.outputs),
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
