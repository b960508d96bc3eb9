"""Start a run with the weights of a model folder: fine-tuning, a different continuation, or another vocabulary."""

import dataclasses
from dataclasses import dataclass
from pathlib import Path

import torch

from dist_transformer.base.errors import UserError
from dist_transformer.base.tensor_file import open_tensors
from dist_transformer.config.directions import Direction
from dist_transformer.config.settings import NOT_OF_WEIGHTS, OF_VOCABULARIES, ModelConfig
from dist_transformer.data.vocabulary.kinds import load_vocabulary
from dist_transformer.data.vocabulary.tokenizer import Tokenizer, Vocabulary
from dist_transformer.model.transformer import Transformer
from dist_transformer.model_folder import (
    TOKENIZER_FILE,
    WEIGHTS_FILE,
    ModelInfo,
    read_model_info,
    stated_weights,
)

Rows = tuple[torch.Tensor, torch.Tensor]
"""Rows of the run's matrices, and those of the folder's that they are copied from."""


@dataclass(frozen=True, kw_only=True, slots=True)
class InitialWeights:
    """The weights that a run starts with."""

    sha256: str
    """SHA-256 of the weight file."""
    file: Path
    """Weight file of the model folder. It is read one tensor at a time, so no second copy is in memory."""
    rows: tuple[Rows, Rows] | None = None
    """Rows of pieces that both vocabularies have, of sources and of targets; None if the vocabularies are the same."""
    directions: tuple[Direction, ...] = ()
    """Directions that the model was trained on."""
    note: str = ""
    """Line for the log: how many pieces the vocabularies share."""

    @torch.no_grad()
    def put_into(self, model: Transformer) -> None:
        """Replace the weights of an initialized model; rows of pieces that the folder lacks stay as they are."""
        of_pieces = model.weights_of_pieces()
        with open_tensors(self.file) as stored:
            names = {*stored.keys()}
            for name, parameter in model.named_parameters():
                # One matrix may become two or three.
                tensor = stored.get_tensor(name if name in names else "embedding")
                if self.rows is None or name not in of_pieces:
                    parameter.copy_(tensor)
                else:
                    # Every other tensor with a row per piece belongs to the target.
                    own, theirs = self.rows[name != "embedding"]
                    parameter[own] = tensor[theirs]


def read_initial_weights(source: Path, model: ModelConfig, tokenizer: Vocabulary, *, vocabulary: str) -> InitialWeights:
    """Read the weights of the model folder `source` for a run of this model and tokenizer.

    Args:
        vocabulary: `same`, or `shared_pieces` if the folder's vocabulary may be another one.

    Raises:
        UserError: it is not a model folder, it is damaged, or its tokenizer or its network is another one.
    """
    if not (source / WEIGHTS_FILE).is_file():
        raise UserError(
            f"--init-from {source} is not a model folder (it has no {WEIGHTS_FILE}): make one of weight files or "
            "checkpoints with dist-transformer average, or check the path"
        )
    info = read_model_info(source)
    is_other = info.tokenizer_sha256 != tokenizer.sha256
    if is_other and vocabulary == "same":
        raise UserError(
            f"--init-from {source} was trained with another vocabulary than --data has: prepare the data again with "
            f"dist-transformer prepare --tokenizer {source / TOKENIZER_FILE}, copy the pieces that are in both with "
            "--init-vocabulary shared_pieces, or leave --init-from out"
        )
    # Two vocabularies tie less than one does; each matrix then starts from the one that was shared.
    unties = info.model.tie_embeddings == "all" and model.target_vocab_size > 0
    free = {*OF_VOCABULARIES} if is_other else set()
    _require_fit(source, info, model, free=free | ({"tie_embeddings"} if unties else set()))
    their_tokenizer = load_vocabulary(source / TOKENIZER_FILE, sha256=info.tokenizer_sha256)
    stated, file = stated_weights(source), source / WEIGHTS_FILE
    stated.check(file)
    if not is_other:
        return InitialWeights(sha256=stated.sha256, file=file, directions=info.all_directions)
    rows, note = _shared_rows(tokenizer.source, their_tokenizer.source)
    target_rows = rows
    if model.target_vocab_size or info.model.target_vocab_size:
        target_rows, target_note = _shared_rows(tokenizer.target, their_tokenizer.target)
        note = f"sources: {note}; targets: {target_note}"
    return InitialWeights(sha256=stated.sha256, file=file, rows=(rows, target_rows), note=note)


def _shared_rows(own: Tokenizer, theirs: Tokenizer) -> tuple[Rows, str]:
    """Find the pieces that both have; also return a line about them."""
    number = {piece: i for i, piece in enumerate(theirs.pieces)}
    shared = [(i, number[piece]) for i, piece in enumerate(own.pieces) if piece in number]
    note = (
        f"{len(shared):,} of {own.vocab_size:,} pieces are in its vocabulary of {theirs.vocab_size:,}, and their "
        f"vectors are copied; {own.vocab_size - len(shared):,} are drawn from the seed"
    )
    own_ids, their_ids = torch.tensor(shared).unbind(1)
    return (own_ids, their_ids), note


def _require_fit(source: Path, info: ModelInfo, model: ModelConfig, *, free: set[str]) -> None:
    free = {*NOT_OF_WEIGHTS, *free} | (
        {"max_positions"} if model.positions in ("sinusoidal", "sinusoidal_t2t") else set()
    )
    names = [field.name for field in dataclasses.fields(model) if field.name not in free]
    differing = [
        f"model.{name} = {getattr(info.model, name)!r}, not {getattr(model, name)!r}"
        for name in names
        if getattr(info.model, name) != getattr(model, name)
    ]
    if differing:
        raise UserError(
            f"--init-from {source} has {'; '.join(differing)}: leave these settings out, because the model "
            "sets them, or leave --init-from out"
        )
