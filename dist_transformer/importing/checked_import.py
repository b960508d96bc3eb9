"""Import of a published model: nothing is written unless our model gives the same outputs as theirs."""

import itertools
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from tqdm import tqdm

from dist_transformer.base.checks import Check
from dist_transformer.base.errors import UserError
from dist_transformer.base.files import leaving_at_sigterm, write_file
from dist_transformer.config.directions import Direction, worth_stating
from dist_transformer.config.plain import read_object
from dist_transformer.config.settings import ModelConfig
from dist_transformer.data.text.lines import read_lines
from dist_transformer.data.vocabulary.m2m100 import wrap_m2m100
from dist_transformer.data.vocabulary.marian import MarianVocabulary
from dist_transformer.data.vocabulary.tokenizer import BOS_ID, EOS_ID, PAD_ID, show_sizes
from dist_transformer.export.gate import Gate, Show, dev_text, refuse_failed
from dist_transformer.export.hub import find_folder
from dist_transformer.export.huggingface import HuggingFacePeer, never_chosen
from dist_transformer.export.libraries import Peer, require_library
from dist_transformer.export.marian import residual_order
from dist_transformer.export.marian_program import MarianPeer, find_program
from dist_transformer.importing.m2m100_folder import (
    MODEL_TYPE,
    read_m2m100_config,
    read_m2m100_files,
    read_m2m100_vocabulary,
)
from dist_transformer.importing.marian_files import MarianWeights, find_marian_files, read_marian_vocabulary
from dist_transformer.importing.marian_folder import (
    Imported,
    our_weights,
    read_config,
    read_settings,
    read_tokenizer_config,
    read_vocabulary,
    refuse_lacks,
)
from dist_transformer.importing.settings import ImportSettings
from dist_transformer.importing.vocabulary_cut import cut_vocabulary
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

Original = tuple[ModelInfo, Imported, dict[str, torch.Tensor], Peer]
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
        if read_object(settings.folder / CONFIG_FILE).get("model_type") == MODEL_TYPE:
            original = _of_m2m100(settings, device, show)
        elif settings.keep_text:
            raise UserError(f"keep_text is for M2M100 and NLLB, and {named} is another model: leave --keep-text out")
        elif not (settings.folder / CONFIG_FILE).exists():
            original = _of_marian(settings)
        else:
            original = _of_marianmt(settings, device, show)
        info, vocabulary, weights, peer = original
        model = our_weights(weights, info.model, vocabulary).to(device)
        translator = Translator(model, vocabulary, device, Decoding(), tags=info.all_directions[0].tags)
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


def _of_m2m100(settings: ImportSettings, device: torch.device, show: Show) -> Original:
    """Load a folder of M2M100 or NLLB."""
    require_library("transformers")
    folder = settings.folder
    named, files = read_tokenizer_config(folder), read_m2m100_files(folder)
    source = settings.source_language or named.get("src_lang")
    target = settings.target_language or named.get("tgt_lang")
    if source is None or target is None:
        raise UserError(f"{folder} is for many languages: pass two of them with --src-lang and --tgt-lang")
    rows = read_object(folder / CONFIG_FILE).get("vocab_size", 0)
    whole = vocabulary = read_m2m100_vocabulary(folder, files, rows)
    kept = list(range(whole.vocab_size))
    if settings.keep_text:
        lines = itertools.chain.from_iterable(map(read_lines, settings.keep_text))
        files, kept = cut_vocabulary(whole, lines)
        vocabulary = wrap_m2m100(files, [whole.entries[i] for i in kept])
        found = f"{len(kept):,} of {len(whole.entries):,} entries, which are all that the text needs, stay"
        show([Check(name="vocabulary", found=found)])
    direction = Direction(source_language=source, target_language=target, tags=vocabulary.tags_between(source, target))
    info = _described(settings, read_m2m100_config(folder, vocabulary), vocabulary, [direction])
    with TemporaryDirectory() as own:
        for name, content in {**files, CONFIG_FILE: (folder / CONFIG_FILE).read_bytes()}.items():
            write_file(Path(own, name), content)
        peer = HuggingFacePeer(folder, device, vocabulary, info, tokenizer_folder=Path(own))
    if settings.keep_text:
        embedding = peer.model.get_input_embeddings().weight.data
        embedding[: len(kept)] = embedding[kept]
    _drop_surplus(peer, rows - whole.vocab_size, (len(kept), 0), show)
    peer.tokenizer.clean_up_tokenization_spaces = False
    return info, vocabulary, dict(peer.model.state_dict()), peer


def _of_marianmt(settings: ImportSettings, device: torch.device, show: Show) -> Original:
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
    _drop_surplus(peer, sum(surplus), (source_rows, target_rows), show)
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


def _drop_surplus(peer: HuggingFacePeer, surplus: int, rows: tuple[int, int], show: Show) -> None:
    """Drop rows of the embeddings, of sources and of targets, beyond these numbers.

    Args:
        surplus: number of dropped rows without an entry in the vocabulary.
    """
    if peer.model.config.vocab_size > rows[0]:
        peer.model.resize_token_embeddings(rows[0])
    if rows[1] and surplus:
        peer.model.resize_decoder_token_embeddings(rows[1])
    if not surplus:
        return
    found = f"{surplus:,} without an entry in the vocabulary were dropped, and so was their probability"
    show([Check(name="surplus rows", found=found)])


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
    return _described(settings, config.for_vocabularies(*vocabulary.sizes), vocabulary, directions)


def _described(
    settings: ImportSettings, config: ModelConfig, vocabulary: Imported, directions: Sequence[Direction]
) -> ModelInfo:
    return ModelInfo(
        model=config,
        tokenizer_sha256=vocabulary.sha256,
        source_language=directions[0].source_language,
        target_language=directions[0].target_language,
        directions=worth_stating(directions),
        corpus=f"imported from {settings.folder.name}",
        synthetic=False,
        steps=(0,),
    )
