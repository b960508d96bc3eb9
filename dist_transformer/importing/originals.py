"""Published models that can be imported: folders of Hugging Face's MarianMT, and Marian's own."""

import functools
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from dist_transformer.base.checks import Check
from dist_transformer.base.files import leaving_at_sigterm
from dist_transformer.config.settings import ModelConfig
from dist_transformer.data.vocabulary.marian import MarianVocabulary
from dist_transformer.data.vocabulary.tokenizer import UNK_ID
from dist_transformer.export.huggingface import HuggingFacePeer
from dist_transformer.export.marian import Numbering
from dist_transformer.export.peer import Peer, require_library
from dist_transformer.importing.marian_files import (
    MarianFiles,
    MarianWeights,
    find_marian_files,
    read_marian_vocabulary,
)
from dist_transformer.importing.marian_folder import CONFIG_FILE, read_config, read_languages, read_vocabulary
from dist_transformer.importing.marian_program import MarianPeer, find_program


@dataclass(frozen=True, kw_only=True, slots=True)
class Loaded:
    """A model that its own program has loaded."""

    peer: Peer
    weights: dict[str, torch.Tensor]
    """Weights by the names of `MarianMTModel.state_dict()`."""
    more: tuple[Callable[[Sequence[str], int], Check], ...] = ()
    """Checks beside those of the gate, of lines and the most tokens of an output."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Original:
    """A model of another program."""

    config: ModelConfig
    """Its settings as ours; sizes of vocabularies are those of its embeddings, with `<pad>`."""
    vocabulary: MarianVocabulary
    languages: tuple[str | None, str | None] = (None, None)
    """Source and target language; None where it names none."""
    load: Callable[[torch.device, Sequence[str]], AbstractContextManager[Loaded]]
    """Called with a device and the tags in front of every source."""


def open_original(path: Path, program: str | None) -> Original:
    """Read settings and vocabulary of a model.

    Args:
        path: folder of MarianMT, or folder or `decoder.yml` of Marian.
        program: Marian's program; None: the one of this machine.

    Raises:
        UserError: it is not a model that ours can express, or what loads it is missing.
    """
    if (path / CONFIG_FILE).exists():
        require_library("transformers")
        vocabulary = read_vocabulary(path)
        config = read_config(path, vocabulary)
        load = functools.partial(_by_transformers, path, vocabulary)
        return Original(config=config, vocabulary=vocabulary, languages=read_languages(path), load=load)
    files = find_marian_files(path)
    weights = MarianWeights(files.weights)
    vocabulary = read_marian_vocabulary(files)
    config = weights.config(has_two=vocabulary.sizes[1] > 0)
    command = find_program(program)
    return Original(
        config=config,
        vocabulary=vocabulary,
        load=functools.partial(_by_marian, command, files, weights, config, vocabulary),
    )


@contextmanager
def _by_transformers(
    folder: Path, vocabulary: MarianVocabulary, device: torch.device, tags: Sequence[str]
) -> Iterator[Loaded]:
    source, target = map(Numbering, vocabulary.their_ids)
    peer = HuggingFacePeer(folder, device, tags, numberings=(source, target))
    # Theirs reads `</s>` in a text as the end of the text. Ours keeps it text, so that is not compared.
    peer.tokenizer.split_special_tokens = True
    # Folders of transformers up to 4.40 say that decoding changes ` ,` to `,`. Ours does not.
    peer.tokenizer.clean_up_tokenization_spaces = False
    peer.never = target.of([UNK_ID, *vocabulary.target.tag_ids(vocabulary.target.tags)])
    yield Loaded(peer=peer, weights=dict(peer.model.state_dict()))


@contextmanager
def _by_marian(
    program: Path,
    files: MarianFiles,
    weights: MarianWeights,
    config: ModelConfig,
    vocabulary: MarianVocabulary,
    device: torch.device,
    tags: Sequence[str],
) -> Iterator[Loaded]:
    # Marian's processes end with ours.
    with leaving_at_sigterm(), tempfile.TemporaryDirectory() as folder:
        peer = MarianPeer(program, files, vocabulary, Path(folder), tags)
        more = (functools.partial(peer.texts, vocabulary),) if files.has_sentencepiece else ()
        yield Loaded(peer=peer, weights=weights.tensors(config), more=more)
