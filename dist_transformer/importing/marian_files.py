"""Reading of Marian's own files: `model.npz` with its embedded settings, and the vocabularies that `decoder.yml` names.

What they hold is given by the names of Hugging Face's MarianMT. Marian computes sinusoids as tensor2tensor does, adds
1e-6 in LayerNorm, and begins the decoder with a vector of zeros, which becomes that of an entry `<pad>`.
"""

import json
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

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
from dist_transformer.importing.marian_folder import NEVER

_PAD = SPECIALS[PAD_ID]
_DECODER = "decoder.yml"
_SETTINGS = "special:model.yml"
_TABLES = (".yml", ".yaml", ".json")
_SPLITTERS = ("source.spm", "target.spm")
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
_ACTIVATIONS: dict[str, Literal["relu", "swish"]] = {"relu": "relu", "swish": "swish"}


@dataclass(frozen=True, kw_only=True, slots=True)
class MarianFiles:
    """Files that `decoder.yml` names."""

    weights: Path
    vocabularies: tuple[Path, Path]
    """Vocabularies of the sources and of the targets."""

    @property
    def has_sentencepiece(self) -> bool:
        """Whether Marian itself splits text."""
        return all(file.suffix == ".spm" for file in self.vocabularies)


def find_marian_files(path: Path) -> MarianFiles:
    """Find a model by a `decoder.yml`, or by a folder with one.

    Raises:
        UserError: there is none, or it is not of one model with two vocabularies.
    """
    if path.is_dir():
        found = [path / _DECODER] if (path / _DECODER).exists() else sorted(path.glob(f"*.{_DECODER}"))
        if not found:
            raise UserError(f"{path} has neither a config.json nor a {_DECODER}: pass the folder of a model")
        if len(found) > 1:
            raise UserError(f"{path} has {len(found)} models: name one of them, such as {found[0]}")
        (path,) = found
    values = _yaml(_read(path), path)
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
    return MarianFiles(weights=weights, vocabularies=(source, target))


def read_marian_vocabulary(files: MarianFiles) -> MarianVocabulary:
    """Read the vocabularies: one for both sides if their files are the same.

    Raises:
        UserError: they are of a kind that is not supported.
    """
    sides = [_side(files, file, model) for file, model in zip(files.vocabularies, _SPLITTERS, strict=True)]
    tables, models = ([side[part] for side in sides] for part in (0, 1))
    second = {} if tables[0] == tables[1] else {"target_table": tables[1]}
    try:
        return wrap_marian(source=models[0], target=models[1], table=tables[0], **second)
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
    content = _read(file)
    if file.suffix == ".spm":
        try:
            try_in_child(content)
            backend = read_model(content).backend
        except ValueError as error:
            raise UserError(f"{file} {error}: {_REMEDY}") from None
        pieces = [backend.id_to_piece(i) for i in range(backend.get_piece_size())]
        for i in (backend.eos_id(), backend.unk_id()):
            if i >= 0 and pieces[i] not in SPECIALS:
                raise UserError(f"{file} spells a special token {pieces[i]!r}, not </s> or <unk>: {_REMEDY}")
        entries, model = {piece: i for i, piece in enumerate(pieces)}, content
    elif file.suffix in _TABLES:
        values = _yaml(content, file)
        try:
            entries = {piece: int(number) for piece, number in values.items()}
        except (TypeError, ValueError):
            raise UserError(f"{file} is not a table of ids: {_REMEDY}") from None
        remedy = "Marian's text was split before it, and a model here needs what split it"
        model = _read(files.weights.with_name(splitter), remedy)
    else:
        raise UserError(f"{file} is a vocabulary of a kind that a model here cannot express, such as factors")
    if _PAD in entries:
        raise UserError(f"{file} has {_PAD}, which a model here needs for the begin of the decoder")
    return json.dumps({**entries, _PAD: len(entries)}, ensure_ascii=False).encode(), model


class MarianWeights:
    """`model.npz`: its settings, and its arrays by the names of `MarianMTModel.state_dict()`."""

    def __init__(self, path: Path) -> None:
        """Read the settings.

        Raises:
            UserError: they are missing, or are those of a model that ours cannot express.
        """
        self.path = path
        with self._open() as archive:
            self._names = set(archive.files)
            if _SETTINGS not in self._names:
                raise UserError(f"{path} has no embedded settings ({_SETTINGS}): convert it with a newer Marian")
            text = self._array(archive, _SETTINGS).tobytes().rstrip(b"\0")
        self.settings = _yaml(text, path)

    def config(self, *, has_two: bool) -> ModelConfig:
        """Return our settings; sizes of vocabularies are theirs, with `<pad>`.

        Args:
            has_two: whether the targets have a vocabulary of their own.

        Raises:
            UserError: our model cannot express theirs.
        """
        values = {name: str(value) for name, value in self.settings.items()}
        for name, allowed in _EXPRESSED.items():
            if values.get(name, allowed[0]) not in allowed:
                raise self._lacks(f"{name}: {values[name]:.100}")
        activation = values.get("transformer-ffn-activation", "swish")
        if activation not in _ACTIVATIONS:
            raise self._lacks(f"transformer-ffn-activation: {activation}")
        try:
            ffn_width = int(values["transformer-dim-ffn"])
            if int(values.get("transformer-decoder-dim-ffn", 0)) not in (0, ffn_width):
                raise self._lacks("feed-forward layers of different widths in encoder and decoder")
            sizes = [int(size) + 1 for size in self.settings["dim-vocabs"]]
            if not has_two and sizes[0] != sizes[1]:
                raise self._lacks(f"a vocabulary of two sizes, {values['dim-vocabs']:.100}")
            return ModelConfig(
                width=int(values["dim-emb"]),
                encoder_layers=int(values["enc-depth"]),
                decoder_layers=int(values["dec-depth"]),
                heads=int(values["transformer-heads"]),
                ffn_width=ffn_width,
                activation=_ACTIVATIONS[activation],
                norm_epsilon=1e-6,
                positions="sinusoidal_t2t",
                output_bias=True,
                begin_with_pad=True,
                tie_embeddings=self._ties(values, has_two=has_two),
                vocab_size=sizes[0],
                target_vocab_size=sizes[1] if has_two else 0,
            )
        except (KeyError, ValueError, TypeError, IndexError) as error:
            raise UserError(f"{self.path} has settings that are incomplete ({error}): {_REMEDY}") from None

    def _ties(self, values: dict[str, str], *, has_two: bool) -> Literal["all", "target", "none"]:
        """Return which matrices are one."""
        everything, sources, target = (
            values.get(f"tied-embeddings{end}", "false") == "true" for end in ("-all", "-src", "")
        )
        if everything or (sources and target):
            if has_two:
                raise self._lacks("two vocabularies with one embedding")
            return "all"
        if sources:
            raise self._lacks("one embedding and an output apart from it (tied-embeddings-src)")
        return "target" if target else "none"

    def tensors(self, config: ModelConfig) -> dict[str, torch.Tensor]:
        """Read the arrays, with rows for `<pad>`: zeros, which are never an output.

        Args:
            config: that of `config`.

        Raises:
            UserError: an array is missing or of another shape, or there are more.
        """
        rows = config.output_size - 1
        found: dict[str, torch.Tensor] = {}
        left = self._names - {_SETTINGS}
        with self._open() as archive:
            for theirs, name, shape in _places(config):
                found[name] = torch.from_numpy(self._weights(archive, theirs, shape))
                left.discard(theirs)
            bias = np.zeros((1, rows), np.float32)
            if self.settings.get("output-omit-bias") != "true":
                bias = self._weights(archive, _LOGIT_BIAS, (1, rows))
                left.discard(_LOGIT_BIAS)
            matrices: dict[str, torch.Tensor] = {}
            for name, side in matrices_of(config).items():
                theirs, is_transposed = self._matrix(config, *side)
                shape = (config.vocab_sizes[side[1]] or config.vocab_size) - 1, config.width
                array = self._weights(archive, theirs, shape[::-1] if is_transposed else shape)
                matrices[name] = torch.from_numpy(array.T if is_transposed else array)
                left.discard(theirs)
        if left:
            raise self._lacks(f"the weights {min(left)}")
        # Marian multiplies rows by matrices from the right.
        found = {
            name: tensor.T if name.endswith(("proj.weight", "fc1.weight", "fc2.weight")) else tensor[0]
            for name, tensor in found.items()
        }
        found |= {name: torch.cat([matrix, torch.zeros(1, config.width)]) for name, matrix in matrices.items()}
        found[BIAS] = torch.cat([torch.from_numpy(bias), torch.full((1, 1), NEVER)], dim=1)
        return found

    def _matrix(self, config: ModelConfig, ours: str, side: int) -> tuple[str, bool]:
        """Return Marian's name of a matrix of the vocabulary, and whether it is stored with a column per entry."""
        if ours == "output_projection":
            # Older versions multiply by it from the right.
            is_older = f"{_OUTPUT}t" not in self._names
            return _OUTPUT if is_older else f"{_OUTPUT}t", is_older
        return _EMBEDDING if config.tie_embeddings == "all" else f"{('encoder', 'decoder')[side]}_{_EMBEDDING}", False

    @contextmanager
    def _open(self) -> Iterator[Any]:
        try:
            archive = np.load(self.path, allow_pickle=False)
        except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
            raise self._unreadable(getattr(error, "strerror", None) or error) from None
        with archive:
            yield archive

    def _array(self, archive: Any, name: str) -> np.ndarray:
        try:
            return archive[name]
        except Exception as error:  # damaged archives raise errors of all kinds
            raise self._unreadable(f"{name}: {error}") from None

    def _weights(self, archive: Any, name: str, shape: tuple[int, ...]) -> np.ndarray:
        if name not in self._names:
            raise UserError(f"{self.path} has no weights {name}, which its settings demand: {_REMEDY}")
        array = self._array(archive, name)
        if array.shape != shape or array.dtype not in (np.float32, np.float16):
            raise self._lacks(f"{name} as {array.dtype} of shape {array.shape}, not as float32 of {shape}")
        return array.astype(np.float32)

    def _unreadable(self, reason: object) -> UserError:
        return UserError(f"{self.path} cannot be read ({reason}): {_REMEDY}")

    def _lacks(self, what: str) -> UserError:
        return UserError(f"{self.path} has {what}, which a model here cannot express")


_EMBEDDING, _OUTPUT = "Wemb", "decoder_ff_logit_out_W"
_LOGIT_BIAS = "decoder_ff_logit_out_b"


def _places(config: ModelConfig) -> Iterator[tuple[str, str, tuple[int, int]]]:
    """Yield Marian's name, MarianMT's name and Marian's shape of each array, but for those of the vocabulary."""
    width, inner = config.width, config.ffn_width
    kinds = (("scale", "weight"), ("bias", "bias"))
    for side, count in (("encoder", config.encoder_layers), ("decoder", config.decoder_layers)):
        attentions = {"self": "self_attn"} | ({"context": "encoder_attn"} if side == "decoder" else {})
        for i in range(count):
            theirs, name = f"{side}_l{i + 1}", f"model.{side}.layers.{i}"
            for part, attention in attentions.items():
                for letter in "qkvo":
                    projection = f"{name}.{attention}.{'out' if letter == 'o' else letter}_proj"
                    yield f"{theirs}_{part}_W{letter}", f"{projection}.weight", (width, width)
                    yield f"{theirs}_{part}_b{letter}", f"{projection}.bias", (1, width)
                for kind, parameter in kinds:
                    place = f"{name}.{attention}_layer_norm.{parameter}"
                    yield f"{theirs}_{part}_Wo_ln_{kind}", place, (1, width)
            for number, shape in ((1, (width, inner)), (2, (inner, width))):
                yield f"{theirs}_ffn_W{number}", f"{name}.fc{number}.weight", shape
                yield f"{theirs}_ffn_b{number}", f"{name}.fc{number}.bias", (1, shape[1])
            for kind, parameter in kinds:
                yield f"{theirs}_ffn_ffn_ln_{kind}", f"{name}.final_layer_norm.{parameter}", (1, width)


def _read(file: Path, remedy: str = _REMEDY) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise UserError(f"{file} cannot be read ({error.strerror}): {remedy}") from None


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
