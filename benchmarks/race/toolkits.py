"""Toolkits of a race: how each is started, where it leaves its weights, and how it translates with them.

Other toolkits run in environments of their own, by the programs that they install.
"""

import json
import re
import subprocess
import sys
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from safetensors.torch import load_file

from benchmarks.race.lane import LARGEST, SIZES, Kind, RaceText, Recipe
from dist_transformer.averaging.mean import mean_weights
from dist_transformer.base.errors import UserError
from dist_transformer.base.files import write_file
from dist_transformer.config.plain import to_plain
from dist_transformer.config.presets import PRESETS
from dist_transformer.config.settings import ModelConfig
from dist_transformer.data.vocabulary.tokenizer import LARGEST_VOCABULARY
from dist_transformer.importing.marian_folder import of_marian
from dist_transformer.inference.decoding import Decoding
from dist_transformer.inference.translator import Translator
from dist_transformer.model.transformer import Transformer
from dist_transformer.runtime.device import choose_precision

SMOOTHING, BETAS, EPSILON = 0.1, (0.9, 0.98), 1e-9
LENGTH_PENALTY = 0.6


@dataclass(frozen=True, kw_only=True)
class Toolkit(ABC):
    text: RaceText
    program: Path | None = None
    """Command that the toolkit installs, if it has an environment of its own."""

    label: ClassVar[str]
    weights: ClassVar[str]
    """Pattern of the paths, in a lane's folder, of finished weights; the first number in a path is their step."""
    pads: ClassVar[bool] = False
    """Whether the size of its batches counts padding."""
    kinds: ClassVar[tuple[Kind, ...]] = ("adam",)
    """Optimizers that it offers."""

    @abstractmethod
    def setup(self) -> None:
        """Write what all lanes of the toolkit read.

        Raises:
            UserError: the toolkit is not installed.
        """

    @abstractmethod
    def command(self, recipe: Recipe, lane: Path, *, batch: int) -> list[str]:
        """Write a lane's settings and return the command that trains.

        Args:
            batch: target tokens of a batch, in the toolkit's own measure.
        """

    @abstractmethod
    def step_tokens(self, lane: Path) -> float:
        """Return the mean number of real target tokens of a step that a lane took, `</s>` included."""

    @abstractmethod
    def translate(self, weights: Path, recipe: Recipe, *, beam: int) -> list[str]:
        """Translate the validation sources."""

    def saved(self, lane: Path) -> dict[int, Path]:
        """Return the weights of a lane by their steps."""
        return {int(re.findall(r"\d+", str(path.relative_to(lane)))[0]): path for path in lane.glob(self.weights)}

    def require_program(self, flag: str) -> None:
        if self.program is None or not self.program.is_file():
            raise UserError(f"{self.label} is not at --{flag} {self.program}: install it in an environment of its own")

    def run(self, command: Sequence[object]) -> subprocess.CompletedProcess[str]:
        """Run a toolkit's program to its end.

        Raises:
            UserError: it failed; the message has the last line of its output.
        """
        done = subprocess.run([*map(str, command)], capture_output=True, text=True, check=False, errors="replace")
        if done.returncode != 0:
            last = (done.stderr.strip().splitlines() or ["it printed nothing"])[-1]
            raise UserError(f"{self.label} failed with status {done.returncode}: {last}")
        return done


class OfOurNetwork(Toolkit):
    """A toolkit of this environment whose weights fit our network, which translates with them by our search."""

    def setup(self) -> None:
        pass

    def translate(self, weights: Path, recipe: Recipe, *, beam: int) -> list[str]:
        return self.translate_lines(self.text.data.valid_text()[0], weights, recipe, beam=beam)

    def translate_lines(self, lines: Sequence[str], weights: Path, recipe: Recipe, *, beam: int) -> list[str]:
        model = self.read(weights, recipe.model(self.text.data.index.vocab_size))
        settings = Decoding(beam=beam, length_penalty=LENGTH_PENALTY)
        translator = Translator(model, self.text.data.tokenizer(), torch.device("cpu"), settings)
        return [one.text for one in translator.translate(lines)]

    @abstractmethod
    def read(self, weights: Path, config: ModelConfig) -> Transformer: ...


class Ours(OfOurNetwork):
    label = "dist_transformer"
    kinds = ("adam", "muon")
    weights = "run/weights/step-*.safetensors"

    def command(self, recipe: Recipe, lane: Path, *, batch: int) -> list[str]:
        # The command refuses settings without effect, such as the constant of another schedule.
        settings = differing(to_plain(recipe.config(self.text.data.path, lane / "run")), to_plain(PRESETS["base"]))
        write_file(lane / "config.json", json.dumps(settings))
        files = ["--config", str(lane / "config.json"), "--run-dir", str(lane / "run")]
        return [sys.executable, "-m", "dist_transformer", "train", *files]

    def step_tokens(self, lane: Path) -> float:
        lines = (lane / "run" / "ledger.jsonl").read_text().splitlines()
        return sum(json.loads(line)["target_tokens"] for line in lines) / len(lines)

    def read(self, weights: Path, config: ModelConfig) -> Transformer:
        model = Transformer(config).eval()
        model.load_state_dict(mean_weights([weights]).weights)
        return model


class HuggingFace(OfOurNetwork):
    """`MarianMTModel` under `Seq2SeqTrainer`, in batches of as many pairs of similar lengths."""

    label = "Hugging Face MarianMTModel, Seq2SeqTrainer by length"
    weights = "weights/step-*.safetensors"
    way: ClassVar[str] = "trainer"

    def command(self, recipe: Recipe, lane: Path, *, batch: int) -> list[str]:
        config = recipe.config(self.text.data.path, lane / "run")
        write_file(lane / "config.json", json.dumps(to_plain(config)))
        return [sys.executable, "-m", "benchmarks.race.huggingface", self.way, str(lane), str(batch)]

    def step_tokens(self, lane: Path) -> float:
        return float(json.loads((lane / "tokens.json").read_text()))

    def read(self, weights: Path, config: ModelConfig) -> Transformer:
        entries = range(config.vocab_size)
        return of_marian(load_file(weights), config, (entries, entries))


class CompiledHuggingFace(HuggingFace):
    """`MarianMTModel` compiled, in a hand-written loop over tight buckets."""

    label = "Hugging Face MarianMTModel, compiled, tight buckets"
    way = "compiled"


class LoopHuggingFace(HuggingFace):
    """`MarianMTModel` as it is, in the same loop."""

    label = "Hugging Face MarianMTModel, plain loop, tight buckets"
    way = "loop"


class Marian(Toolkit):
    """Marian in C++, by pymarian's program."""

    label = "Marian (C++, pymarian)"
    pads = True
    weights = "model.iter*.npz"

    @property
    def vocabulary(self) -> Path:
        return self.text.folder / "marian.yml"

    def setup(self) -> None:
        self.require_program("pymarian")
        entries = ("</s>", "<unk>", *self.text.words())
        write_file(self.vocabulary, "".join(f'"{entry}": {i}\n' for i, entry in enumerate(entries)))

    def command(self, recipe: Recipe, lane: Path, *, batch: int) -> list[str]:
        size = SIZES[recipe.size]
        flags = f"""
            --type transformer --dim-emb {size.width} --transformer-heads {size.heads}
            --enc-depth {size.encoder_layers} --dec-depth {size.decoder_layers}
            --transformer-dim-ffn {size.ffn_width} --transformer-ffn-activation relu
            --transformer-dropout {size.dropout} --label-smoothing {SMOOTHING} --cost-type ce-mean-words --clip-norm 0
            --learn-rate {recipe.peak_lr} --lr-warmup {recipe.warmup_steps} --lr-decay-inv-sqrt {recipe.warmup_steps}
            --mini-batch-words {batch} --mini-batch 1000 --max-length {LARGEST} --seed {recipe.seed}
            --save-freq {recipe.every}u --disp-freq {recipe.every}u --after {recipe.steps}u
            --cpu-threads 1 --data-threads 1 --workspace 1024 --tied-embeddings-all --output-omit-bias --shuffle-in-ram
        """
        files = (
            *("--train-sets", *self.text.train, "--vocabs", self.vocabulary, self.vocabulary),
            *("--tempdir", lane, "--model", lane / "model.npz", "--optimizer-params", *BETAS, EPSILON),
        )
        return [str(self.program), "train", *flags.split(), *map(str, files)]

    def step_tokens(self, lane: Path) -> float:
        shown = re.findall(r"Up\. ([\d,]+) .* Time ([\d.]+)s : ([\d.]+) words/s", (lane / "log").read_text())
        # Words of the target.
        return sum(float(time) * float(rate) for _, time, rate in shown) / int(shown[-1][0].replace(",", ""))

    def translate(self, weights: Path, recipe: Recipe, *, beam: int) -> list[str]:
        penalty = ("--normalize", LENGTH_PENALTY) if beam > 1 else ()
        done = self.run(
            [
                *(self.program, "decode", "--models", weights, "--vocabs", self.vocabulary, self.vocabulary),
                *("--input", self.text.valid, "--beam-size", beam, *penalty, "--cpu-threads", 1, "--quiet"),
                *("--mini-batch", 32, "--maxi-batch", 100, "--maxi-batch-sort", "src", "--max-length", LARGEST),
            ]
        )
        return self.text.texts_of(done.stdout.splitlines())


class Eole(Toolkit):
    """Eole, successor of OpenNMT-py; its layers are pre-norm."""

    label = "Eole"
    pads = True
    weights = "model/step_*/model.*.safetensors"

    @property
    def vocabulary(self) -> Path:
        return self.text.folder / "eole.txt"

    def setup(self) -> None:
        self.require_program("eole")
        write_file(self.vocabulary, "".join(f"{word}\n" for word in self.text.words()))

    def command(self, recipe: Recipe, lane: Path, *, batch: int) -> list[str]:
        size = SIZES[recipe.size]
        source, target = map(str, self.text.train)
        settings = {
            "src_vocab": str(self.vocabulary),
            "tgt_vocab": str(self.vocabulary),
            "share_vocab": True,
            "src_vocab_size": LARGEST_VOCABULARY,
            "tgt_vocab_size": LARGEST_VOCABULARY,
            "vocab_size_multiple": 1,
            "n_sample": 0,
            "seed": recipe.seed,
            "report_every": recipe.every,
            "data": {"train": {"path_src": source, "path_tgt": target, "transforms": []}},
            "training": {
                "model_path": str(lane / "model"),
                "world_size": 1,
                "gpu_ranks": [],
                "num_workers": 0,
                "compute_dtype": choose_precision(torch.device("cpu"), None),
                "batch_type": "tokens",
                "batch_size": batch,
                "normalization": "tokens",
                # It reads a bucket before the first step: one epoch of this text, instead of nine.
                "bucket_size": self.text.pairs,
                "optim": "adam",
                "adam_beta1": BETAS[0],
                "adam_beta2": BETAS[1],
                "adam_eps": EPSILON,
                "max_grad_norm": 0,
                "label_smoothing": SMOOTHING,
                "dropout": [size.dropout],
                "attention_dropout": [0.0],
                "dropout_steps": [0],
                "param_init_method": "xavier_uniform",
                # Its noam is a rate times this; the product has the recipe's peak.
                "decay_method": "noam",
                "learning_rate": recipe.peak_lr * (size.width * recipe.warmup_steps) ** 0.5,
                "warmup_steps": recipe.warmup_steps,
                "train_steps": recipe.steps,
                "valid_steps": recipe.steps + 1,
                "save_checkpoint_steps": recipe.every,
                "keep_checkpoint": -1,
                "save_format": "safetensors",
                "log_attention_entropy": False,
            },
            "model": {
                "architecture": "transformer",
                "hidden_size": size.width,
                "layers": size.encoder_layers,
                "heads": size.heads,
                "transformer_ff": size.ffn_width,
                "mlp_activation_fn": "relu",
                "add_qkvbias": True,
                "add_final_linear_bias": True,
                "add_ffnbias": True,
                "share_embeddings": True,
                "share_decoder_embeddings": True,
                "embeddings": {"word_vec_size": size.width, "position_encoding_type": "SinusoidalInterleaved"},
            },
        }
        # JSON is YAML.
        write_file(lane / "config.yaml", json.dumps(settings, indent=1))
        return [str(self.program), "train", "--config", str(lane / "config.yaml")]

    def step_tokens(self, lane: Path) -> float:
        # Tokens of source and target, and sentences, per batch.
        shown = re.findall(r"bsz: *\d+/ *(\d+)/", (lane / "log").read_text())
        return sum(map(int, shown)) / len(shown)

    def translate(self, weights: Path, recipe: Recipe, *, beam: int) -> list[str]:
        output = weights.parent / f"beam-{beam}"
        self.run(
            [
                *(self.program, "predict", "--model_path", weights.parent, "--src", self.text.valid),
                *("--output", output, "--beam_size", beam, "--batch_size", 32, "--max_length", LARGEST),
                *("--length_penalty", "wu", "--alpha", LENGTH_PENALTY),
            ]
        )
        return self.text.texts_of(output.read_text().splitlines())


TOOLKITS: dict[str, type[Toolkit]] = {
    "ours": Ours,
    "marian": Marian,
    "eole": Eole,
    "trainer": HuggingFace,
    "compiled": CompiledHuggingFace,
    "loop": LoopHuggingFace,
}


def differing(values: dict[str, Any], defaults: dict[str, Any]) -> dict[str, Any]:
    """Return the values that are not the defaults, at any depth."""
    found = {name: value for name, value in values.items() if value != defaults.get(name)}
    return {
        name: differing(value, defaults[name]) if isinstance(value, dict) else value for name, value in found.items()
    }
