"""Export of a model folder for another library; it is written only if its outputs agree with ours.

The BLEU of beam search may differ, because the libraries search in other ways: that is a warning.
"""

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from tqdm import tqdm

from dist_transformer.base.checks import Check
from dist_transformer.base.files import folder_beside, make_folder, move, refuse_content, sync, write_file
from dist_transformer.export.ctranslate2 import CTranslate2Peer, refuse_what_ctranslate2_lacks, write_ctranslate2
from dist_transformer.export.gate import SEED, Gate, Show, dev_text, refuse_failed
from dist_transformer.export.huggingface import (
    HuggingFacePeer,
    refuse_what_transformers_lacks,
    write_huggingface,
)
from dist_transformer.export.libraries import LIBRARIES, Exported, ExportSettings, Target, in_batches, require_library
from dist_transformer.export.marian_files import refuse_what_the_program_lacks, write_marian
from dist_transformer.export.marian_program import MarianPeer, find_program, load_marian
from dist_transformer.export.results import Export
from dist_transformer.inference.decoding import Decoding
from dist_transformer.inference.translator import Translator
from dist_transformer.model_folder import CARD_FILE, load_model, read_model_info

BLEU_TOLERANCE = 0.2
"""Difference of BLEU above which there is a warning."""
QUANTISED_LOSS = 0.5
"""BLEU that a quantised model may lose."""
SEARCHED_LINES = 500
"""Most of the compared lines that are translated by beam search, which takes most of the time."""
BUILT_IN_LINES = 60
"""Lines of the built-in text that the models read and translate; the others compare ids and texts of ids."""
# Rough cost of a line by our beam search and theirs, in units of a greedy search.
_OURS, _THEIRS = 2, 4
_TARGETS: dict[Target, tuple[Callable[..., None], Callable[..., None], Callable[..., Exported]]] = {
    "hf": (refuse_what_transformers_lacks, write_huggingface, HuggingFacePeer),
    "ctranslate2": (refuse_what_ctranslate2_lacks, write_ctranslate2, CTranslate2Peer),
    "marian": (refuse_what_the_program_lacks, write_marian, load_marian),
}


def export_model(settings: ExportSettings, device: torch.device, *, progress: tqdm, show: Show) -> Export:
    """Export a model: write the folder if all checks pass.

    Raises:
        UserError: a check failed, the text or the model is unfit, or the folder cannot be written. Nothing is left on
            disk.
    """
    refuse_unfit, write, load = _TARGETS[settings.to]
    refuse_content(settings.out)
    refuse_unfit(read_model_info(settings.model).model)
    if settings.to == "marian":
        load = partial(load, find_program(settings.program))
    else:
        require_library(LIBRARIES[settings.to])
    model, tokenizer, info = load_model(settings.model, device)
    info = info.facing(settings.direction, settings.tags)
    translator = Translator(model, tokenizer, device, Decoding(), tags=info.direction.tags)
    dev = dev_text(settings.source, settings.reference, translator)
    read = dev if settings.source else dev.sample(BUILT_IN_LINES)
    searched = read.sample(SEARCHED_LINES)
    make_folder(settings.out.absolute().parent)
    with folder_beside(settings.out) as folder, folder_beside(settings.out) as quantised_folder:
        progress.set_description_str("writing, reading back")
        write(folder, model, tokenizer, info)
        peer = load(folder, device, tokenizer, info)
        counted = f"comparing {len(read.numbers):,} lines, {len(searched.numbers):,} of them by beam search"
        progress.write(f"{counted} (seed {SEED})", file=sys.stderr)
        later = (_OURS + _THEIRS) * len(searched.numbers)
        gate = Gate(translator=translator, peer=peer, progress=progress, later=later)
        checks = gate.compare(dev, read)
        if isinstance(peer, MarianPeer):
            checks += peer.texts(read.sources, gate.longest)
        refuse_failed(checks, show, settings.out, settings.model)
        if settings.quantization is not None:
            write_ctranslate2(quantised_folder, model, tokenizer, info, quantization=settings.quantization)
            peer = load(quantised_folder, device, tokenizer, info)
        ours, theirs = _search(translator, peer, searched.sources, progress)
        made = Export(
            settings=settings,
            info=info,
            tokenizer=tokenizer,
            parameters=sum(parameter.numel() for parameter in model.parameters()),
            checks=checks,
            dev=searched,
            precision=peer.precision,
            ours=ours,
            outputs=theirs,
        )
        # This list is also that of `made`.
        checks.append(_beam(made))
        refuse_failed(checks, show, settings.out, settings.model)
        show(checks)
        _finish(folder if settings.quantization is None else quantised_folder, made)
    return made


def _search(translator: Translator, peer: Exported, lines: list[str], progress: tqdm) -> tuple[list[str], list[str]]:
    """Translate lines by our beam search and theirs."""
    lengths = [*map(len, lines)]
    progress.set_description_str("our beam search")
    ours = in_batches(translator.translate, lines, lengths, done=lambda rows: progress.update(_OURS * rows))
    progress.set_description_str("their beam search")
    theirs = in_batches(peer.translate, lines, lengths, done=lambda rows: progress.update(_THEIRS * rows))
    return [translation.text for translation in ours], theirs


def _beam(made: Export) -> Check:
    """Compare the outputs and the BLEU of the beam searches.

    A quantised model may lose little. Otherwise a difference is a warning, because the other checks compare the models.
    """
    quantization = made.settings.quantization
    name, ours, theirs = quantization or "beam search", made.bleu(made.ours), made.bleu(made.outputs)
    counted = f"{made.identical:,} of {len(made.outputs):,} outputs are identical to ours"
    same = f"{counted}; computed here in {made.precision}"
    if ours is None or theirs is None:
        remedy = "pass --src and --ref, to see what BLEU it loses"
        return Check(name=name, found=same, state="ok" if quantization is None else "warn", remedy=remedy)
    lost = ours.value - theirs.value
    found = f"{theirs.value:.2f} BLEU, ours {ours.value:.2f}; {same} ({theirs.signature})"
    if quantization is not None:
        allowed = f"{found}; a loss of {QUANTISED_LOSS} is allowed"
        return Check.that(lost <= QUANTISED_LOSS, name=name, found=allowed)
    return Check(
        name=name,
        found=f"{found}; a difference of {BLEU_TOLERANCE} is usual",
        state="ok" if abs(lost) <= BLEU_TOLERANCE else "warn",
        remedy="the models agree and their searches differ: try other values of length_penalty with the library",
    )


def _finish(folder: Path, made: Export) -> None:
    """Add the card, flush the folder and move it into place."""
    write_file(folder / CARD_FILE, made.card())
    rights = (folder / CARD_FILE).stat().st_mode & 0o777
    for file in folder.iterdir():
        # Libraries may write files that only their owner can read.
        file.chmod(rights)
        sync(file)
    sync(folder)
    # This also replaces an empty folder.
    move(folder, made.settings.out)
