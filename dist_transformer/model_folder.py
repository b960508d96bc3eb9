"""The model folder: what averaging writes, and what translation, evaluation and export read.

config.json         the network, its languages, its data and the training steps that were averaged
model.safetensors   fp32 weights under the names of `Transformer.state_dict()`, a tied matrix once
tokenizer.json      the tokenizer of the data folder
README.md           the model card
"""

import glob
import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError, safe_open

from dist_transformer.config.plain import OMIT_DEFAULT, from_plain, read_json, to_plain
from dist_transformer.config.settings import ModelConfig
from dist_transformer.data.tokenizer import Tokenizer
from dist_transformer.directions import Direction, choose_direction, worth_stating
from dist_transformer.errors import UserError
from dist_transformer.files import make_folder_beside, move, whole_path, write_file
from dist_transformer.model.transformer import Transformer
from dist_transformer.runtime.launch import as_typed, own_command

FORMAT_VERSION = 1
CONFIG_FILE, WEIGHTS_FILE, TOKENIZER_FILE, CARD_FILE = "config.json", "model.safetensors", "tokenizer.json", "README.md"

_REMEDY = "write the folder anew with dist-transformer average"
# 2 GiB while they are computed: 262,144 positions of a model of width 1,024.
_MOST_POSITION_NUMBERS = 2**28


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelInfo:
    """config.json of a model folder."""

    model: ModelConfig
    tokenizer_sha256: str
    source_language: str
    target_language: str
    directions: tuple[Direction, ...] = field(default=(), metadata=OMIT_DEFAULT)
    """Empty where there is one, of these two languages and without tags; otherwise these are those of the first."""
    corpus: str
    """Name of the training data, for reports."""
    synthetic: bool
    """The training data was generated: scores say nothing about real text."""
    steps: tuple[int, ...]
    """Training steps whose weights were averaged."""
    run: str | None = None
    """Identity of the run (`training.run_folder.run_identity`), so that weights of two are not averaged."""

    def __post_init__(self) -> None:
        # JSON has lists only.
        object.__setattr__(self, "steps", tuple(self.steps))

    @property
    def all_directions(self) -> tuple[Direction, ...]:
        plain = Direction(source_language=self.source_language, target_language=self.target_language)
        return self.directions or (plain,)

    @property
    def direction(self) -> Direction:
        """
        Raises:
            UserError: there are several; `facing` chooses one.
        """
        return choose_direction(self.all_directions)

    def facing(self, name: str | None = None, tags: Sequence[str] | None = None) -> "ModelInfo":
        """The same with one direction only, as `choose_direction` chooses it."""
        chosen = choose_direction(self.all_directions, name, tags)
        return replace(
            self,
            source_language=chosen.source_language,
            target_language=chosen.target_language,
            directions=worth_stating([chosen]),
        )


def write_model_folder(
    path: Path,
    *,
    info: ModelInfo,
    weights: dict[str, torch.Tensor],
    tokenizer_json: bytes,
    notes: Sequence[str] = (),
) -> None:
    """Write a model folder beside `path`, flush it and rename it; an older model folder at `path` is replaced.

    Args:
        weights: by the names of `Transformer.state_dict()`; written as fp32.
        tokenizer_json: content of the data folder's tokenizer.json.
        notes: lines of the model card, in Markdown.

    Raises:
        UserError: `path` holds something else, or cannot be written.
    """
    refuse_other_content(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _put_back(path)
        temporary = make_folder_beside(path)
    except OSError as error:
        raise UserError(f"{path} cannot be written ({error.strerror}): choose another folder") from None
    try:
        fp32 = {name: tensor.detach().to("cpu", torch.float32).contiguous() for name, tensor in weights.items()}
        with whole_path(temporary / WEIGHTS_FILE) as file:
            safetensors.torch.save_file(fp32, file)
        config = json.dumps({"format_version": FORMAT_VERSION, **to_plain(info)}, indent=2, ensure_ascii=False)
        write_file(temporary / CONFIG_FILE, config + "\n")
        write_file(temporary / TOKENIZER_FILE, tokenizer_json)
        parameters = sum(tensor.numel() for tensor in fp32.values())
        write_file(temporary / CARD_FILE, _model_card(path.name, info, parameters, notes))
        _move_into_place(temporary, path)
    except OSError as error:
        raise UserError(f"{path} cannot be written ({error.strerror}): free space or choose another folder") from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def refuse_other_content(path: Path) -> None:
    """Raise a UserError unless a model folder may be written to `path`: nothing is there, or an older one."""
    if path.is_symlink() or (path.exists() and not path.is_dir()):
        raise UserError(f"{path} exists and is not a folder: choose another name or remove it")
    if path.is_dir() and any(path.iterdir()) and not _is_model_folder(path):
        raise UserError(f"{path} holds other files than a model: choose another name or empty it")


def read_model_info(path: Path) -> ModelInfo:
    """config.json of the model folder `path`.

    Raises:
        UserError: it is missing, damaged, or of a newer format.
    """
    file = path / CONFIG_FILE
    for name in (CONFIG_FILE, WEIGHTS_FILE):
        if not (path / name).exists():
            raise UserError(f"{path} is not a model folder (it has no {name}): {_way_to_a_model(path)}")
    values = read_json(file)
    version = values.pop("format_version", None)
    if version != FORMAT_VERSION:
        raise UserError(f"{file} has format {version} and this version reads {FORMAT_VERSION}: update dist_transformer")
    return from_plain(ModelInfo, values, str(file))


def _way_to_a_model(path: Path) -> str:
    inner = path / "model"
    if all((inner / name).exists() for name in (CONFIG_FILE, WEIGHTS_FILE)):
        return f"give the model folder in it, {inner}"
    if (path / "weights").is_dir():
        average = own_command("average", "--run-dir", path, "--last", 5, "--out", inner)
        return f"make one of this run by {as_typed(average)}"
    return f"{_REMEDY}, or check the path"


def load_model(
    path: Path, device: torch.device, dtype: torch.dtype = torch.float32
) -> tuple[Transformer, Tokenizer, ModelInfo]:
    """Read a model folder; the model is in evaluation mode.

    Raises:
        UserError: a file is missing or damaged, or they do not belong together.
    """
    info = read_model_info(path)
    tokenizer = Tokenizer.load(path / TOKENIZER_FILE)
    if tokenizer.sha256 != info.tokenizer_sha256:
        raise UserError(f"{path / TOKENIZER_FILE} is not the tokenizer that the model was trained with: {_REMEDY}")
    if tokenizer.vocab_size != info.model.vocab_size:
        raise UserError(
            f"{path / CONFIG_FILE} states a vocab_size of {info.model.vocab_size} but the tokenizer has "
            f"{tokenizer.vocab_size} entries: {_REMEDY}"
        )
    _require_memory(path / WEIGHTS_FILE, info.model)
    model = Transformer(info.model)
    model.load_state_dict(_read_weights(path / WEIGHTS_FILE, model.state_dict()))
    return for_decoding(model, device, dtype), tokenizer, info


def for_decoding(model: Transformer, device: torch.device, dtype: torch.dtype) -> Transformer:
    """The model in evaluation mode on a device, its parameters in `dtype`."""
    return model.to(device).cast_parameters(dtype).eval()


def _require_memory(file: Path, model: ModelConfig) -> None:
    """Refuse a model that the file cannot hold, before it gets any memory.

    Raises:
        UserError: the file is too small for the sizes in config.json.
    """
    layers = model.encoder_layers + model.decoder_layers
    # The matrices of each layer that every kind of model has. A position is not stored, but takes memory all the same.
    inner = model.heads * model.attention_head_width
    numbers = model.width * (model.vocab_size + layers * (2 * model.ffn_width + 4 * inner))
    try:
        size = file.stat().st_size
    except OSError as error:
        raise UserError(f"{file} cannot be read ({error.strerror}): {_REMEDY}") from None
    if size < 4 * numbers:
        raise UserError(
            f"{file} has {size:,} bytes, too few for the {numbers:,} weights and more that {CONFIG_FILE} states: "
            f"{_REMEDY}"
        )
    if model.width * model.max_positions > _MOST_POSITION_NUMBERS:
        raise UserError(
            f"{file.parent / CONFIG_FILE} states {model.max_positions:,} positions of width {model.width:,}, above the "
            f"{_MOST_POSITION_NUMBERS:,} numbers that positions may take: {_REMEDY}"
        )


def _read_weights(file: Path, expected: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    try:
        with safe_open(file, framework="pt") as stored:
            shapes = {name: tuple(stored.get_slice(name).get_shape()) for name in stored.keys()}  # noqa: SIM118
            for name in sorted(expected.keys() | shapes.keys()):
                there, wanted = shapes.get(name), tuple(expected[name].shape) if name in expected else None
                if there != wanted:
                    raise UserError(
                        f"{file} does not fit {CONFIG_FILE}: tensor {name!r} is {there or 'absent'} in the file and "
                        f"{wanted or 'absent'} in the model: {_REMEDY}"
                    )
            return {name: stored.get_tensor(name) for name in expected}
    except FileNotFoundError:
        raise UserError(f"{file} does not exist: {_REMEDY}") from None
    except (SafetensorError, OSError) as error:
        raise UserError(f"{file} cannot be read ({error}): {_REMEDY}") from None


def _is_model_folder(path: Path) -> bool:
    """Nothing but a model folder's files, so that replacing it loses nothing else."""
    names = {file.name for file in path.iterdir()}
    return {CONFIG_FILE, WEIGHTS_FILE} <= names <= {CONFIG_FILE, WEIGHTS_FILE, TOKENIZER_FILE, CARD_FILE}


def _move_into_place(temporary: Path, path: Path) -> None:
    """Folders cannot be exchanged in one call: an older one steps aside, and comes back if the new one cannot move."""
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
    shutil.rmtree(aside)


def _put_back(path: Path) -> None:
    """Undo what a writer left that was killed after the older model had stepped aside: it comes back whole."""
    if not path.exists():
        for aside in path.parent.glob(f".{glob.escape(path.name)}.*.old"):
            move(aside, path)
            shutil.rmtree(aside.with_suffix(""), ignore_errors=True)
            return


def _model_card(name: str, info: ModelInfo, parameters: int, notes: Sequence[str]) -> str:
    settings: dict[str, Any] = to_plain(info.model)
    warning = (
        "\n**Trained on synthetic text**, generated by a grammar. The model shows that the software works; "
        "its scores say nothing about real text.\n"
        if info.synthetic
        else ""
    )
    steps = ", ".join(f"{step:,}" for step in info.steps)
    averaged = f"the mean of the weights after training steps {steps}" if len(info.steps) > 1 else f"step {steps}"
    listed = "".join(f"- {note}\n" for note in notes)
    pairs = [(way.source_language, way.target_language) for way in info.all_directions]
    languages = "\n".join(
        f"- {language}" for language in dict.fromkeys(language for pair in pairs for language in pair)
    )
    ways = ", ".join(f"from `{source}` to `{target}`" for source, target in pairs)
    chosen = f"--model {name}" + (f" --direction {info.all_directions[0].name}" if len(pairs) > 1 else "")
    table = "\n".join(f"| {key} | {value} |" for key, value in settings.items())
    return f"""---
language:
{languages}
pipeline_tag: translation
library_name: dist_transformer
---
# {name}

A Transformer (Vaswani et al. 2017) for translation {ways}.
{warning}
- Training data: {info.corpus}{" (synthetic)" if info.synthetic else ""}
- Weights: {averaged}; {parameters:,} parameters, fp32
- `tokenizer.json`, SHA-256 `{info.tokenizer_sha256}`, normalises text before it cuts it into pieces
{listed}
Translate, one sentence a line: `dist-transformer translate {chosen} < input.txt > output.txt`

Measure: `dist-transformer evaluate {chosen} --src F --ref F` prints BLEU, chrF and TER with their signatures.

| setting | value |
|---|---|
{table}
"""
