"""Models that Marian trained, compared with Marian itself."""

import dataclasses
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from dist_transformer.base.checks import Check
from dist_transformer.base.errors import UserError
from dist_transformer.config.directions import Direction
from dist_transformer.config.settings import ModelConfig
from dist_transformer.data.vocabulary.sentence_piece import learn_sentence_piece
from dist_transformer.export import gate, libraries
from dist_transformer.export.checked_export import export_model
from dist_transformer.export.libraries import ExportSettings, Target
from dist_transformer.importing.checked_import import import_model
from dist_transformer.importing.marian_files import MarianWeights
from dist_transformer.importing.settings import ImportSettings
from dist_transformer.inference.decoding import Decoding
from dist_transformer.inference.translator import Translator
from dist_transformer.model.transformer import Transformer
from dist_transformer.model_folder import ModelInfo, load_model, write_model_folder
from tests.conftest import run_python
from tests.export.test_marian_files import EXPRESSIBLE
from tests.importing.marian_folders import ROWS, SILENT
from tests.importing.marian_npz import Kind, write_decoder, write_vocabularies

CPU = torch.device("cpu")
Lines = tuple[list[str], list[str]]


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return Marian's program, in an environment of its own."""
    if sys.version_info[:2] != (3, 11):
        pytest.skip("pymarian 1.12.42 is published for Python 3.11")
    environment = tmp_path_factory.mktemp("marian") / "environment"
    subprocess.run([sys.executable, "-m", "venv", environment], check=True)
    install = [environment / "bin" / "python", "-m", "pip", "install", "--quiet", "pymarian==1.12.42"]
    subprocess.run(install, check=True, timeout=600)
    return environment / "bin" / "pymarian"


def train(program: Path, folder: Path, lines: Lines, kind: Kind, *more: object, two: bool = False) -> Path:
    """Train for some steps; return decoder.yml."""
    folder.mkdir()
    vocabularies, entries = write_vocabularies(folder, lines, kind, two=two)
    files = [folder / name for name in ("train.en", "train.de")]
    for side, file in enumerate(files):
        file.write_text("".join(f"{line}\n" for line in lines[side]))
    common = ("--cpu-threads", 1, "--seed", 1, "--workspace", 128, "--tempdir", folder, "--quiet")
    size = ("--dim-emb", 32, "--enc-depth", 2, "--dec-depth", 1, "--transformer-heads", 2, "--transformer-dim-ffn", 48)
    batch = ("--mini-batch", 64, "--learn-rate", 0.003, "--label-smoothing", 0.1)
    data = ("--train-sets", *files, "--vocabs", *vocabularies, "--dim-vocabs", *entries)
    command = (program, "train", "--model", folder / "model.npz", *common, *size, *batch, *data, *more)
    subprocess.run([*map(str, command)], check=True, capture_output=True, timeout=600)
    return write_decoder(folder, vocabularies)


BRIEF = ("--max-steps", 50, "--save-every", 50, "--validate-every", 50, "--optimizer.warmup-steps", 5)
ALL, TARGET = "--tied-embeddings-all", "--tied-embeddings"


@pytest.mark.slice(name="marian")
def test_trained_models_agree_with_their_own_program(
    program: Path, toy_lines: Lines, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gate, "COMPARED_LINES", 50)
    monkeypatch.setattr(libraries, "_LONGEST_OUTPUT", 12)
    kinds: dict[str, tuple[Kind, bool, tuple[str, ...]]] = {
        "spm": ("spm", False, (ALL,)),
        "yml": ("yml", False, (ALL,)),
        "two-spm": ("spm", True, (TARGET,)),
        "two-yml": ("yml", True, ()),
    }
    transformer = ("--after", "150u", "--type", "transformer", "--transformer-ffn-activation", "swish")
    for name, (kind, two, ties) in kinds.items():
        decoder = train(program, tmp_path / name, toy_lines, kind, *transformer, *ties, two=two)
        before = {file.name: file.read_bytes() for file in decoder.parent.iterdir()}
        out = tmp_path / f"{name}-model"
        checks = run(decoder, out, program)
        rows = [*ROWS, "text"] if kind == "spm" else ROWS
        assert [(check.name, check.state) for check in checks] == [(name, "ok") for name in rows]
        assert {file.name: file.read_bytes() for file in decoder.parent.iterdir()} == before
        model, vocabulary, info = load_model(out, CPU)
        assert (info.direction.name, info.model.positions) == ("en-de", "sinusoidal_t2t")
        assert len(Translator(model, vocabulary, CPU, Decoding()).translate(toy_lines[0][:2])) == 2
        tuned = tune(out, tmp_path / f"{name}-tuned", toy_lines)
        assert export(tuned, "marian", tmp_path / f"{name}-marian", program=str(program)) == [*rows, "beam search"]
        assert export(tuned, "ctranslate2", tmp_path / f"{name}-ctranslate2") == [*ROWS, "beam search"]
        with pytest.raises(UserError, match="MarianMTModel does not support norm_epsilon"):
            export(tuned, "hf", tmp_path / "no")
        # What was given back is imported again.
        checks = run(tmp_path / f"{name}-marian" / "decoder.yml", tmp_path / f"{name}-again", program)
        assert [(check.name, check.state) for check in checks] == [(row, "ok") for row in rows]
        # Sinusoids of the paper instead of theirs.
        with monkeypatch.context() as planted:
            planted.setattr(MarianWeights, "config", with_papers_positions)
            with pytest.raises(UserError, match="its outputs differ"):
                run(decoder, tmp_path / "no", program)
        assert not (tmp_path / "no").exists()
    recurrent = {
        "s2s": ("--type", "s2s"),
        "ssru": ("--type", "transformer", "--transformer-decoder-autoreg", "rnn", "--dec-cell", "ssru"),
    }
    for name, more in recurrent.items():
        decoder = train(program, tmp_path / name, toy_lines, "spm", *more, ALL, "--after", "1u")
        with pytest.raises(
            UserError, match=f"has {'transformer-decoder-autoreg: rnn' if name == 'ssru' else 'type: s2s'}"
        ):
            run(decoder, tmp_path / "no", program)


@pytest.mark.slice(name="marian")
@pytest.mark.parametrize("tags", [(), ("<2de>",)])
def test_models_of_ours_agree_with_marian(
    tags: tuple[str, ...], program: Path, toy_lines: Lines, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gate, "COMPARED_LINES", 50)
    monkeypatch.setattr(libraries, "_LONGEST_OUTPUT", 12)
    text = [*toy_lines[0], *toy_lines[1]]
    vocabulary = learn_sentence_piece(
        text,
        vocab_size=300,
        model_type="unigram",
        byte_fallback=False,
        character_coverage=1.0,
        normalization="nfkc",
        tags=tags,
    )
    model = Transformer(EXPRESSIBLE.for_vocabularies(*vocabulary.sizes))
    directions = tuple(
        Direction(source_language="en", target_language=language, tags=(tag,))
        for language, tag in zip(("de",), tags, strict=False)
    )
    info = ModelInfo(
        model=model.config,
        tokenizer_sha256=vocabulary.sha256,
        source_language="en",
        target_language="de",
        directions=directions,
        corpus="toy grammar",
        synthetic=True,
        steps=(1,),
    )
    weights = dict(model.state_dict())
    write_model_folder(tmp_path / "model", info=info, weights=weights, tokenizer_json=vocabulary.content)
    rows = ROWS if tags else [*ROWS, "text"]
    assert export(tmp_path / "model", "marian", tmp_path / "out", program=str(program)) == [*rows, "beam search"]
    card = (tmp_path / "out" / "README.md").read_text(encoding="utf-8")
    assert ('| sed "s/^/<2de> /" | marian decode --config decoder.yml |' in card) == bool(tags)


def tune(model: Path, folder: Path, lines: Lines) -> Path:
    """Train a model for 50 steps on other text, by the commands; return its model folder."""
    folder.mkdir()
    for side, text in zip(("en", "de"), lines, strict=True):
        (folder / f"text.{side}").write_text("".join(f"{line}\n" for line in text))
    for words in (
        ("prepare", "--tokenizer", model, "--src", "text.en", "--tgt", "text.de", "--out", "data"),
        *(("train", "--preset", "finetune", "--init-from", model, "--data", "data", "--run-dir", "run", *BRIEF),),
        ("average", "--run-dir", "run", "--last", 1, "--out", "model"),
    ):
        done = run_python("-m", "dist_transformer", *words, cwd=folder)
        assert done.returncode == 0, done.stderr
    return folder / "model"


def export(model: Path, to: Target, out: Path, **more: Any) -> list[str]:
    """Export a model; give the names of the checks that it passed."""
    checks: list[Check] = []
    settings = ExportSettings(model=model, to=to, out=out, **more)
    export_model(settings, CPU, progress=SILENT, show=checks.extend)
    return [check.name for check in checks if check.state == "ok"]


def with_papers_positions(weights: MarianWeights, *, has_two: bool, config: Any = MarianWeights.config) -> ModelConfig:
    return dataclasses.replace(config(weights, has_two=has_two), positions="sinusoidal")


def run(decoder: Path, out: Path, program: Path) -> list[Check]:
    checks: list[Check] = []
    settings = ImportSettings(folder=decoder, out=out, source_language="en", target_language="de", program=str(program))
    import_model(settings, CPU, progress=SILENT, show=checks.extend)
    return checks
