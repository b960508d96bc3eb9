"""Import of a published model: nothing is written unless our model gives the same outputs as theirs."""

from dataclasses import replace
from pathlib import Path

import torch
from tqdm import tqdm

from dist_transformer.base.checks import Check
from dist_transformer.base.errors import UserError
from dist_transformer.base.files import leaving_at_sigterm
from dist_transformer.config.directions import Direction, worth_stating
from dist_transformer.config.settings import ModelConfig
from dist_transformer.data.vocabulary.marian import MarianVocabulary
from dist_transformer.data.vocabulary.tokenizer import BOS_ID, EOS_ID, PAD_ID, show_sizes
from dist_transformer.export.gate import Gate, Show, dev_text, refuse_failed
from dist_transformer.export.hub import find_folder
from dist_transformer.export.huggingface import HuggingFacePeer, never_chosen
from dist_transformer.export.libraries import Peer, require_library
from dist_transformer.export.marian import residual_order
from dist_transformer.export.marian_program import MarianPeer, find_program
from dist_transformer.importing.marian_files import MarianWeights, find_marian_files, read_marian_vocabulary
from dist_transformer.importing.marian_folder import (
    our_weights,
    read_config,
    read_settings,
    read_tokenizer_config,
    read_vocabulary,
    refuse_lacks,
)
from dist_transformer.importing.settings import ImportSettings
from dist_transformer.inference.decoding import Decoding
from dist_transformer.inference.translator import Translator
from dist_transformer.model.positions import sinusoidal_positions
from dist_transformer.model_folder import CONFIG_FILE, ModelInfo, refuse_other_content, write_model_folder

READ_LINES = 20
"""Most of the compared lines that the models read and translate; the others compare ids and texts of ids."""
MOST_TOKENS = 16
"""Most tokens of a text that they read or write. Weights that never end a text must not take longer than others."""

# Rounding of numbers up to 1 in bf16, which is coarser than fp16.
_ROUNDING = 2**-8

Original = tuple[ModelInfo, MarianVocabulary, dict[str, torch.Tensor], Peer]
"""A model of another program: the description of our model of it, its vocabulary, its weights by the names of
`MarianMTModel.state_dict()`, and the model as its program has loaded it."""


def import_model(settings: ImportSettings, device: torch.device, *, progress: tqdm, show: Show) -> ModelInfo:
    """Write a model folder with the weights of a published model, if all checks pass.

    Raises:
        UserError: a check failed, or it is not a model that ours can express. Nothing is left on disk.
    """
    refuse_other_content(settings.out)
    named, settings = settings.folder, replace(settings, folder=find_folder(settings.folder))
    progress.set_description_str("reading")
    # Marian's processes end with ours.
    with leaving_at_sigterm():
        is_of_transformers = (settings.folder / CONFIG_FILE).exists()
        original = _of_transformers(settings, device, show) if is_of_transformers else _of_marian(settings)
        info, vocabulary, weights, peer = original
        model = our_weights(weights, info.model, vocabulary).to(device)
        translator = Translator(model, vocabulary, device, Decoding(), tags=vocabulary.source.tags[:1])
        dev = dev_text(settings.source, None, translator)
        read = dev.sample(READ_LINES)
        gate = Gate(translator=translator, peer=peer, progress=progress, most=MOST_TOKENS)
        checks = gate.compare(dev, read)
        if isinstance(peer, MarianPeer):
            checks += peer.texts(read.sources, gate.longest)
    refuse_failed(checks, show, settings.out, named)
    show(checks)
    if settings.folder != named:
        # The library names the folder of a download after its commit.
        info = replace(info, corpus=f"imported from {named} at {settings.folder.name}")
    write_model_folder(settings.out, info=info, weights=dict(model.state_dict()), tokenizer_json=vocabulary.content)
    return info


def _of_transformers(settings: ImportSettings, device: torch.device, show: Show) -> Original:
    """Load a folder of MarianMT."""
    require_library("transformers")
    from transformers import GenerationConfig

    values = read_settings(settings.folder)
    vocabulary = read_vocabulary(settings.folder)
    named = read_tokenizer_config(settings.folder)
    source = settings.source_language or named.get("source_lang")
    target = settings.target_language or named.get("target_lang")
    settings = replace(settings, source_language=source, target_language=target)
    config = read_config(settings.folder / CONFIG_FILE, values, vocabulary)
    sizes = _their_sizes(vocabulary)
    surplus = [max(0, rows - size) for rows, size in zip(config.vocab_sizes, sizes, strict=True)]
    source_rows, target_rows = map(min, config.vocab_sizes, sizes)
    config = replace(config, vocab_size=source_rows, target_vocab_size=target_rows)
    info = _info(settings, config, vocabulary)
    peer = HuggingFacePeer(settings.folder, device, vocabulary, info.facing(info.all_directions[0].name))
    if any(surplus):
        peer.model.resize_token_embeddings(source_rows)
        if target_rows:
            peer.model.resize_decoder_token_embeddings(target_rows)
        found = f"{sum(surplus):,} without an entry in the vocabulary were dropped, and so was their probability"
        show([Check(name="surplus rows", found=found)])
    _make_positions_exact(settings.folder, peer, config)
    # Theirs reads `</s>` in a text as the end of the text. Ours keeps it text, so that is not compared.
    peer.tokenizer.split_special_tokens = True
    # Folders of transformers up to 4.40 say that decoding changes ` ,` to `,`. Ours does not.
    peer.tokenizer.clean_up_tokenization_spaces = False
    # The search of a folder, which may sample or forbid repeated n-grams, is no part of the model.
    begin, end, pad = (peer.ids[1][token] for token in (BOS_ID, EOS_ID, PAD_ID))
    peer.model.generation_config = GenerationConfig(
        decoder_start_token_id=begin,
        eos_token_id=end,
        pad_token_id=pad,
        suppress_tokens=never_chosen(vocabulary, info.model),
    )
    return info, vocabulary, dict(peer.model.state_dict()), peer


def _make_positions_exact(folder: Path, peer: HuggingFacePeer, config: ModelConfig) -> None:
    """Replace tables of positions that a folder in half precision holds, because those are rounded.

    Raises:
        UserError: they are others than MarianMT's.
    """
    exact = sinusoidal_positions(config.max_positions, config.width)[:, residual_order(config.width)]
    for side in (peer.model.model.encoder, peer.model.model.decoder):
        table = side.embed_positions.weight.data
        exact = exact.to(table.device)
        is_rounded = bool((table - exact).abs().max() <= _ROUNDING)
        refuse_lacks(folder, {"positions that are not its own sinusoids": not is_rounded})
        table.copy_(exact)


def _of_marian(settings: ImportSettings) -> Original:
    """Load a model of Marian, by a folder or a `decoder.yml`."""
    files = find_marian_files(settings.folder)
    weights = MarianWeights(files.weights)
    vocabulary = read_marian_vocabulary(files)
    config = weights.config(has_two=vocabulary.sizes[1] > 0)
    program = find_program(settings.program)
    info = _info(settings, config, vocabulary)
    peer = MarianPeer(program, files, vocabulary, vocabulary.source.tags[:1])
    return info, vocabulary, weights.tensors(config), peer


def _their_sizes(vocabulary: MarianVocabulary) -> tuple[int, int]:
    """Return the sizes of a vocabulary without `<s>`, which theirs lacks."""
    source_size, target_size = vocabulary.sizes
    return source_size - 1, target_size and target_size - 1


def _info(settings: ImportSettings, config: ModelConfig, vocabulary: MarianVocabulary) -> ModelInfo:
    """Describe our model.

    Args:
        config: sizes of vocabularies are those of its embeddings, with `<pad>`.
    """
    sizes = _their_sizes(vocabulary)
    if config.vocab_sizes != sizes:
        raise UserError(
            f"{settings.folder} has {show_sizes(config.vocab_sizes)} entries in its settings and {show_sizes(sizes)} "
            "in its vocabulary: use a whole folder"
        )
    source, target = settings.source_language, settings.target_language
    tags = vocabulary.source.tags
    if source is None or (target is None and not tags):
        raise UserError(f"{settings.folder} does not name its languages: pass them with --src-lang and --tgt-lang")
    directions = [Direction(source_language=source, target_language=tag.strip("<>"), tags=(tag,)) for tag in tags] or [
        Direction(source_language=source, target_language=str(target))
    ]
    return ModelInfo(
        model=config.for_vocabularies(*vocabulary.sizes),
        tokenizer_sha256=vocabulary.sha256,
        source_language=directions[0].source_language,
        target_language=directions[0].target_language,
        directions=worth_stating(directions),
        corpus=f"imported from {settings.folder.name}",
        synthetic=False,
        steps=(0,),
    )
