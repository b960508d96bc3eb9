"""Reading of Marian's own files: `model.npz` with its embedded settings, and the vocabularies that `decoder.yml` names.

What they hold is given by the names of Hugging Face's MarianMT. Their vocabulary gets an entry `<pad>`, of zeros.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml

from dist_transformer.base.errors import UserError
from dist_transformer.config.settings import ModelConfig
from dist_transformer.data.vocabulary.marian import MarianVocabulary, wrap_marian
from dist_transformer.data.vocabulary.sentence_piece import read_model
from dist_transformer.data.vocabulary.tokenizer import PAD_ID, SPECIALS
from dist_transformer.data.vocabulary.trial import try_in_child
from dist_transformer.export.marian import BIAS, matrices_of
from dist_transformer.export.marian_files import (
    DECODER_FILE,
    OUTPUT_BIAS,
    SETTINGS_ENTRY,
    MarianFiles,
    matrices_in,
    places,
)
from dist_transformer.importing.marian_folder import NEVER, read_bytes, refuse_lacks

_PAD = SPECIALS[PAD_ID]
# Older versions multiply by it from the right; newer ones have its transpose.
_OLDER_OUTPUT = "decoder_ff_logit_out_W"
_REMEDY = "pass Marian's decoder.yml, next to the files that it names"
# Values that our model has; a version of Marian without the setting has the first one.
_EXPRESSED: dict[str, tuple[str, ...]] = {
    "type": ("transformer",),
    "input-types": ("[]", "['sequence', 'sequence']"),
    "factors-dim-emb": ("0",),
    "lemma-dim-emb": ("0",),
    "right-left": ("false",),
    "ulr": ("false",),
    "transformer-decoder-autoreg": ("self-attention",),
    "transformer-decoder-ffn-depth": ("0", "2"),
    "transformer-disable-position-embeddings": ("false",),
    "transformer-train-position-embeddings": ("false",),
    "transformer-attention-mask": ("default",),
    "transformer-ffn-depth": ("2",),
    "transformer-ffn-activation": ("swish", "relu"),
    "transformer-no-affine": ("false",),
    "transformer-no-bias": ("false",),
    "transformer-no-projection": ("false",),
    "transformer-postprocess-emb": ("d", ""),
    # The paper's post-norm: d(ropout), a(dd), n(orm). With pre-norm, Marian scores and translates by other functions.
    "transformer-preprocess": ("", "d"),
    "transformer-postprocess": ("dan", "an"),
    "transformer-postprocess-top": ("",),
    "transformer-tied-layers": ("[]",),
    "transformer-rnn-projection": ("false",),
}


def find_marian_files(path: Path) -> MarianFiles:
    """Find a model by a `decoder.yml`, or by a folder with one.

    Raises:
        UserError: there is none, or it is not of one model with two vocabularies.
    """
    if path.is_dir():
        found = [path / DECODER_FILE] if (path / DECODER_FILE).exists() else sorted(path.glob(f"*.{DECODER_FILE}"))
        if not found:
            _refuse_bergamot([*path.glob("*.bin")], path)
            raise UserError(f"{path} has neither a config.json nor a {DECODER_FILE}: pass the folder of a model")
        if len(found) > 1:
            raise UserError(f"{path} has {len(found)} models: name one of them, such as {found[0]}")
        (path,) = found
    elif not path.exists():
        raise UserError(f"{path} does not exist: pass the folder of a model, or ORG/NAME, a name of the hub")
    elif path.suffix not in (".yml", ".yaml"):
        _refuse_bergamot([path], path.parent)
        raise UserError(f"{path} is one file of a model: pass the folder, or Marian's decoder.yml")
    values = _yaml(read_bytes(path, _REMEDY), path)
    models, vocabularies = (
        [path.parent / name for name in values.get(key) or () if isinstance(name, str)] for key in ("models", "vocabs")
    )
    if len(models) != 1 or len(vocabularies) != 2:
        raise UserError(
            f"{path} names {len(models)} models and {len(vocabularies)} vocabularies, not one model and two "
            f"vocabularies: {_REMEDY}"
        )
    # Training writes the paths of its machine.
    (weights, source, target) = (
        file if file.exists() else path.with_name(file.name) for file in (*models, *vocabularies)
    )
    _refuse_bergamot([weights], weights.parent)
    return MarianFiles(weights=weights, vocabularies=(source, target))


def _refuse_bergamot(weights: Sequence[Path], folder: Path) -> None:
    """Raise a UserError if weights are of a model for Bergamot, as Firefox has it."""
    if any(".intgemm" in file.name for file in weights):
        vocabulary = next(iter(sorted(folder.glob("*.spm"))), "X.spm")
        raise UserError(
            f"{folder} has an 8-bit Bergamot model with a recurrent decoder, which cannot be imported: its vocabulary "
            f"can, by prepare --tokenizer {vocabulary}, and what it translates is text for a student"
        )


def read_marian_vocabulary(files: MarianFiles) -> MarianVocabulary:
    """Read the vocabularies: one for both sides if their files are the same.

    Raises:
        UserError: they are of a kind that is not supported.
    """
    (table, source), (other, target) = (
        _side(files, file, f"{side}.spm") for file, side in zip(files.vocabularies, ("source", "target"), strict=True)
    )
    try:
        return wrap_marian(source=source, target=target, table=table, target_table=None if other == table else other)
    except ValueError as error:
        said = str(error)
        for name, file in zip(("target_vocab.json", "vocab.json"), files.vocabularies[::-1], strict=True):
            said = said.replace(name, file.name)
        raise UserError(f"{files.weights.parent} {said}: {_REMEDY}") from None


def _side(files: MarianFiles, file: Path, splitter: str) -> tuple[bytes, bytes]:
    """Read the vocabulary of one side; give its table of ids, with an entry `<pad>`, and its SentencePiece model.

    Args:
        splitter: name of the model next to the weights, if Marian did not split text itself.
    """
    content = read_bytes(file, _REMEDY)
    if file.suffix == ".spm":
        try:
            try_in_child(content)
            backend = read_model(content).backend
        except ValueError as error:
            raise UserError(f"{file} {error}: {_REMEDY}") from None
        entries = {backend.id_to_piece(i): i for i in range(backend.get_piece_size())}
        model = content
    elif file.suffix in (".yml", ".yaml", ".json"):
        try:
            entries = {piece: int(number) for piece, number in _yaml(content, file).items()}
        except (TypeError, ValueError):
            raise UserError(f"{file} is not a table of ids: {_REMEDY}") from None
        remedy = "Marian's text was split before it, and a model here needs what split it"
        model = read_bytes(files.weights.with_name(splitter), remedy)
    else:
        raise UserError(f"{file} is a vocabulary of a kind that a model here cannot express, such as factors")
    if _PAD in entries:
        raise UserError(f"{file} has {_PAD}, which a model here needs for the begin of the decoder")
    return json.dumps({**entries, _PAD: len(entries)}, ensure_ascii=False).encode(), model


class MarianWeights:
    """`model.npz`: its settings, and its arrays by the names of `MarianMTModel.state_dict()`."""

    def __init__(self, path: Path) -> None:
        """Read the file.

        Raises:
            UserError: it cannot be read, or has no settings.
        """
        self.path = path
        try:
            with np.load(path, allow_pickle=False) as archive:
                self._arrays = dict(archive)
        except Exception as error:  # damaged archives raise errors of all kinds
            reason = getattr(error, "strerror", None) or error
            raise UserError(f"{path} cannot be read ({reason}): {_REMEDY}") from None
        if SETTINGS_ENTRY not in self._arrays:
            raise UserError(f"{path} has no embedded settings ({SETTINGS_ENTRY}): convert it with a newer Marian")
        self.settings = _yaml(self._arrays.pop(SETTINGS_ENTRY).tobytes().rstrip(b"\0"), path)
        self._unused = set(self._arrays)

    def config(self, *, has_two: bool) -> ModelConfig:
        """Return our settings; sizes of vocabularies are theirs, with `<pad>`.

        Args:
            has_two: whether the targets have a vocabulary of their own.

        Raises:
            UserError: our model cannot express theirs.
        """
        values = {name: str(value) for name, value in self.settings.items()}
        found = ((name, values[name], allowed) for name, allowed in _EXPRESSED.items() if name in values)
        refuse_lacks(self.path, {f"{name}: {value:.100}": value not in allowed for name, value, allowed in found})
        everything, sources, target = (values.get(f"tied-embeddings{end}") == "true" for end in ("-all", "-src", ""))
        shares = everything or (sources and target)
        try:
            ffn_width, sizes = values["transformer-dim-ffn"], [int(size) + 1 for size in self.settings["dim-vocabs"]]
            has_widths = values.get("transformer-decoder-dim-ffn", "0") not in ("0", ffn_width)
            lacks = {
                "feed-forward layers of different widths in encoder and decoder": has_widths,
                f"a vocabulary of two sizes, {values['dim-vocabs']:.100}": not has_two and sizes[0] != sizes[1],
                "two vocabularies with one embedding": shares and has_two,
                "one embedding and an output apart from it (tied-embeddings-src)": sources and not shares,
            }
            refuse_lacks(self.path, lacks)
            return ModelConfig(
                width=int(values["dim-emb"]),
                encoder_layers=int(values["enc-depth"]),
                decoder_layers=int(values["dec-depth"]),
                heads=int(values["transformer-heads"]),
                ffn_width=int(ffn_width),
                activation=self.settings.get("transformer-ffn-activation", "swish"),
                norm_epsilon=1e-6,
                positions="sinusoidal_t2t",
                output_bias=True,
                begin_with_zeros=True,
                tie_embeddings="all" if shares else "target" if target else "none",
                vocab_size=sizes[0],
                target_vocab_size=sizes[1] if has_two else 0,
            )
        except (KeyError, ValueError, TypeError, IndexError) as error:
            raise UserError(f"{self.path} has settings that are incomplete ({error}): {_REMEDY}") from None

    def tensors(self, config: ModelConfig) -> dict[str, torch.Tensor]:
        """Read the arrays, with rows for `<pad>`: zeros, which are never an output.

        Args:
            config: that of `config`.

        Raises:
            UserError: an array is missing or of another shape, or there are more.
        """
        rows, width = (config.vocab_size - 1, config.output_size - 1), config.width
        found: dict[str, torch.Tensor] = {}
        for theirs, name, shape in places(config):
            array = self._take(theirs, shape)
            # Marian multiplies rows by matrices from the right.
            found[name] = array[0] if shape[0] == 1 else array.T
        has_bias = self.settings.get("output-omit-bias") != "true"
        bias = self._take(OUTPUT_BIAS, (1, rows[1])) if has_bias else torch.zeros(1, rows[1])
        found[BIAS] = torch.cat([bias, torch.full((1, 1), NEVER)], dim=1)
        names = matrices_in(config)
        for name, (ours, side) in matrices_of(config).items():
            if ours == "output_projection" and _OLDER_OUTPUT in self._arrays:
                matrix = self._take(_OLDER_OUTPUT, (width, rows[side])).T
            else:
                matrix = self._take(names[ours], (rows[side], width))
            found[name] = torch.cat([matrix, torch.zeros(1, width)])
        refuse_lacks(self.path, {f"the weights {name}": True for name in sorted(self._unused)})
        return found

    def _take(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """Return an array that has this shape in fp32."""
        if name not in self._arrays:
            raise UserError(f"{self.path} has no weights {name}, which its settings demand: {_REMEDY}")
        self._unused.discard(name)
        array = self._arrays[name]
        is_other = array.shape != shape or array.dtype not in (np.float32, np.float16)
        what = f"{name} as {array.dtype} of shape {array.shape}, not as float32 of {shape}"
        refuse_lacks(self.path, {what: is_other})
        return torch.from_numpy(array.astype(np.float32))


def _yaml(content: bytes, file: Path) -> dict[str, Any]:
    """Read a table whose values are text, as Marian's library reads it: `yes` and `1.5` are words, too."""
    try:
        values = yaml.load(content, Loader=getattr(yaml, "CBaseLoader", yaml.BaseLoader))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        reason = str(error).splitlines()[0]
        raise UserError(f"{file} cannot be read as YAML ({reason}): {_REMEDY}") from None
    if not isinstance(values, dict):
        raise UserError(f"{file} is not a table in YAML: {_REMEDY}")
    return values
