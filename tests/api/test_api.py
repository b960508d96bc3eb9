"""The package as a library."""

import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch

import dist_transformer
from dist_transformer import api
from dist_transformer.base.errors import UserError
from dist_transformer.data.folder.reader import DataFolder
from dist_transformer.data.text.pairs import TsvFile
from dist_transformer.inference.decoding import Decoding, ExactLoading
from dist_transformer.inference.trained_model import TrainedModel
from dist_transformer.runtime.device import multiplies_int8
from dist_transformer.serving.models import load_models
from tests.api.examples import run_examples
from tests.conftest import ROOT, allow_interrupts, run_python

SMALL = {
    "precision": "fp32",
    "max_steps": 6,
    "save_every": 3,
    "validate_every": 6,
    "log_every": 1,
    "model": {"width": 32, "heads": 2, "ffn_width": 32, "encoder_layers": 1, "decoder_layers": 1},
    "batch": {"max_target_tokens": 256, "packs_per_step": 2},
}


@pytest.fixture(scope="module")
def model(model_folder: Path) -> TrainedModel:
    return dist_transformer.load(str(model_folder), device="cpu")


def test_a_line_gives_a_text_and_lines_a_list(model: TrainedModel) -> None:
    lines = ["The man sees the dog.", "", "A woman."]
    texts = model.translate(lines, max_extra_tokens=5)
    assert len(texts) == 3
    assert texts[1] == ""
    assert model.translate(lines[0], max_extra_tokens=5) == texts[0]
    assert model.translate([], max_extra_tokens=5) == []


@pytest.mark.skipif(not multiplies_int8(torch.device("cpu")), reason="no instructions for int8")
def test_every_way_into_a_search_multiplies_in_int8(
    model: TrainedModel, model_folder: Path, toy_lines: tuple[list[str], list[str]], tmp_path: Path
) -> None:
    """Then the scores are not those of another precision, and the same for all ways."""
    lines, search = toy_lines[0][:20], {"max_extra_tokens": 5, "nbest": 1}
    in_int8, in_bf16 = (
        dist_transformer.load(model_folder, device="cpu", precision=name).translate(lines, **search)
        for name in ("int8", "bf16")
    )
    scores, *others = (
        [one.score for (one,) in found] for found in (in_int8, in_bf16, model.translate(lines, **search))
    )
    assert all(set(scores).isdisjoint(other) for other in others)
    (tmp_path / "lines").write_text("\n".join(lines), encoding="utf-8")
    files = {"src": tmp_path / "lines", "ref": tmp_path / "lines"}
    evaluated = api.evaluate(model=model_folder, **files, max_extra_tokens=5, precision="int8", device="cpu")
    assert evaluated.hypotheses == [one.text for (one,) in in_int8]
    assert evaluated.precision == "int8"
    loading, decoding = ExactLoading(precision="int8"), Decoding(max_extra_tokens=5)
    (served,) = load_models([[model_folder]], loading, decoding, torch.device("cpu"))
    assert [one.hypotheses[0].score for one in served.translator.translate(lines)] == scores
    flags = ("--model", model_folder, "--input", files["src"], "--output", tmp_path / "out", "--max-extra-tokens", 5)
    run_python("tools/translate.py", *flags, "--precision", "int8", "--split-over", "no", "--device", "cpu")
    assert (tmp_path / "out").read_text("utf-8").splitlines() == evaluated.hypotheses


def test_what_is_not_translated_as_it_stands_is_a_warning(model: TrainedModel) -> None:
    lines = ["The man sees the dog. A woman sees a man."]
    trained = replace(model, info=replace(model.info, longest_source=14))
    with pytest.warns(UserWarning, match="1 line of more than 14 tokens: translated in parts"):
        texts = trained.translate(lines, max_extra_tokens=5)
    parts = model.translate(["The man sees the dog.", "A woman sees a man."], max_extra_tokens=5)
    assert texts == [" ".join(parts)] != model.translate(lines, max_extra_tokens=5)
    with pytest.warns(UserWarning, match="1 line with a sentence that is longer than any in the training"):
        assert trained.translate(lines, max_extra_tokens=5, split_over="no") != texts
    with pytest.warns(UserWarning, match="1 line of more than 9 tokens: translated in parts"):
        assert model.translate(lines, max_extra_tokens=5, split_over=9) == texts


def test_lines_may_come_in_any_iterable_and_a_text_of_lines_keeps_them(model: TrainedModel) -> None:
    lines = ["The man sees the dog.", "", "A woman"]
    texts = model.translate(lines, max_extra_tokens=5)
    for given in (tuple(lines), (f"{line}\n" for line in lines), np.array(lines)):
        assert model.translate(given, max_extra_tokens=5) == texts
    assert model.translate("\n".join(lines), max_extra_tokens=5) == "\n".join(texts)


def test_nbest_scores_are_those_of_score(model: TrainedModel) -> None:
    """A hypothesis scores log p / ((5 + length) / 6)^0.6, where the length counts `</s>`."""
    source = "a"
    # One token at most: a random model's longer outputs are no text that is cut into the same pieces again.
    (found,) = model.translate([source], beam=8, nbest=8, max_extra_tokens=0)
    assert len(found) > 3
    assert [one.score for one in found] == sorted((one.score for one in found), reverse=True)
    compared = 0
    for one in found:
        # Text that is cut into other pieces is another path to it.
        if tuple(model.tokenizer.encode(one.text)) == one.tokens:
            (score,) = model.score([source], [one.text])
            penalty = ((5 + len(score.tokens)) / 6) ** 0.6
            assert score.log_probability / penalty == pytest.approx(one.score, abs=1e-4)
            compared += 1
    assert compared > 0


def test_nothing_is_linked_to_an_empty_source(model: TrainedModel) -> None:
    empty, other = model.align(["", "Our dog"], ["Hund", "Hund"])
    assert (empty.links, empty.words) == ((), "")
    assert other.links


def test_attention_has_the_pieces_of_its_rows_and_columns(model: TrainedModel) -> None:
    attention = model.attention("The man sees.", "Der Mann.")
    config = model.info.model
    s, t = len(attention.source), len(attention.target)
    assert (s, t) == (len(model.tokenizer.encode("The man sees.")) + 1, len(model.tokenizer.encode("Der Mann.")) + 1)
    assert attention.source[-1] == attention.target[-1] == "</s>"
    assert attention.seen == ["<s>", *attention.target[:-1]]
    assert attention.encoder.shape == (config.encoder_layers, config.heads, s, s)
    assert attention.decoder.shape == (config.decoder_layers, config.heads, t, t)
    assert attention.cross.shape == (config.decoder_layers, config.heads, t, s)
    for weights in (attention.encoder, attention.decoder, attention.cross):
        assert torch.allclose(weights.sum(-1), torch.ones(()), atol=1e-5)
    assert not attention.decoder.triu(1).any()


def test_bad_arguments_are_one_sentence(model: TrainedModel, model_folder: Path, tmp_path: Path) -> None:
    long = "dog " * 5000
    cases = [
        (lambda: model.score("a", ["b"]), "src is a string: pass a list of lines"),
        (lambda: model.score(["a"], ["b", None]), "tgt[1] is None, which is not a str: pass text, or leave it out"),
        (lambda: model.sample(["a", math.nan]), "lines[1] is nan, which is not a str"),
        (lambda: model.mbr(3, samples=2), "lines is 3: pass a list of lines"),
        (lambda: model.translate(None), "lines is None: pass a list of lines"),
        (lambda: model.translate(["a", "b\nc"]), "lines[1] has several lines: pass them one by one"),
        (lambda: model.translate(["a"], prefixes=[7]), "prefixes[0] is 7, which is not a str"),
        (lambda: model.translate(["a", None], markup="html"), "lines[1] is None, which is not a str"),
        (lambda: model.translate(["a\ud800"]), "lines[0] holds half of a surrogate pair"),
        (lambda: model.score(["a"], []), "src and tgt must have the same number of lines (1 and 0)"),
        (lambda: model.attention("a", long), "the model has room for"),
        (lambda: model.translate(["a"], nbest=0), "nbest"),
        (lambda: model.translate(["a"], split_over=0), "split_over is 0: it must be above 0"),
        (
            lambda: dist_transformer.load(model_folder, precision="fp8"),
            "precision in load must be 'fp32' or 'bf16' or 'int8', not 'fp8': did you mean",
        ),
        (lambda: dist_transformer.load(model_folder, device="tpu"), "--device tpu cannot be used"),
        (lambda: api.prepare(out=tmp_path / "d", src="a", tgt="b", vocabsize=9), "did you mean vocab_size?"),
        (
            lambda: api.train(data="d", run_dir="r", max_step=3),
            "in train, max_step is not a setting here: did you mean max_steps?",
        ),
        (lambda: api.train(data="d", run_dir="r", batch_size=3, gpus=2), "for batch_size use batch.target_tokens_per_"),
        (lambda: api.average(out=tmp_path / "m", inputs=["a"]), "in average, inputs is not a setting here: use check"),
        (lambda: model.translate(["a"], beam_size=3), "in translate, beam_size is not a setting here: use beam"),
        (lambda: api.train(data="d", run_dir="r", preset="huge"), "huge"),
        (
            lambda: api.average(out=tmp_path / "m", run_dir="r", last=1, best=1),
            "best has no effect with last, which is a choice of its own: leave best or last out",
        ),
        (lambda: api.average(out=tmp_path / "m", last=2, checkpoints=["a"]), "leave last or checkpoints out"),
        (
            lambda: api.average(out=tmp_path / "m", run_dir="r", best=2, every=1.0),
            "every needs last or sweep: add one of them, or leave every out",
        ),
        (lambda: api.evaluate(model=model_folder, src=tmp_path / "absent", ref="b"), "absent"),
        (lambda: api.evaluate(model=model_folder, src="a"), "ref is missing: pass it, or test_set"),
        (lambda: api.evaluate(model="m", src="a", ref="b", seed=2), "seed with model needs mbr: add mbr"),
    ]
    for call, said in cases:
        with pytest.raises(UserError) as error:
            call()
        assert said in str(error.value)
        assert "\n" not in str(error.value)
    assert list(tmp_path.iterdir()) == []


def test_a_program_of_the_caller_is_on_the_command_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file of settings alone may not name one."""
    started: list[list[str]] = []
    files: list[str] = []

    def run_child(words: Sequence[object]) -> tuple[int, None]:
        started.append([str(word) for word in words])
        files.append(Path(started[-1][started[-1].index("--config") + 1]).read_text())
        return 0, None

    monkeypatch.setattr(api, "run_child", run_child)
    api.train(data="d", run_dir="r", best_by="command", validation_command="comet {hypothesis}")
    api.train(data="d", run_dir="r", resume="required", init_from=Path("gone"))
    # Every keyword reaches the child, paths too.
    assert started[1][started[1].index("--resume") + 1] == "required"
    assert json.loads(files[1])["init_from"] == "gone"
    place = started[0].index("--validation-command")
    assert started[0][place + 1] == "comet {hypothesis}"
    assert "--validation-command" not in started[1]


@pytest.mark.system
def test_the_package_alone_imports_no_torch() -> None:
    program = "import sys, dist_transformer; print('torch' in sys.modules, hasattr(dist_transformer, 'loda'))"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]


def test_other_sources_are_prepared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "pairs.tsv").write_text("".join(f"the {i} dog\tder {i} Hund\n" for i in range(200)), encoding="utf-8")
    settings = {
        "sources": [TsvFile(path=tmp_path / "pairs.tsv", source_column=0, target_column=1)],
        "source_language": "en",
        "target_language": "de",
        "vocab_size": 300,
        "max_tokens": 32,
    }
    index = api.prepare(out=str(tmp_path / "data"), **settings)
    assert (index.pairs_read, index.max_tokens, index.train.pairs + index.valid.pairs) == (200, 32, 200)
    assert DataFolder.open(tmp_path / "data").index == index
    assert "read: 200 pairs" in capsys.readouterr().out, "it is a message"
    said: list[str] = []
    api.prepare(out=tmp_path / "again", report=said.append, **settings)
    assert "read: 200 pairs" in said[0]
    assert capsys.readouterr().out == ""


@pytest.mark.slice(name="commands")
def test_the_examples_of_the_page(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}

    def run(script: Path) -> str:
        done = subprocess.run(
            [sys.executable, script.name], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr[-3000:]
        return done.stdout

    run_examples(tmp_path, run)


@pytest.mark.slow
@pytest.mark.usefixtures("registrations")
def test_training_on_two_processes_and_its_errors(toy_data: DataFolder, tmp_path: Path) -> None:
    extension = tmp_path / "halving.py"
    extension.write_text(
        "from dist_transformer.config.registry import SCHEDULES\n"
        "@SCHEDULES.register('halving')\n"
        "def halving(step, settings, run):\n"
        "    return settings.peak_lr / 2**step\n"
    )
    mine = {**SMALL, "optimizer": {"schedule": "halving", "peak_lr": 0.008}}
    run = api.train(
        preset="tiny", data=toy_data.path, run_dir=tmp_path / "run", processes=2, imports=[extension], **mine
    )
    assert run.finished
    assert [record["learning_rate"] for record in run.records("train")] == [0.008 / 2**step for step in range(1, 7)]
    assert run.records("end")[0]["world_size"] == 2
    assert math.isfinite(run.records("valid")[0]["nll"])
    assert api.average(run_dir=run.path, last=2, out=tmp_path / "model").steps == (3, 6)
    # What the child says is what is raised, and the output is not lost.
    with pytest.raises(UserError, match="seed"):
        api.train(preset="tiny", data=toy_data.path, run_dir=tmp_path / "run", imports=[extension], **mine, seed=5)
    # This program knows the schedule, and its child does not: the settings are named, not a file that is gone.
    with pytest.raises(UserError, match=r"^optimizer\.schedule is 'halving': .* --import"):
        api.train(preset="tiny", data=toy_data.path, run_dir=tmp_path / "run", **mine)


@pytest.mark.slow
def test_ctrl_c_saves_and_a_call_that_is_killed_takes_the_training_with_it(
    toy_data: DataFolder, tmp_path: Path
) -> None:
    settings = {**SMALL, "max_steps": 100_000, "save_every": 100_000, "validate_every": 0}
    program = (
        f"from dist_transformer import api\n"
        f"api.train(preset='tiny', data={str(toy_data.path)!r}, run_dir={str(tmp_path / 'run')!r}, **{settings!r})\n"
    )
    _, said = call_and_end(program, tmp_path / "run", signal.SIGINT)
    assert "KeyboardInterrupt" in said
    assert list((tmp_path / "run" / "checkpoints").glob("step-*"))
    call_and_end(program, tmp_path / "run", signal.SIGKILL)
    # Its lock is free again: the training has ended with its caller.
    await_(lambda: not trainings_in(tmp_path / "run"))


def call_and_end(program: str, run_dir: Path, number: signal.Signals) -> tuple[str, str]:
    """Start a program that trains, and send it a signal when a log line has been written; gives its outputs."""
    caller = subprocess.Popen(
        [sys.executable, "-c", program],
        cwd=ROOT,
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
        preexec_fn=allow_interrupts,  # noqa: PLW1509 - no other thread starts one
    )
    metrics = run_dir / "metrics.jsonl"
    before = metrics.stat().st_size if metrics.exists() else 0
    await_(lambda: metrics.exists() and metrics.stat().st_size > before)
    caller.send_signal(number)
    return caller.communicate(timeout=600)


def await_(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 600
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.2)


def trainings_in(run_dir: Path) -> list[int]:
    """Processes whose command line names a run folder."""
    return [
        process.pid
        for process in psutil.process_iter(["cmdline"])
        if str(run_dir) in (process.info["cmdline"] or []) and process.pid != os.getpid()
    ]
