"""Import of a published model: nothing is written unless our model gives the same outputs as theirs."""

from collections.abc import Callable, Sequence

import torch

from dist_transformer.base.checks import Check, failed
from dist_transformer.base.errors import UserError
from dist_transformer.config.directions import Direction, worth_stating
from dist_transformer.config.settings import ModelConfig
from dist_transformer.data.vocabulary.marian import MarianVocabulary
from dist_transformer.data.vocabulary.tokenizer import show_sizes
from dist_transformer.export.gate import Progress, compare, dev_text, units
from dist_transformer.export.huggingface import longest_output
from dist_transformer.importing.marian_folder import our_weights
from dist_transformer.importing.originals import open_original
from dist_transformer.importing.settings import ImportSettings
from dist_transformer.model_folder import ModelInfo, refuse_other_content, write_model_folder

READ_LINES = 20
"""Most of the compared lines that the models read and translate; the others compare ids and texts of ids."""
LONGEST = 16
"""Most tokens of a text that they read or write. Weights that never end a text must not take longer than others."""


def import_marian(
    settings: ImportSettings, device: torch.device, *, progress: Progress, show: Callable[[Sequence[Check]], object]
) -> ModelInfo:
    """Write a model folder with the weights of a published model, if all checks pass.

    Args:
        show: called once with all checks.

    Raises:
        UserError: a check failed, or it is not a model that ours can express. Nothing is left on disk.
    """
    refuse_other_content(settings.out)
    original = open_original(settings.folder, settings.program)
    config, vocabulary = original.config, original.vocabulary
    tags = vocabulary.source.tags
    # Ours has an <s>, too.
    source, target = vocabulary.sizes
    sizes = (source - 1, target and target - 1)
    if config.vocab_sizes != sizes:
        raise UserError(
            f"{settings.folder} has {show_sizes(config.vocab_sizes)} entries in its settings and {show_sizes(sizes)} "
            "in its vocabulary: use a whole folder"
        )
    info = _info(settings, config, vocabulary, original.languages)
    progress.stage("reading")
    with original.load(device, tags[:1]) as loaded:
        model = our_weights(loaded.weights, info.model, vocabulary).to(device)
        dev = dev_text(settings.source, None, vocabulary)
        read = dev.sample(READ_LINES)
        progress.begin(units(read))
        longest = min(longest_output(config.max_positions), LONGEST)
        limits = {"longest": longest, "given": longest, "tags": tags[:1]}
        checks = list(compare(model, vocabulary, loaded.peer, dev, read, progress, **limits))
        checks += [check(read.sources, longest) for check in loaded.more]
    show(checks)
    if names := failed(checks):
        raise UserError(
            f"{settings.out} was not written, because its outputs differ from those of {settings.folder} "
            f"({', '.join(names)}): see the rows above"
        )
    write_model_folder(settings.out, info=info, weights=dict(model.state_dict()), tokenizer_json=vocabulary.content)
    return info


def _info(
    settings: ImportSettings, config: ModelConfig, vocabulary: MarianVocabulary, named: tuple[str | None, str | None]
) -> ModelInfo:
    given = (settings.source_language, settings.target_language)
    source, target = (mine or theirs for mine, theirs in zip(given, named, strict=True))
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
