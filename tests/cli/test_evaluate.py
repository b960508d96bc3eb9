"""tools/evaluate_bleu.py alone and on two ranks."""

import importlib.metadata
import json
import shutil
import subprocess
from pathlib import Path
from typing import Any
from urllib.error import URLError

import pytest
from sacrebleu.dataset import DATASETS

import dist_transformer
from dist_transformer import api
from dist_transformer.cli import evaluate as module
from dist_transformer.evaluation.bleu import score
from dist_transformer.evaluation.compare import compare
from dist_transformer.evaluation.published import published_files
from dist_transformer.model_folder import ModelInfo
from dist_transformer.runtime.launch import as_typed, own_command
from dist_transformer.runtime.world import World
from tests.cli.conftest import Call, Lines
from tests.conftest import run_python


def evaluate(ranks: int, *options: str | Path) -> subprocess.CompletedProcess[str]:
    fixed = ("--max-extra-tokens", "5", "--batch-tokens", "300")
    return run_python("tools/evaluate_bleu.py", *options, *fixed, ranks=ranks)


@pytest.fixture
def files(tmp_path: Path, toy_lines: Lines) -> tuple[Path, Path]:
    source, reference = tmp_path / "test.en", tmp_path / "test.de"
    sources, references = toy_lines[0][:25], toy_lines[1][:25]
    source.write_text("\n".join([*sources, "", "§" * 80]) + "\n", encoding="utf-8")
    # U+2028 is no end of line, and references are not normalised.
    reference.write_text("\n".join([*references, "leer\u2028", "ﬁn"]) + "\n", encoding="utf-8")
    return source, reference


@pytest.mark.system
def test_the_choice_among_samples_on_one_rank_and_on_two(
    model_folder: Path, files: tuple[Path, Path], toy_lines: tuple[list[str], list[str]], tmp_path: Path
) -> None:
    source, reference = files
    flags = ("--mbr", "5", "--seed", "3", "--epsilon", "0.05", "--precision", "fp32")
    found = []
    for ranks in (1, 2):
        out = tmp_path / f"on_{ranks}" / "result.json"
        done = evaluate(ranks, "--model", model_folder, "--src", source, "--ref", reference, "--json", out, *flags)
        assert done.returncode == 0, done.stderr
        report = json.loads(out.read_text())
        chosen = {"samples": 5, "utility": "chrf", "language": "de", "seed": 3, "epsilon": 0.05, "nbest": 1}
        assert report["mbr"] == chosen
        assert report["precision"] == "fp32"
        found.append(Path(report["hypotheses"]).read_text("utf-8").splitlines())
    assert found[0] == found[1]
    model = dist_transformer.load(model_folder, device="cpu")
    expected = model.mbr(toy_lines[0][:25], samples=5, seed=3, epsilon=0.05, max_extra_tokens=5)
    assert found[0][:25] == [row[0].text for row in expected]


@pytest.mark.system
def test_the_same_scores_on_one_rank_and_on_two(model_folder: Path, files: tuple[Path, Path], tmp_path: Path) -> None:
    source, reference = files
    reports: list[dict[str, Any]] = []
    screens, hypotheses = [], []
    for ranks in (1, 2):
        out = tmp_path / f"on_{ranks}" / "result.json"
        done = evaluate(ranks, "--model", model_folder, "--src", source, "--ref", reference, "--json", out)
        assert done.returncode == 0, done.stderr
        reports.append(json.loads(out.read_text()))
        assert reports[-1].pop("world_size") == ranks
        assert reports[-1].pop("seconds") > 0
        hypotheses.append(Path(reports[-1].pop("hypotheses")).read_bytes())
        screens.append(done.stdout)
    assert reports[0] == reports[1]
    assert hypotheses[0] == hypotheses[1]
    assert screens[0] == screens[1]
    assert screens[0].endswith(f"\nnext: {as_typed(own_command('translate', '--model', model_folder))}\n")

    report = reports[0]
    assert report["sentences"] == 27
    assert report["split_sentences"] == 1
    assert [bool(line) for line in hypotheses[0].decode().split("\n")[-4:]] == [True, False, True, False]
    assert report["synthetic"] is True
    assert report["corpus"] == "toy grammar"
    assert report["steps"] == [100, 200]
    assert report["model"] == str(model_folder)
    lines = hypotheses[0].decode("utf-8").split("\n")[:-1]
    expected = score(lines, reference.read_text(encoding="utf-8").split("\n")[:-1], target_language="de")
    assert {name: report[name] for name in expected.report()} == expected.report()
    assert report["signature"] == expected.bleu_cased.signature
    assert report["split_over"] is None
    parts, cut = report["notes"]
    assert parts.startswith("1 line of more than 154 tokens: translated in parts")
    assert "cut at the limit of source + 5 tokens" in cut
    assert all(f"note: {note}" in screens[0] for note in report["notes"])
    assert "SYNTHETIC" in screens[0]
    assert str(expected) in screens[0]


@pytest.mark.system
def test_all_ranks_fail_alike(model_folder: Path, files: tuple[Path, Path]) -> None:
    source, reference = files
    with reference.open("a") as file:
        file.write("one too many\n")
    done = evaluate(2, "--model", model_folder, "--src", source, "--ref", reference)
    assert done.returncode != 0
    assert done.stdout == ""
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1
    assert "must have the same number of lines (27 and 28): " in errors[0]
    assert "most recent call last" not in errors[0]


def test_where_nothing_can_be_written_is_said_before_decoding(
    files: tuple[Path, Path], tmp_path: Path, call: Call
) -> None:
    for place in (tmp_path, files[0] / "result.json"):
        words = ("--model", tmp_path / "nowhere", "--src", files[0], "--ref", files[1], "--json", place)
        assert call("evaluate", *words, status=1)[1] == f"error: {place} cannot be written: choose another place\n"


def test_several_references(
    model_folder: Path, files: tuple[Path, Path], tmp_path: Path, call: Call, toy_lines: Lines
) -> None:
    other, out = tmp_path / "other.de", tmp_path / "result.json"
    other.write_text("\n".join(toy_lines[1][30:57]) + "\n", encoding="utf-8")
    flags = ("--model", model_folder, "--src", files[0], "--max-extra-tokens", "5", "--device", "cpu", "--json", out)
    call("evaluate", *flags, "--ref", files[1], other)
    report = json.loads(out.read_text(encoding="utf-8"))
    texts = [
        path.read_text(encoding="utf-8").split("\n")[:-1] for path in (Path(report["hypotheses"]), files[1], other)
    ]
    expected = score(*texts, target_language="de").report()
    assert {name: report[name] for name in expected} == expected
    assert report["signature"].startswith("nrefs:2|")
    again = tmp_path / "again.json"
    values = {"model": model_folder, "src": files[0], "ref": [files[1], other], "max_extra_tokens": 5, "json": again}
    api.evaluate(**values, device="cpu")
    unlike = dict.fromkeys(("seconds", "hypotheses"))
    assert {**json.loads(again.read_text("utf-8")), **unlike} == {**report, **unlike}


def test_all_references_of_a_published_test_set_count(
    model_info: ModelInfo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(DATASETS["wmt20/tworefs"], "_outdir", str(tmp_path))
    for field in DATASETS["wmt20/tworefs"].fieldnames("en-de"):
        (tmp_path / f"wmt20_tworefs.en-de.{field.replace(':', '-')}").touch()
    names = [file.name.rpartition(".")[2] for file in published_files("wmt20/tworefs", model_info)]
    assert names == ["src", "ref-0", "ref-1"]


def test_a_published_test_set(
    model_folder: Path,
    files: tuple[Path, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    call: Call,
) -> None:
    """A copy of sacreBLEU's cache is enough without a network."""

    def fetch(address: str) -> None:
        raise URLError("no route to statmt.org")

    monkeypatch.setattr("urllib.request.urlopen", fetch)
    for name in ("wmt14/full", "wmt15"):
        monkeypatch.setattr(DATASETS[name], "_outdir", str(tmp_path / "cache"))
        monkeypatch.setattr(DATASETS[name], "_rawdir", str(tmp_path / "cache" / "raw"))
    (tmp_path / "cache").mkdir()
    # Others are names of documents and the like.
    for field in DATASETS["wmt14/full"].fieldnames("en-de"):
        shutil.copyfile(files[field == "ref"], tmp_path / "cache" / f"wmt14_full.en-de.{field}")
    common = ("--model", model_folder, "--max-extra-tokens", "5", "--device", "cpu")
    reports = []
    named = ("--test-set", "wmt14/full", "--direction", "en-de")
    for given in (named, ("--src", files[0], "--ref", files[1])):
        call("evaluate", *common, *given, "--json", tmp_path / "result.json")
        reports.append(json.loads((tmp_path / "result.json").read_text(encoding="utf-8")) | {"seconds": 0})
    origin = {"name": "wmt14/full", "direction": "en-de", "sacrebleu": importlib.metadata.version("sacrebleu")}
    assert reports[0] == reports[1] | {"test_set": origin}
    assert reports[1]["test_set"] is None
    elsewhere = next(name for name, each in DATASETS.items() if "en-de" not in each.langpairs)
    for name, said in (
        ("wmt14/ful", "test_set wmt14/ful is none of sacreBLEU's: did you mean wmt14/full?"),
        (elsewhere, f"test_set {elsewhere} has no direction en-de: choose another test set"),
        ("wmt15", "cannot be downloaded (<urlopen error no route to statmt.org>): run sacrebleu -t wmt15 -l en-de"),
    ):
        assert said in call("evaluate", *common, "--test-set", name, status=1)[1]
    missing = call("evaluate", "--model", model_folder, "--src", files[0], status=1)[1]
    assert "ref is missing: pass it, or test_set" in missing


def test_hypotheses_without_a_model(
    files: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: Call
) -> None:
    """Under a launcher one process scores."""
    reference, worse, out = files[1], tmp_path / "worse.de", tmp_path / "result.json"
    lines = reference.read_text(encoding="utf-8").split("\n")[:-1]
    worse.write_text("".join(f"{line[:-3]}\n" for line in lines), encoding="utf-8")
    flags = ("--ref", reference, "--tgt-lang", "de", "--json", out)
    for hypotheses, more, settings in (([worse], [], {}), ([worse, reference], ["--lowercase"], {"lowercase": True})):
        said, _ = call("evaluate", "--hypotheses", *hypotheses, *flags, *more)
        expected = compare(hypotheses, [reference], target_language="de", **settings)
        assert said == f"27 sentences, to de\n{expected}\n"
        assert json.loads(out.read_text(encoding="utf-8")) == expected.report()
    out.unlink()
    values = {"hypotheses": [worse, reference], "ref": reference, "tgt_lang": "de", "lowercase": True, "json": out}
    assert api.evaluate(**values) == expected
    assert json.loads(out.read_text(encoding="utf-8")) == expected.report()
    out.unlink()
    monkeypatch.setattr(module, "read_world", lambda: World(rank=1, size=2, local_rank=1, local_size=2))
    assert call("evaluate", "--hypotheses", worse, *flags) == ("", "")
    assert not out.exists()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--src a", "model and hypotheses are missing: pass one of them"),
        ("--model m", "--model needs a text to translate: pass src, too"),
        ("--model m --src a --tgt-lang de", "--tgt-lang has no effect with --model, which has its own: leave"),
        ("--hypotheses h", "--hypotheses do not state their language: pass tgt_lang, such as de"),
        (
            "--hypotheses h --tgt-lang de --src a",
            "--src has no effect with --hypotheses, which are translations already",
        ),
        ("--hypotheses h --tgt-lang de --seed 2", "--seed has no effect with --hypotheses, which are"),
        ("--model m --src a --epsilon 0.1", "--epsilon with --model needs --mbr: add --mbr"),
        ("--hypotheses h --tgt-lang de --beam 4", "--beam has no effect with --hypotheses, which are"),
        ("--model m --src a --mbr 8 --beam 4", "--beam has no effect with --mbr, which draws samples without a search"),
        ("--model m --src a --seed 1", "--seed with --model needs --mbr: add --mbr, or leave --seed out"),
    ],
)
def test_flags_that_do_not_go_together(flags: str, message: str, call: Call) -> None:
    assert call("evaluate", *flags.split(), "--ref", "r", status=1)[1].startswith(f"error: {message}")
