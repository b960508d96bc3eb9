"""SentencePiece from the text to the answer of a server, and to other programs."""

import ast
import json
import re
import sys
from pathlib import Path

import pytest
import sentencepiece

from dist_transformer.data.folder.reader import DataFolder
from tests.conftest import run_command, run_python, run_ranks
from tests.lived import SMALL

pytestmark = pytest.mark.slow

TOOL = (sys.executable, "-m", "dist_transformer")
JOINT, TWO = ("--vocab-size", 400), ("--src-vocab-size", 380, "--tgt-vocab-size", 360)
KINDS: dict[str, tuple[object, ...]] = {
    # The others belong to a slice.
    "unigram": ("sentencepiece", "--no-byte-fallback", *JOINT),
    "bpe-bytes": ("sentencepiece-bpe", *JOINT),
    "unigram-bytes": ("sentencepiece", *JOINT),
    "bpe": ("sentencepiece-bpe", "--no-byte-fallback", *JOINT),
    "sampled": ("sentencepiece", "--no-byte-fallback", *JOINT, "--segmentations", 3, "--segmentation-alpha", 0.2),
    "two-bytes": ("sentencepiece", *TWO),
}
CLEAN, PLANTED = "Our hungry guests sing.", "\ufeffOur hung\u00adry\u00a0guests sing.\u200b"


@pytest.fixture(
    scope="module",
    params=["unigram", *(pytest.param(name, marks=pytest.mark.slice(name="vocabularies")) for name in [*KINDS][1:])],
)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def lived(kind: str, toy_data: DataFolder, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data folder, a run on two ranks that was resumed, and its model."""
    folder = tmp_path_factory.mktemp(kind)
    for language, rare in (("en", "北京"), ("de", "žž")):
        text = (toy_data.path / "text" / f"train.{language}").read_text(encoding="utf-8")
        (folder / f"train.{language}").write_text(f"{text}{rare}\n\u200b\u00ad\n", encoding="utf-8")
    files = ("--src", folder / "train.en", "--tgt", folder / "train.de", "--valid-pairs", 100)
    words = (*files, "--tag", "<2de>", "--src-tag", "<2de>", "--vocabulary", *KINDS[kind])
    said = run_command(*TOOL, "prepare", *words, "--workers", 2, "--out", folder / "data")
    (folder / "prepared.txt").write_text(said)
    data_and_run = ("--data", folder / "data", "--run-dir", folder / "run", "--save-every", 2)
    for steps in (2, 4):
        said = run_ranks(2, "-m", "dist_transformer.train", *SMALL, *data_and_run, "--max-steps", steps)
    assert "resumed from" in said
    assert "FAIL" not in run_command(*TOOL, "verify", folder / "run", "--data", folder / "data")
    run_command(*TOOL, "average", "--run-dir", folder / "run", "--last", 2, "--out", folder / "model")
    for name in ("in.en", "in.de"):
        lines = (f"Our {number} hungry guests sing.\n" for number in range(20))
        (folder / name).write_text("".join(lines), encoding="utf-8")
    return folder


def test_preparation_counts_unknown_characters(kind: str, lived: Path) -> None:
    said = " ".join((lived / "prepared.txt").read_text().split())
    assert "dropped 1 empty" in said
    counted = dict(re.findall(r"unknown: (?:\S+) characters of (..), (.*?): --byte-fallback", said))
    if kind.endswith("bytes"):
        assert counted == {}
        assert "with byte fallback, clean text, NFKC, tags <2de>" in said
    else:
        assert counted.keys() == {"en", "de"}
        assert counted["de"].endswith(" different ones, became <unk>; most often 'J' 21, 'R' 11, 'ž' 2")
        assert {"'京' 1", "'北' 1"} <= {*counted["en"].split(", ")}


def test_the_folders_hold_the_librarys_own_file(kind: str, lived: Path, tmp_path: Path) -> None:
    """Another preparation with that file alone has the same pieces, without the tag."""
    ours = DataFolder.open(lived / "data").tokenizer().source
    library = sentencepiece.SentencePieceProcessor(model_proto=ours.library_file)
    lines = (lived / "train.en").read_text(encoding="utf-8").splitlines()
    assert [[ours.pieces[i] for i in row] for row in ours.encode_batch(lines)] == [
        [library.id_to_piece(i) for i in row] for row in library.encode(lines)
    ]
    (tmp_path / "own.model").write_bytes(ours.library_file)
    files = ("--src", lived / "train.en", "--tgt", lived / "train.de", "--tokenizer", tmp_path / "own.model")
    said = run_command(*TOOL, "prepare", *files, "--out", tmp_path / "data")
    assert "the model's own rule for text" in " ".join(said.split())
    theirs = DataFolder.open(tmp_path / "data").tokenizer().source
    assert theirs.pieces == [piece for piece in ours.pieces if piece != "<2de>"]
    refused = run_command(*TOOL, "prepare", *files, "--byte-fallback", "--out", tmp_path / "more", status=1)
    assert refused.startswith("error: --byte-fallback needs --vocab-size or --src-vocab-size or --tgt-vocab-size: add")


def test_translations_and_scores(lived: Path, tmp_path: Path) -> None:
    (tmp_path / "in").write_text(f"{CLEAN}\n{PLANTED}\n\u200b\u2060\n", encoding="utf-8")
    files = ("--input", tmp_path / "in", "--output", tmp_path / "out")
    run_command(*TOOL, "translate", "--model", lived / "model", *files)
    clean, planted, blank, end = (tmp_path / "out").read_text(encoding="utf-8").split("\n")
    assert clean == planted != ""
    assert blank == end == ""
    text = ("--src", lived / "in.en", "--ref", lived / "in.de")
    run_command(*TOOL, "evaluate", "--model", lived / "model", *text, "--json", tmp_path / "bleu.json")
    assert 0 <= json.loads((tmp_path / "bleu.json").read_text())["bleu"] <= 100


@pytest.mark.parametrize("target", ["hf", "ctranslate2"])
def test_exports_are_read_as_their_card_says(target: str, lived: Path, tmp_path: Path) -> None:
    dev = ("--src", lived / "in.en", "--ref", lived / "in.de", "--license", "mit")
    said = run_command(*TOOL, "export", "--model", lived / "model", "--to", target, *dev, "--out", tmp_path / "out")
    assert said.count(" ok ") >= 4
    card = (tmp_path / "out" / "README.md").read_text(encoding="utf-8")
    program = card.split("```python\n")[1].split("```")[0]
    printed = run_python("-c", program, cwd=tmp_path / "out")
    assert printed.returncode == 0, printed.stderr
    translations = ast.literal_eval(printed.stdout)
    assert [*map(type, translations)] == [str, str]
