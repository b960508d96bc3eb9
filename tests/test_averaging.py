"""Averaging, from weight files, checkpoints and model folders of one small hand-made run."""

import dataclasses
import json
import runpy
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from dist_transformer.averaging import average, best_weights, newest_weights
from dist_transformer.config import ModelConfig, to_plain
from dist_transformer.data.tokenizer import Tokenizer, train_tokenizer
from dist_transformer.errors import UserError
from dist_transformer.model.transformer import Transformer
from dist_transformer.model_folder import ModelInfo, load_model, read_model_info, write_model_folder
from dist_transformer.training.checkpoint import step_name
from dist_transformer.training.checkpoint_writer import Retention, save_checkpoint
from dist_transformer.training.engine import MOMENTS, ParameterState

TOOL = Path(__file__).parents[1] / "tools" / "average_checkpoints.py"
TOKENIZER = train_tokenizer(["a b"], vocab_size=300)
MODEL = ModelConfig(
    width=8,
    heads=2,
    ffn_width=16,
    encoder_layers=1,
    decoder_layers=1,
    max_positions=16,
    vocab_size=TOKENIZER.vocab_size,
)
Weights = dict[str, torch.Tensor]


def random_weights(step: int, model: ModelConfig = MODEL) -> Weights:
    torch.manual_seed(step)
    # Weights of different sizes, so that an error in the mean is not hidden by rounding.
    return {name: torch.randn_like(t) * 10 ** (step % 3) for name, t in Transformer(model).state_dict().items()}


def describe(step: int, model: ModelConfig = MODEL, tokenizer: Tokenizer = TOKENIZER) -> dict[str, Any]:
    return {
        "step": step, "model": to_plain(model), "tokenizer_sha256": tokenizer.sha256, "source_language": "en",
        "target_language": "de", "corpus": "hand-written", "synthetic": False,
    }  # fmt: skip


def save(run: Path, step: int, weights: Weights | None = None, **other: Any) -> Path:
    """A checkpoint and a weight file; the weight file."""
    run.mkdir(parents=True, exist_ok=True)
    other.get("tokenizer", TOKENIZER).save(run / "tokenizer.json")
    weights = weights if weights is not None else random_weights(step, other.get("model", MODEL))
    states = [
        ParameterState(name=name, weight=weight, moments={key: torch.full_like(weight, 7.0) for key in MOMENTS})
        for name, weight in weights.items()
    ]
    described = describe(step, **other)
    save_checkpoint(
        run, states, described, retention=Retention(checkpoints=9, weights=99),
        weights_metadata={key: json.dumps(value) for key, value in described.items()},
    )  # fmt: skip
    return run / "weights" / f"{step_name(step)}.safetensors"


def save_model(path: Path, weights: Weights, steps: tuple[int, ...]) -> Path:
    described = describe(0)
    del described["step"], described["model"]
    info = ModelInfo(model=MODEL, steps=steps, **described)
    TOKENIZER.save(path.parent / "t.json")
    write_model_folder(path, info=info, weights=weights, tokenizer_json=(path.parent / "t.json").read_bytes())
    return path


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return tmp_path / "run"


@pytest.fixture
def mixed(run: Path, tmp_path: Path) -> list[Path]:
    """A weight file, a checkpoint and a model folder, of steps 1, 2 and 3."""
    file = save(run, 1)
    save(run, 2)
    return [file, run / "checkpoints" / step_name(2), save_model(tmp_path / "third", random_weights(3), (3,))]


def assert_mean(out: Path, steps: list[int]) -> None:
    stored = safetensors.torch.load_file(out / "model.safetensors")
    all_weights = [random_weights(step) for step in steps]
    assert set(stored) == set(all_weights[0])
    for name, tensor in stored.items():
        values = torch.stack([weights[name].double() for weights in all_weights])
        assert tensor.dtype == torch.float32
        # Rounding of sums in fp32 is relative to the largest number summed.
        error = ((tensor.double() - values.mean(0)).abs() / values.abs().amax(0)).max()
        assert error <= 1e-7, name


def test_the_mean_of_different_kinds_of_sources(mixed: list[Path], tmp_path: Path) -> None:
    info = average(mixed, tmp_path / "out")
    assert_mean(tmp_path / "out", [1, 2, 3])
    assert info == read_model_info(tmp_path / "out")
    assert info.steps == (1, 2, 3)
    assert (info.model, info.corpus, info.synthetic) == (MODEL, "hand-written", False)
    model, tokenizer, _ = load_model(tmp_path / "out", torch.device("cpu"))
    assert tokenizer.sha256 == TOKENIZER.sha256
    assert model.embedding.shape[0] == TOKENIZER.vocab_size


def test_the_sources_are_not_changed(mixed: list[Path], tmp_path: Path) -> None:
    files = [file for path in mixed for file in ([path] if path.is_file() else path.iterdir())]
    before = [file.read_bytes() for file in files]
    average(mixed, tmp_path / "out")
    assert [file.read_bytes() for file in files] == before


def test_the_card_says_how_text_is_normalised(run: Path, tmp_path: Path) -> None:
    for normalization, rule in (("nfkc", "NFKC, lowercase"), ("nfc", "NFC, lowercase")):
        tokenizer = train_tokenizer(["a b"], vocab_size=300, lowercase=True, normalization=normalization)
        average([save(run / normalization, 1, tokenizer=tokenizer)], tmp_path / rule)
        card = (tmp_path / rule / "README.md").read_text(encoding="utf-8")
        assert f"- Normalisation of text: {rule}\n" in card


def test_twenty_weight_files(run: Path, tmp_path: Path) -> None:
    paths = [save(run, step) for step in range(1, 21)]
    assert newest_weights(run, 20) == paths
    average(paths, tmp_path / "out")
    assert_mean(tmp_path / "out", list(range(1, 21)))


def test_the_order_of_the_sources_does_not_matter_much(mixed: list[Path], tmp_path: Path) -> None:
    average(mixed[::-1], tmp_path / "out")
    assert_mean(tmp_path / "out", [3, 2, 1])


@pytest.mark.parametrize("kind", [0, 1, 2])
def test_a_single_source_is_itself(kind: int, mixed: list[Path], tmp_path: Path) -> None:
    info = average([mixed[kind]], tmp_path / "out")
    assert info.steps == (kind + 1,)
    stored = safetensors.torch.load_file(tmp_path / "out" / "model.safetensors")
    for name, weight in random_weights(kind + 1).items():
        assert torch.equal(stored[name], weight)


def test_an_average_may_replace_one_of_its_sources(mixed: list[Path], tmp_path: Path) -> None:
    average(mixed, mixed[2])
    assert_mean(mixed[2], [1, 2, 3])


def test_paths_relative_to_the_run_folder(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = save(run, 1)
    for folder, name in ((run / "weights", file.name), (run / "checkpoints", step_name(1))):
        monkeypatch.chdir(folder)
        average([Path(name)], tmp_path / folder.name)
        assert_mean(tmp_path / folder.name, [1])


def other_model(run: Path) -> Path:
    return save(run / "other", 2, model=dataclasses.replace(MODEL, ffn_width=32))


def other_setting(run: Path) -> Path:
    """The same shapes, and another network."""
    return save(run / "other", 2, model=dataclasses.replace(MODEL, norm="post", activation="gelu"))


def other_shape(run: Path) -> Path:
    weights = random_weights(2)
    weights["embedding"] = weights["embedding"][:-1].clone()
    return save(run / "other", 2, weights)


def missing_tensor(run: Path) -> Path:
    weights = random_weights(2)
    del weights["embedding"]
    return save(run / "other", 2, weights)


def other_tokenizer(run: Path) -> Path:
    return save(run / "other", 2, tokenizer=train_tokenizer(["a b c d"], vocab_size=300, lowercase=True))


def damaged_checkpoint(run: Path) -> Path:
    save(run, 2)
    path = run / "checkpoints" / step_name(2)
    content = bytearray((path / "part-00000.safetensors").read_bytes())
    content[-1] ^= 1
    (path / "part-00000.safetensors").write_bytes(content)
    return path


def truncated_file(run: Path) -> Path:
    file = save(run, 2)
    file.write_bytes(file.read_bytes()[:-1])
    return file


def text_file(run: Path) -> Path:
    (run / "notes.safetensors").write_text("no tensors")
    return run / "notes.safetensors"


def foreign_file(run: Path, metadata: dict[str, str] | None = None) -> Path:
    safetensors.torch.save_file({"embedding": torch.ones(2)}, run / "foreign.safetensors", metadata=metadata)
    return run / "foreign.safetensors"


def empty_folder(run: Path) -> Path:
    (run / "empty").mkdir()
    return run / "empty"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (other_model, "has another model configuration than .*average one run's weights"),
        (other_setting, "has another model configuration than .*average one run's weights"),
        (other_shape, "has another model configuration than"),
        (missing_tensor, "has another model configuration than"),
        (other_tokenizer, "was trained with another tokenizer than .*average one run's weights"),
        (damaged_checkpoint, "is damaged: .*choose another checkpoint"),
        (truncated_file, "cannot be read .*leave it out, or restore it"),
        (text_file, "cannot be read .*leave it out, or restore it"),
        (foreign_file, "is not a weight file of a run: give files of RUN/weights"),
        (lambda run: foreign_file(run, {"format": "pt"}), "is not a weight file of a run"),
        (lambda run: foreign_file(run, {"title": "somebody's model"}), "is not a weight file of a run"),
        (lambda run: foreign_file(run, {"model": "[]"}), "foreign.safetensors"),
        (empty_folder, "is neither a weight file nor a checkpoint nor a model folder: check the path"),
        (lambda run: run / "nothing", "is neither a weight file nor a checkpoint nor a model folder: check the path"),
    ],
)
def test_a_source_that_does_not_fit_is_refused_by_name(
    make: Callable[[Path], Path], message: str, run: Path, tmp_path: Path
) -> None:
    first = save(run, 1)
    second = make(run)
    with pytest.raises(UserError, match=message) as refused:
        average([first, second], tmp_path / "out")
    assert str(refused.value).startswith(str(second))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("number", [float("nan"), float("-inf")])
@pytest.mark.parametrize("kind", [0, 1, 2])
def test_a_number_that_is_not_finite_is_refused_with_its_file(
    kind: int, number: float, run: Path, tmp_path: Path
) -> None:
    """Whichever of the sources it is."""
    weights = random_weights(5)
    weights["embedding"][3, 1] = number
    bad = [save(run, 5, weights), run / "checkpoints" / step_name(5), save_model(tmp_path / "m", weights, (5,))][kind]
    good = [save(run, 1), save(run, 2)]
    for order in ([bad, *good], [good[0], bad, good[1]], [*good, bad]):
        with pytest.raises(
            UserError, match="embedding holds numbers that are not finite: leave this one out"
        ) as refused:
            average(order, tmp_path / "out")
        assert str(refused.value).startswith(str(bad))
    assert not (tmp_path / "out").exists()


def test_a_source_given_twice_is_refused(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = save(run, 1), save(run, 2)
    monkeypatch.chdir(run)
    link = tmp_path / "link"
    link.symlink_to(run / "weights")
    for again in (first, Path("weights") / first.name, link / first.name):
        with pytest.raises(UserError, match="is given twice: name each source once"):
            average([first, second, again], tmp_path / "out")


def test_another_tokenizer_in_the_run_folder_is_refused(run: Path, tmp_path: Path) -> None:
    file = save(run, 1)
    train_tokenizer(["a b"], vocab_size=300, lowercase=True).save(run / "tokenizer.json")
    with pytest.raises(UserError, match=r"tokenizer\.json is not the tokenizer of .*restore"):
        average([file], tmp_path / "out")


def test_other_files_are_not_replaced(run: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.tex").write_text("years of work")
    with pytest.raises(UserError, match="holds other files than a model"):
        average([save(run, 1)], tmp_path / "out")
    assert (tmp_path / "out" / "thesis.tex").read_text() == "years of work"


def test_the_newest_by_step(run: Path) -> None:
    files = [save(run, step) for step in (90, 100, 5)]
    assert newest_weights(run, 2) == files[:2]
    assert newest_weights(run, 3) == [files[2], files[0], files[1]]


def test_fewer_than_asked_for(run: Path) -> None:
    with pytest.raises(UserError, match="weights has 0 weight files, not 5: train first, or check --run-dir"):
        newest_weights(run, 5)
    save(run, 1)
    save(run, 2)
    with pytest.raises(UserError, match="weights has 2 weight files, not 5: use --last 2 or train on"):
        newest_weights(run, 5)


def validate(run: Path, *records: dict[str, Any], best_by: str = "nll") -> None:
    """The run's metrics: these validations, among records of other kinds; and the setting that best_weights reads."""
    run.mkdir(exist_ok=True)
    (run / "config.json").write_text(json.dumps({"best_by": best_by}), encoding="utf-8")
    kinds = [{"kind": "train", "step": 1, "nll": 0.0, "bleu": 100.0}, *({"kind": "valid", **r} for r in records)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in kinds), encoding="utf-8")


def validated(run: Path, nlls: dict[int, float | None], bleus: dict[int, float] | None = None) -> None:
    bleus = bleus or {}
    validate(run, *({"step": s, "nll": nll, **({"bleu": bleus[s]} if s in bleus else {})} for s, nll in nlls.items()))


def test_the_best_by_validation(run: Path) -> None:
    files = {step: save(run, step) for step in (10, 20, 30, 40, 50)}
    # Step 25 has no weight file, step 50 no validation; its loss was not finite at 40.
    validated(run, {10: 1.5, 20: 1.25, 25: 1.125, 30: 1.75, 40: None}, {10: 30.0, 20: 35.5, 25: 28.0, 30: 36.25})
    by_nll = best_weights(run, 2, "nll")
    assert (by_nll.by, by_nll.steps, by_nll.values) == ("nll", (10, 20), (1.5, 1.25))
    assert by_nll.paths == (files[10], files[20])
    assert by_nll.better_without_file == (25,)
    assert str(by_nll) == "best validation nll: step 10 (1.5000), step 20 (1.2500)"
    by_bleu = best_weights(run, 2, "bleu")
    assert (by_bleu.steps, by_bleu.values, by_bleu.better_without_file) == ((20, 30), (35.5, 36.25), ())
    assert str(by_bleu) == "best validation bleu: step 20 (35.50), step 30 (36.25)"
    assert best_weights(run, 1, "bleu").steps == (30,)
    assert best_weights(run, 3, "bleu").steps == (10, 20, 30)


@pytest.mark.parametrize(("best_by", "step"), [("nll", 10), ("bleu", 20)])
def test_the_measure_is_the_one_of_the_run(run: Path, best_by: str, step: int) -> None:
    for saved in (10, 20):
        save(run, saved)
    validate(run, {"step": 10, "nll": 1.5, "bleu": 20.0}, {"step": 20, "nll": 1.75, "bleu": 30.0}, best_by=best_by)
    best = best_weights(run, 1)
    assert (best.by, best.steps) == (best_by, (step,))
    validated(run, {10: 1.5})
    with pytest.raises(UserError, match=r"metrics\.jsonl has no validation with bleu: use --by nll"):
        best_weights(run, 1, "bleu")


@pytest.mark.parametrize("by", ["nll", "bleu"])
def test_of_equal_validations_the_earlier(run: Path, by: Any) -> None:
    for step in (10, 20, 30):
        save(run, step)
    validated(run, dict.fromkeys((10, 20, 30), 2.0), dict.fromkeys((10, 20, 30), 20.0))
    assert best_weights(run, 2, by).steps == (10, 20)
    assert best_weights(run, 1, by).steps == (10,)


def test_too_few_validated_steps_with_weights(run: Path) -> None:
    with pytest.raises(UserError, match=r"metrics\.jsonl does not exist: train first, or check --run-dir"):
        best_weights(run, 1)
    validate(run)
    with pytest.raises(UserError, match=r"no validation with nll: use --last, or train with --validate-every above 0"):
        best_weights(run, 1)
    validated(run, {10: 1.5, 20: 1.75, 30: 1.0})
    with pytest.raises(UserError, match="has weight files of 0 validated steps, not of 1: use --last, or train with"):
        best_weights(run, 1)
    save(run, 10)
    save(run, 20)
    save(run, 40)
    with pytest.raises(UserError) as refused:
        best_weights(run, 3)
    assert str(refused.value) == (
        f"{run} has weight files of 2 validated steps (10, 20), not of 3: use --best 2, or train with keep_best 3 or "
        "more, which keeps the weights of so many best validations"
    )
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "va')
    with pytest.raises(UserError, match=r"metrics\.jsonl cannot be read .*: resume the run, which repairs it"):
        best_weights(run, 1)


def tool(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(TOOL), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_the_tool_averages_a_run(run: Path, tmp_path: Path) -> None:
    for step in (1, 2, 3):
        save(run, step)
    done = tool("--run-dir", run, "--last", 2, "--out", tmp_path / "out")
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"averaged 2 set(s) of weights, steps 2, 3: {tmp_path / 'out'}\n"
    assert_mean(tmp_path / "out", [2, 3])
    validated(run, {0: 0.5, 1: 1.5, 2: 1.75, 3: 1.625}, {0: 1.0, 1: 20.0, 2: 10.0, 3: 30.0})
    done = tool("--run-dir", run, "--best", 2, "--by", "nll", "--out", tmp_path / "best")
    assert done.returncode == 0, done.stderr
    assert done.stdout == (
        "best validation nll: step 1 (1.5000), step 3 (1.6250)\n"
        f"averaged 2 set(s) of weights, steps 1, 3: {tmp_path / 'best'}\n"
    )
    assert done.stderr == "warning: better by nll, but their weights were not kept: steps 0\n"
    assert_mean(tmp_path / "best", [1, 3])
    assert read_model_info(tmp_path / "best").steps == (1, 3)
    card = (tmp_path / "best" / "README.md").read_text(encoding="utf-8")
    assert "- Chosen by best validation nll: step 1 (1.5000), step 3 (1.6250)\n" in card
    assert "training steps 1, 3" in card
    assert "Chosen by" not in (tmp_path / "out" / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--run-dir r", "give one of --last, --best and --checkpoints"),
        ("--run-dir r --last 2 --best 2", "give one of --last, --best and --checkpoints"),
        ("--last 2 --checkpoints a", "give one of --last, --best and --checkpoints"),
        ("--best 2", "give --run-dir with --last or --best, and only with them"),
        ("--run-dir r --checkpoints a", "give --run-dir with --last or --best, and only with them"),
        ("--run-dir r --last 2 --by nll", "--by nll says what --best compares: give --best, or leave --by out"),
        ("--run-dir r --last 0", "--last is 0: give a number above 0"),
        ("--run-dir r --best 0", "--best is 0: give a number above 0"),
    ],
)
def test_the_tool_says_in_one_sentence_what_is_wrong(
    arguments: str,
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """In this process: a launch costs a second or two."""
    monkeypatch.setattr(sys, "argv", [str(TOOL), *arguments.split(), "--out", str(tmp_path / "out")])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(TOOL), run_name="__main__")
    assert ended.value.code == 1
    assert capsys.readouterr() == ("", f"error: {message}\n")
    assert list(tmp_path.iterdir()) == []


def test_copies_of_one_file_are_two_sources(run: Path, tmp_path: Path) -> None:
    """Only the same path is refused; a copy is the user's business."""
    file = save(run, 1)
    copy = shutil.copyfile(file, file.with_name("step-00000009.safetensors"))
    average([file, copy], tmp_path / "out")
    assert_mean(tmp_path / "out", [1])
