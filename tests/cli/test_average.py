"""`dist-transformer average`, as a user calls it."""

import dataclasses
import json
import math
import re
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from dist_transformer import api
from dist_transformer.averaging import sweep as module
from dist_transformer.base.files import sha256_of
from dist_transformer.data.folder.reader import DataFolder
from dist_transformer.data.vocabulary.tokenizer import Tokenizer
from dist_transformer.evaluation.evaluate import read_test_set, reference_nll
from dist_transformer.inference.decoding import Decoding
from dist_transformer.inference.translator import Translator
from dist_transformer.model.transformer import Transformer
from dist_transformer.model_folder import load_model
from dist_transformer.run.folder import run_identity
from dist_transformer.runtime.launch import as_typed, own_command
from tests.averaging.conftest import MODEL, random_weights, save, validated
from tests.averaging.test_mean import assert_mean
from tests.cli.conftest import Call
from tests.conftest import ROOT, run_python
from tests.rights import wrong_rights

pytestmark = pytest.mark.system

TOOL = ROOT / "tools" / "average_checkpoints.py"
NOT_COMPARED = " (not compared with the newest one alone: the run's data folder is not available, or has changed)"


def next_line(out: Path) -> str:
    return f"next: {as_typed(own_command('translate', '--model', out))}\n"


def test_averages_of_a_run(run: Path, tmp_path: Path, call: Call) -> None:
    out = tmp_path / "an out"
    for step in (1, 2, 3, 5):
        save(run, step)
    assert call("average", "--run-dir", run, "--last", 2, "--out", out) == (
        f"chosen: the last 2 weight files{NOT_COMPARED}\n"
        f"averaged 2 set(s) of weights, steps 3, 5: {out}\n{next_line(out)}",
        "",
    )
    assert_mean(out, [3, 5])
    screen = call("average", "--run-dir", run, "--last", 3, "--every", 2, "--out", out)
    how = f"the last 3 weight files, about 2 minutes of training apart (2.0 to 2.0){NOT_COMPARED}"
    averaged = f"averaged 3 set(s) of weights, steps 1, 3, 5: {out}\n"
    assert screen == (f"chosen: {how}\n{averaged}{next_line(out)}", "")
    assert_mean(out, [1, 3, 5])
    card = (out / "README.md").read_text(encoding="utf-8")
    assert f"- Chosen: {how}\n" in card
    assert "training steps 1, 3, 5" in card
    validated(run, {0: 0.5, 1: 1.5, 2: 1.75, 3: 1.625})
    screen = call("average", "--run-dir", run, "--best", 2, "--by", "nll", "--out", out)
    how = "best validation nll at step 1 (1.5000), step 3 (1.6250)"
    assert screen == (
        f"chosen: {how}\naveraged 2 set(s) of weights, steps 1, 3: {out}\n{next_line(out)}",
        "warning: better by nll, but their weights were not kept: steps 0\n",
    )
    assert_mean(out, [1, 3])
    assert call("average", "--run-dir", run, "--last", 4, "--out", out)[1].startswith(
        "warning: the last 4 weight files are 1 to 2 steps apart"
    )


def test_a_model_folder_is_for_whom_the_umask_lets(run: Path, tmp_path: Path, call: Call, umask: int) -> None:
    """A new one, and one that replaces another."""
    weights, out = save(run, 1), tmp_path / "new" / "out"
    for _ in range(2):
        call("average", "--checkpoints", weights, "--out", out)
        assert wrong_rights(tmp_path / "new") == {}


def test_averages_of_named_weights(run: Path, tmp_path: Path, call: Call) -> None:
    out = tmp_path / "out"
    screen = call("average", "--checkpoints", save(run, 1), save(run, 2), "--out", out)
    assert screen == (f"averaged 2 set(s) of weights, steps 1, 2: {out}\n{next_line(out)}", "")
    assert_mean(out, [1, 2])
    assert "Chosen" not in (out / "README.md").read_text(encoding="utf-8")


def test_a_rank_beside_the_first_leaves_the_work_to_it(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: Call
) -> None:
    ranks = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    for name, value in {**ranks, "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    save(run, 1)
    assert call("average", "--run-dir", run, "--last", 1, "--out", tmp_path / "out") == ("", "")
    assert not (tmp_path / "out").exists()


def test_the_better_of_the_mean_and_the_newest_file(
    run: Path, toy_data: DataFolder, tmp_path: Path, call: Call
) -> None:
    """Weights that rank all pieces alike are better than random ones. A number given by the user is obeyed."""
    tokenizer = toy_data.tokenizer()
    model = dataclasses.replace(MODEL, vocab_size=tokenizer.vocab_size, max_positions=200)
    alike = {name: torch.zeros_like(weight) for name, weight in random_weights(1, model).items()}
    noise = random_weights(2, model)
    data = {"data": [str(toy_data.path)], "data_sha256": [sha256_of(toy_data.path / "index.json")]}
    about = {"model": model, "tokenizer": tokenizer, "interrupted": False, "run": run_identity(data)}
    out = tmp_path / "out"
    save(run, 10, noise, **about)
    save(run, 20, {name: -weight for name, weight in noise.items()}, **about)
    (run / "config.json").write_text(json.dumps(data), encoding="utf-8")
    said, _ = call("average", run, "--out", out)
    found = re.fullmatch(
        r"chosen: the last 2 weight files saved regularly; validation nll (.*), that of the newest one alone "
        rf"(.*)\naveraged 2 set\(s\) of weights, steps 10, 20: {out}\nnext: .*\n",
        said,
    )
    assert found, said
    assert float(found[1]) == pytest.approx(math.log(tokenizer.vocab_size), abs=1e-3)
    assert float(found[2]) > float(found[1])

    save(run, 20, noise, **about)
    save(run, 29, noise, **{**about, "interrupted": True})
    save(run, 30, alike, **about)
    said, warned = call("average", run, "--out", out)
    assert said.startswith("chosen: the newest weight file, validation nll 5.99")
    assert "that of the mean of the last 3 weight files saved regularly is " in said
    assert warned == ""
    assert load_model(out, torch.device("cpu"))[2].steps == (30,)

    _, warned = call("average", run, "--last", 4, "--out", out)
    better = as_typed(own_command("average", "--run-dir", run, "--last", 1, "--out", out))
    assert re.search(
        r"\nwarning: the mean is worse than the newest weight file alone \(validation nll \d+\.\d{4}, and 5\.99\d\d\), "
        rf"which this command writes instead: {re.escape(better)}\n$",
        warned,
    )
    assert load_model(out, torch.device("cpu"))[2].steps == (10, 20, 29, 30)


@pytest.fixture
def scored_run(run: Path, tmp_path: Path, random_model: Transformer, toy_tokenizer: Tokenizer) -> Path:
    """Weights W + E of step 30, W - E of step 20, others of step 10; `dev.de` is what W makes of `dev.en`."""
    right = dict(random_model.state_dict())
    torch.manual_seed(7)
    noise = {name: torch.randn_like(weight) for name, weight in right.items()}
    about = {"model": random_model.config, "tokenizer": toy_tokenizer}
    save(run, 10, noise, **about)
    save(run, 20, {name: right[name] - noise[name] for name in right}, **about)
    save(run, 30, {name: right[name] + noise[name] for name in right}, **about)
    sources = [f"the old dog sees {number} cats" for number in range(8)]
    translator = Translator(random_model, toy_tokenizer, torch.device("cpu"), SETTINGS)
    references = [translation.text for translation in translator.translate(sources)]
    for language, lines in (("en", sources), ("de", references)):
        (tmp_path / f"dev.{language}").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return run


SETTINGS = Decoding(beam=2, max_extra_tokens=5)


def sweep_flags(run: Path, out: Path) -> list[object]:
    dev = out.parents[1]
    flags = ["--run-dir", run, "--sweep", "1,3,2,2", "--src", dev / "dev.en", "--ref", dev / "dev.de", "--out", out]
    search = ["--beam", SETTINGS.beam, "--max-extra-tokens", SETTINGS.max_extra_tokens, "--precision", "fp32"]
    return [*flags, *search]


def test_the_best_number_alone_and_on_two_ranks(
    scored_run: Path, tmp_path: Path, call: Call, random_model: Transformer, toy_tokenizer: Tokenizer
) -> None:
    out, shared = tmp_path / "alone" / "m", tmp_path / "two" / "m"
    said, progress = call("average", *sweep_flags(scored_run, out))
    report = json.loads((out.parent / "m.sweep.json").read_text())
    assert [row["count"] for row in report["candidates"]] == [1, 2, 3]
    assert [row["steps"] for row in report["candidates"]] == [[30], [20, 30], [10, 20, 30]]
    bleus = [row["bleu"] for row in report["candidates"]]
    assert (report["best"], report["precision"]) == (2, "fp32")
    assert bleus[1] == pytest.approx(100)
    assert max(bleus[0], bleus[2]) < 90
    dev = read_test_set(tmp_path / "dev.en", tmp_path / "dev.de")
    pairs = list(zip(*dev, strict=True))
    assert report["candidates"][1]["nll"] == pytest.approx(reference_nll(random_model, toy_tokenizer, pairs))
    table = (out.parent / "m.sweep.md").read_text(encoding="utf-8")
    assert f"| 2 | 20, 30 | 100.00 | {report['candidates'][1]['nll']:.4f} |\n" in table
    assert f"| 3 | 10 to 30, 10 apart | {bleus[2]:.2f} | " in table
    signature = report["candidates"][1]["signature"]
    assert f"BLEU of 8 lines ({signature})" in table
    assert table.partition("\n\n")[2] in said
    assert [line.split(",")[0] for line in progress.splitlines()] == [
        f"N = {count}: {bleu:.2f} BLEU" for count, bleu in zip((1, 2, 3), bleus, strict=True)
    ]
    model, _, info = load_model(out, torch.device("cpu"))
    assert info.steps == (20, 30)
    for name, weight in random_model.state_dict().items():
        assert torch.allclose(model.state_dict()[name], weight, atol=1e-6)
    card = (out / "README.md").read_text(encoding="utf-8")
    assert "- Chosen: the last 2 weight files\n" in card
    note = (
        "Among the means of 1, 2, 3 weight files, the mean of 2 had the highest BLEU on `dev.en` and `dev.de`: 100.00"
    )
    assert f"- {note} (`{signature}`)\n" in card
    assert {path.name for path in out.parent.iterdir()} == {"m", "m.sweep.json", "m.sweep.md"}

    done = run_python(TOOL, *sweep_flags(scored_run, shared), ranks=2)
    assert done.returncode == 0, done.stderr
    assert done.stdout == said.replace(str(out), str(shared))
    reports = [plain(json.loads((folder / "m.sweep.json").read_text())) for folder in (out.parent, shared.parent)]
    assert reports[0] == reports[1]
    assert (shared.parent / "m.sweep.md").read_text(encoding="utf-8") == table
    assert {path.name: path.read_bytes() for path in shared.iterdir()} == {
        path.name: path.read_bytes() for path in out.iterdir()
    }


def test_a_sweep_from_python(scored_run: Path, tmp_path: Path) -> None:
    dev = {"src": tmp_path / "dev.en", "ref": tmp_path / "dev.de", "precision": "fp32", "device": "cpu"}
    search = {"beam": SETTINGS.beam, "max_extra_tokens": SETTINGS.max_extra_tokens}
    info = api.average(run_dir=scored_run, sweep=[2, 1], out=tmp_path / "out" / "m", **dev, **search)
    assert info.steps == (20, 30)
    assert json.loads((tmp_path / "out" / "m.sweep.json").read_text())["best"] == 2


def plain(report: dict[str, Any]) -> dict[str, Any]:
    """Without what a number of ranks may change."""
    del report["world_size"]
    for row in report["candidates"]:
        del row["seconds"]
    return report


def test_an_interrupted_sweep_leaves_nothing(
    scored_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: Call
) -> None:
    """At Ctrl-C while the second mean is scored. An older model stays as it was."""
    out = tmp_path / "alone" / "m"
    scored: list[object] = []
    whole = module.reference_nll

    def interrupted(*arguments: Any, **named: Any) -> float:
        scored.append(arguments)
        if len(scored) == 2:
            signal.raise_signal(signal.SIGINT)
        return whole(*arguments, **named)

    monkeypatch.setattr(module, "reference_nll", interrupted)
    assert call("average", *sweep_flags(scored_run, out), status=130)[1].endswith("interrupted\n")
    assert not out.parent.exists()
    assert {path.name for path in tmp_path.iterdir()} == {"run", "dev.en", "dev.de"}


def test_a_sweep_of_more_files_than_there_are_decodes_nothing(scored_run: Path, tmp_path: Path, call: Call) -> None:
    flags = sweep_flags(scored_run, tmp_path / "alone" / "m")
    flags[flags.index("1,3,2,2")] = "1,5"
    message = f"{scored_run / 'weights'} has 3 weight files, not 5: use --last 3, or train longer"
    assert call("average", *flags, status=1) == ("", f"error: {message}\n")
    assert not (tmp_path / "alone").exists()


NO_NUMBER = "--best needs a number without a sweep, and none with it: the sweep has the numbers"
NO_RUN = "run_dir, checkpoints or interpolate: pass one of them; the other choices are among the files of a run"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            "--run-dir r --last 2 --best 2",
            "--best has no effect with --last, which is a choice of its own: leave --best or --last out",
        ),
        ("--best 2", NO_RUN),
        (
            "--run-dir r --checkpoints a",
            "--run-dir has no effect with --checkpoints, which are the weights to average: leave --run-dir or "
            "--checkpoints out",
        ),
        ("--run-dir r", "r/weights has no weight files: train first, or check --run-dir"),
        ("--run-dir r --every 2", "--every needs --last or --sweep: add one of them, or leave --every out"),
        ("--run-dir r --last 2 --by nll", "--by needs --best: add --best, or leave --by out"),
        ("--run-dir r --best", NO_NUMBER),
        ("--run-dir r --last 2 --beam 4", "--beam needs --sweep: add --sweep, or leave --beam out"),
        ("--run-dir r --sweep 2 --ref a", "--ref needs --src: add --src, or leave --ref out"),
        ("--run-dir r --sweep 2,0", "--sweep is 0: it must be above 0"),
    ],
)
def test_the_tool_says_in_one_sentence_what_is_wrong(arguments: str, message: str, tmp_path: Path, call: Call) -> None:
    screen = call("average", *arguments.split(), "--out", tmp_path / "out", status=1)
    assert screen == ("", f"error: {message}\n")
    assert list(tmp_path.iterdir()) == []
