"""The model folder, which averaging writes and translation, evaluation and export read.

config.json         the network, its languages, its data, the averaged training steps; SHA-256, dtype and
                    finiteness of the weights, and its own SHA-256
model.safetensors   fp32 weights under the names of `Transformer.state_dict()`, a tied matrix once, all of them finite
tokenizer.json      the tokenizer of the data folder
README.md           the model card
"""

import glob
import json
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from dist_transformer.base.errors import UserError
from dist_transformer.base.files import folder_beside, make_folder, move, remove_tree, sha256_of, whole_path, write_file
from dist_transformer.base.locks import is_locked
from dist_transformer.base.markdown import fill_card
from dist_transformer.base.verified import Stated, has_own_hash, with_own_hash
from dist_transformer.config.directions import Direction, choose_direction, worth_stating
from dist_transformer.config.language_codes import base_language
from dist_transformer.config.plain import OMIT_DEFAULT, from_plain, read_object, to_plain
from dist_transformer.config.settings import ModelConfig
from dist_transformer.data.folder.marks import LanguageMarks
from dist_transformer.data.vocabulary.kinds import load_vocabulary
from dist_transformer.data.vocabulary.tokenizer import Vocabulary
from dist_transformer.runtime.launch import as_typed, own_command

# Commands check their arguments with this module, and torch costs seconds: what reads or writes weights imports it.
if TYPE_CHECKING:
    import torch

    from dist_transformer.model.transformer import Transformer

FORMAT_VERSION = 2
"""Version of the format; since 2, config.json has the hash of the weights and its own."""

CONFIG_FILE, WEIGHTS_FILE, TOKENIZER_FILE, CARD_FILE = "config.json", "model.safetensors", "tokenizer.json", "README.md"

_REMEDY = "write the folder again with dist-transformer average"
_OF_ANOTHER_LIBRARY = (
    "only models that dist-transformer wrote are read, so train one with dist-transformer train, or convert a "
    "folder of transformers with dist-transformer import"
)
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_SHARE = re.compile(r"[0-9]+(\.[0-9]*)?|\.[0-9]+")
_FOREIGN_WEIGHTS = (".bin", ".pt", ".pth", ".ckpt", ".npz", ".h5", ".msgpack", ".onnx", ".gguf")

# Below this share of training sources of several sentences, a model translates the first sentence of a line. Captions:
# 0.02% (Multi30k), and of 102 lines of two captions it scored 28 BLEU as they stood and 52 sentence by sentence.
_FEW_SEVERAL = 0.02


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelInfo:
    """Contents of a model folder's config.json."""

    model: ModelConfig
    tokenizer_sha256: str
    source_language: str
    target_language: str
    directions: tuple[Direction, ...] = field(default=(), metadata=OMIT_DEFAULT)
    """Directions; empty if there is only one, without tags. The two languages above are those of the first one."""
    marks: tuple[LanguageMarks, ...] = field(default=(), metadata=OMIT_DEFAULT)
    """Marks of the languages of each direction; empty for models of older versions."""
    corpus: str
    """Name of the training data, for reports."""
    synthetic: bool
    """Whether the training data was generated, so that scores say nothing about real text."""
    steps: tuple[int, ...]
    """Training steps whose weights were averaged."""
    longest_source: int | None = field(default=None, metadata=OMIT_DEFAULT)
    """Tokens of the longest source that the run trained on, tags included; None for models of older versions."""
    several_sentences: float | None = field(default=None, metadata=OMIT_DEFAULT)
    """Share of the sources of the training that have more than one sentence; None for models of older versions."""
    guided: bool = field(default=False, metadata=OMIT_DEFAULT)
    """Whether the training guided attention by alignments."""
    run: str | None = None
    """Identity of the run (`run.folder.run_identity`), so that weights of two runs are not averaged."""

    @property
    def all_directions(self) -> tuple[Direction, ...]:
        plain = Direction(source_language=self.source_language, target_language=self.target_language)
        return self.directions or (plain,)

    @property
    def direction(self) -> Direction:
        """The only direction.

        Raises:
            UserError: there are several; `facing` chooses one.
        """
        return choose_direction(self.all_directions)

    @property
    def split_over(self) -> int | None:
        """Tokens above which lines of several sentences are split by default; None: only lines too long for the model.

        A model that has hardly seen such lines gets one sentence at a time.
        """
        seldom = self.several_sentences is not None and self.several_sentences < _FEW_SEVERAL
        return 0 if seldom else self.longest_source

    @property
    def marks_of_direction(self) -> LanguageMarks:
        """Marks of the only direction; no marks if they are not known."""
        return self.marks[0] if len(self.marks) == 1 else LanguageMarks()

    def facing(self, name: str | None = None, tags: Sequence[str] | None = None) -> "ModelInfo":
        """Return the same info with only the direction that `choose_direction` chooses."""
        chosen = choose_direction(self.all_directions, name, tags)
        names = [direction.name for direction in self.all_directions]
        own = self.marks[names.index(chosen.name) :][:1] if len(self.marks) == len(names) else ()
        return replace(
            self,
            source_language=chosen.source_language,
            target_language=chosen.target_language,
            directions=worth_stating([chosen]),
            marks=own,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightsInfo:
    """Entry of config.json about model.safetensors."""

    sha256: str
    dtype: str = "fp32"
    finite: bool = True


def write_model_folder(
    path: Path,
    *,
    info: ModelInfo,
    weights: "dict[str, torch.Tensor]",
    tokenizer_json: bytes,
    notes: Sequence[str] = (),
) -> None:
    """Write a model folder under a temporary name, flush it and rename it to `path`; replace an older model folder.

    Args:
        weights: weights by the names of `Transformer.state_dict()`; all must be finite in fp32.
        tokenizer_json: content of the data folder's tokenizer.json.
        notes: lines of the model card, in Markdown; names in them are written by `base.markdown.code`.

    Raises:
        UserError: `path` holds something else, or cannot be written, or the weights are not finite.
    """
    import safetensors.torch
    import torch

    from dist_transformer.base.tensor_file import is_finite

    refuse_other_content(path)
    fp32 = {name: tensor.detach().to("cpu", torch.float32).contiguous() for name, tensor in weights.items()}
    if broken := next((name for name, tensor in fp32.items() if not is_finite(tensor)), None):
        raise UserError(
            f"{path} is not written, because {broken!r} holds numbers that are not finite: use other weights"
        )
    make_folder(path.parent)
    _put_back(path)
    with folder_beside(path) as temporary:
        with whole_path(temporary / WEIGHTS_FILE) as file:
            safetensors.torch.save_file(fp32, file)
        stated = to_plain(WeightsInfo(sha256=sha256_of(temporary / WEIGHTS_FILE)))
        config = {"format_version": FORMAT_VERSION, **to_plain(info), "weights": stated}
        write_file(temporary / CONFIG_FILE, with_own_hash(config))
        write_file(temporary / TOKENIZER_FILE, tokenizer_json)
        parameters = sum(tensor.numel() for tensor in fp32.values())
        write_file(temporary / CARD_FILE, _model_card(path.name, info, parameters, notes))
        _move_into_place(temporary, path)


def refuse_other_content(path: Path) -> None:
    """Raise a UserError unless `path` is free or holds only an older model folder."""
    if path.is_symlink() or (path.exists() and not path.is_dir()):
        raise UserError(f"{path} exists and is not a folder: choose another name, or remove it")
    if path.is_dir() and any(path.iterdir()) and not _is_model_folder(path):
        raise UserError(f"{path} holds files that are not of a model: choose another name, or empty it")


def read_model_info(path: Path) -> ModelInfo:
    """Read config.json of the model folder `path`.

    Raises:
        UserError: it is missing, damaged, or of another format.
    """
    return _read_config(path)[0]


def stated_weights(path: Path) -> Stated:
    """Read the recorded hash of the weight file from config.json of the model folder `path`.

    Raises:
        UserError: `read_model_info` failed.
    """
    return Stated(_read_config(path)[1].sha256, CONFIG_FILE, _REMEDY)


def _read_config(path: Path) -> tuple[ModelInfo, WeightsInfo]:
    file = path / CONFIG_FILE
    for name in (CONFIG_FILE, WEIGHTS_FILE):
        # A file of weights has no names below it.
        if not path.is_dir() or not (path / name).exists() or is_of_transformers(path):
            raise no_model(path, name)
    try:
        content = file.read_bytes()
        values = json.loads(content)
        version, sha256 = values.pop("format_version", None), values.pop("sha256", None)
    except (OSError, ValueError, RecursionError, AttributeError, TypeError) as error:
        raise UserError(f"{file} cannot be read as a JSON object ({error}): {_REMEDY}") from None
    if version != FORMAT_VERSION:
        remedy = "update dist_transformer"
        if version == 1:
            remedy = f"format 1 has no hash of the weights, so {_REMEDY}"
        raise UserError(f"{file} has format {version}, and this version reads {FORMAT_VERSION}: {remedy}")
    if not isinstance(sha256, str) or not sha256 or not has_own_hash(content, sha256):
        raise UserError(f"{file} is damaged or was edited (its SHA-256 differs from the recorded one): {_REMEDY}")
    weights = from_plain(WeightsInfo, values.pop("weights", {}), str(file), remedy=_REMEDY)
    return from_plain(ModelInfo, values, str(file), remedy=_REMEDY), weights


def load_model(
    path: Path, device: "torch.device", dtype: "torch.dtype | None" = None, in_int8: bool = False
) -> "tuple[Transformer, Vocabulary, ModelInfo]":
    """Read a model folder; the model is in evaluation mode.

    Args:
        dtype: dtype of the parameters; None: fp32.
        in_int8: whether searches multiply in int8.

    Raises:
        UserError: a file is missing or damaged, or they do not belong together.
    """
    info, stated = _read_config(path)
    tokenizer = load_vocabulary(path / TOKENIZER_FILE, sha256=info.tokenizer_sha256)
    import torch

    from dist_transformer.base.tensor_file import open_tensors
    from dist_transformer.model.transformer import Transformer

    Stated(stated.sha256, CONFIG_FILE, _REMEDY).check(path / WEIGHTS_FILE)
    model = Transformer(info.model)
    model.is_guided = info.guided
    with torch.no_grad(), open_tensors(path / WEIGHTS_FILE) as weights:
        for name, parameter in model.state_dict().items():
            parameter.copy_(weights.get_tensor(name))
    return for_decoding(model, device, dtype or torch.float32, in_int8), tokenizer, info


def for_decoding(
    model: "Transformer", device: "torch.device", dtype: "torch.dtype", in_int8: bool = False
) -> "Transformer":
    """Put the model in evaluation mode on a device, with parameters in `dtype`."""
    model.in_int8 = in_int8
    return model.to(device).cast_parameters(dtype).eval()


def _is_model_folder(path: Path) -> bool:
    """Return whether a folder has only the files of a model folder, so that replacing it loses nothing else."""
    names = {file.name for file in path.iterdir()}
    return {CONFIG_FILE, WEIGHTS_FILE} <= names <= {CONFIG_FILE, WEIGHTS_FILE, TOKENIZER_FILE, CARD_FILE}


def _move_into_place(temporary: Path, path: Path) -> None:
    """Move a folder to `path`, and remove an older folder there."""
    # Folders cannot be exchanged in one call: the older one is moved aside, and back if the new one cannot be moved.
    if not path.exists():
        move(temporary, path)
        return
    aside = path.with_name(f"{temporary.name}.old")
    move(path, aside)
    try:
        move(temporary, path)
    except OSError:
        move(aside, path)
        raise
    remove_tree(aside, as_far_as_possible=True)


def _put_back(path: Path) -> None:
    """Restore the older model if its writer was killed after moving it aside."""
    if not path.exists():
        for aside in path.parent.glob(f".{glob.escape(path.name)}.*.old"):
            if aside.is_symlink() or is_locked(aside.with_suffix("")):
                # Its writer is still running.
                continue
            move(aside, path)
            remove_tree(aside.with_suffix(""), as_far_as_possible=True)
            return


def _model_card(name: str, info: ModelInfo, parameters: int, notes: Sequence[str]) -> str:
    from huggingface_hub import ModelCardData

    ways = info.all_directions
    languages = [base_language(each) for way in ways for each in (way.source_language, way.target_language)]
    metadata = ModelCardData(
        language=list(dict.fromkeys(languages)), pipeline_tag="translation", library_name="dist_transformer"
    )
    # For a shell: a name in it may hold spaces and quotes, or commands of its own. The folder may move.
    direction = f" --direction {shlex.quote(ways[0].name)}" if len(ways) > 1 else ""
    return fill_card(
        Path(__file__).with_suffix(".md.j2"),
        metadata,
        name=name,
        info=info,
        parameters=parameters,
        notes=notes,
        flags=f'--model "$MODEL"{direction}',
        settings=to_plain(info.model),
    )


def is_hub_name(name: str) -> bool:
    """Return whether a word may be the name of a model on the hub."""
    return _HUB_NAME.fullmatch(name) is not None


def is_of_transformers(path: Path) -> bool:
    """Return whether a folder's config.json is that of a model for transformers, such as an export."""
    values = read_object(path / CONFIG_FILE)
    return "model_type" in values and "format_version" not in values


def with_share(path: Path) -> tuple[Path, float]:
    """Split `MODEL:2` into the path of a model and its share; without a number, the share is 1.

    Raises:
        UserError: the share is 0.
    """
    name, _, number = str(path).rpartition(":")
    if not name or path.exists() or not _SHARE.fullmatch(number):
        return path, 1.0
    if float(number) == 0:
        raise UserError(f"{path} has no share in the result: leave it out")
    return Path(name), float(number)


def no_model(path: Path, missing: str) -> UserError:
    """Build the error about a path that is not a model folder: what it is instead, and the way to a model."""
    inner = path / "model"
    found, remedy = f"it has no {missing}", f"{_REMEDY}, or check the path"
    if not path.exists():
        found, remedy = "it does not exist", "check the path, or make a model with dist-transformer average"
        if is_hub_name(str(path)):
            remedy += f", or take one of the hub with {as_typed(own_command('import', path, '--out', 'MODEL'))}"
    elif not path.is_dir():
        found, remedy = _no_folder(path)
    elif all((inner / name).exists() for name in (CONFIG_FILE, WEIGHTS_FILE)):
        remedy = f"use the model folder in it, {inner}"
    elif (path / "weights").is_dir():
        remedy = f"make one from this run with {_average_of_run(path)}"
    elif (path / "manifest.json").exists() and (path / "state.json").exists():
        found, remedy = "it is a checkpoint", f"make a model from it with {_average_of(path)}"
    elif path.name in ("checkpoints", "weights") and (path.parent / "metrics.jsonl").exists():
        found = f"it is the {path.name} of a run"
        remedy = f"make a model from that run with {_average_of_run(path.parent)}"
    elif (path / "metrics.jsonl").exists():
        found, remedy = "it is a run folder without weights", "average the run after its first save"
    elif (path / "index.json").exists():
        found, remedy = "it is a data folder", "use a folder that dist-transformer average wrote"
    elif is_of_transformers(path):
        found, remedy = "it is a model for transformers", _OF_ANOTHER_LIBRARY
    elif name := next((file.name for file in sorted(path.glob("*")) if file.suffix in _FOREIGN_WEIGHTS), None):
        found, remedy = f"it holds {name}, weights of another library", _OF_ANOTHER_LIBRARY
    return UserError(f"{path} is not a model folder ({found}): {remedy}")


def _no_folder(file: Path) -> tuple[str, str]:
    """Describe a file that is given as a model folder, and the way to a model."""
    folder = file.parent
    if all((folder / name).exists() for name in (CONFIG_FILE, WEIGHTS_FILE)) and not is_of_transformers(folder):
        return "it is a file of one", f"use its folder, {folder}"
    if file.suffix == ".safetensors" and folder.name == "weights":
        return "it is a weight file of a run", f"make a model from it with {_average_of(file)}"
    if file.suffix == ".safetensors" and (folder / "manifest.json").exists():
        return "it is a file of a checkpoint", f"make a model from that with {_average_of(folder)}"
    if file.suffix in (*_FOREIGN_WEIGHTS, ".safetensors"):
        return "it is a weight file of another library", _OF_ANOTHER_LIBRARY
    return "it is a file", "use a folder that dist-transformer average wrote"


def _average_of_run(run_dir: Path) -> str:
    return as_typed(own_command("average", "--run-dir", run_dir, "--out", run_dir / "model"))


def _average_of(weights: Path) -> str:
    return as_typed(own_command("average", "--checkpoints", weights, "--out", "MODEL"))
