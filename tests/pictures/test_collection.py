"""The pictures that a model, a sentence and learned positions give, their folder, and the command's bad input."""

import base64
import dataclasses
import io
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lxml.html
import pytest
import torch
from matplotlib.figure import Figure
from PIL import Image

from dist_transformer.base.errors import UserError
from dist_transformer.cli.pictures import main
from dist_transformer.data.vocabulary.tokenizer import Tokenizer
from dist_transformer.model.transformer import Transformer
from dist_transformer.model_folder import ModelInfo, write_model_folder
from dist_transformer.pictures import collection as module
from dist_transformer.pictures.collection import make_pictures, write_pictures
from dist_transformer.pictures.picture import Picture
from dist_transformer.pictures.settings import PictureSettings

SENTENCE = "the dog sleeps"
OF_NO_MODEL = ["masks", "softmax", "positions", "rotation", "schedules", "cost"]
OF_A_SENTENCE = ["attention-encoder", "attention-decoder", "attention-cross"]


@pytest.fixture
def learned_folder(toy_tokenizer: Tokenizer, random_model: Transformer, model_info: ModelInfo, tmp_path: Path) -> Path:
    """A model folder with learned positions."""
    torch.manual_seed(4)
    config = dataclasses.replace(random_model.config, positions="learned")
    write_model_folder(
        tmp_path / "learned",
        info=dataclasses.replace(model_info, model=config),
        weights=dict(Transformer(config).state_dict()),
        tokenizer_json=toy_tokenizer.content,
    )
    return tmp_path / "learned"


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pictures that need no model take seconds, and have tests of their own."""

    def stand_in(name: str) -> Callable[[], Picture]:
        return lambda: Picture(name=name, title=name, section="3", caption="", alt="", figure=Figure(figsize=(1, 1)))

    functions = ("mask", "saturation", "sinusoid", "rotation", "schedule", "cost")
    for function, name in zip(functions, OF_NO_MODEL, strict=True):
        monkeypatch.setattr(module, f"{function}_picture", stand_in(name))


def made(**settings: Any) -> tuple[list[str], list[str]]:
    """Return the names of the pictures, and the notes."""
    pictures, notes = make_pictures(PictureSettings(out=Path("out"), **settings))
    return [picture.name for picture in pictures], notes


@pytest.mark.usefixtures("quick")
def test_without_a_model_the_page_says_what_it_lacks() -> None:
    names, (attention, positions) = made()
    assert names == OF_NO_MODEL
    assert "Pass --model MODEL and --src-text" in attention
    assert "--model.positions learned" in positions
    assert "--learned-model MODEL" in positions


@pytest.mark.usefixtures("quick")
def test_a_model_and_a_pair_give_attention(model_folder: Path) -> None:
    names, notes = made(model=model_folder, source=SENTENCE, target="der Hund")
    assert names == ["masks", *OF_A_SENTENCE, *OF_NO_MODEL[1:]]
    assert notes[:2] == [f"Sentence of the attention pictures: {SENTENCE}", "Its target, given: der Hund"]
    assert len(notes) == 3


@pytest.mark.usefixtures("quick")
def test_without_a_target_the_model_translates(model_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.TrainedModel, "translate", lambda model, text: f"translated {text}")
    _, notes = made(model=model_folder, source=SENTENCE)
    assert notes[1] == f"Its target, the model's translation by beam search: translated {SENTENCE}"


@pytest.mark.usefixtures("quick")
def test_learned_positions_come_from_either_model(model_folder: Path, learned_folder: Path) -> None:
    with_learned = [*OF_NO_MODEL[:4], "learned-positions", *OF_NO_MODEL[4:]]
    assert made(learned_model=learned_folder)[0] == with_learned
    names, notes = made(model=learned_folder, source=SENTENCE, target="der")
    assert names == ["masks", *OF_A_SENTENCE, *with_learned[1:]]
    assert len(notes) == 2
    with pytest.raises(UserError, match="has sinusoidal positions: use a model that was trained with"):
        made(learned_model=model_folder)


def run_main(monkeypatch: pytest.MonkeyPatch, *words: object) -> None:
    monkeypatch.setattr(sys, "argv", ["pictures", *map(str, words)])
    main()


@pytest.mark.usefixtures("quick")
def test_the_command_writes_the_folder_and_names_its_page(
    model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    run_main(monkeypatch, "--out", out, "--model", model_folder, "--src-text", SENTENCE, "--tgt-text", "der Hund")
    assert capsys.readouterr().out == f"{out / 'index.html'}\n"
    files = sorted(path.name for path in out.iterdir())
    assert files == sorted(["index.html", *(f"{name}.png" for name in [*OF_NO_MODEL, *OF_A_SENTENCE])])


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--model", "MODEL"], "--model needs a sentence: pass --src-text"),
        (["--src-text", "a"], "--src-text needs a model that reads it: pass --model"),
        (["--model", "MODEL", "--src-text", " "], "--src-text is ' ': pass one sentence in one line"),
        (["--model", "MODEL", "--src-text", "a", "--tgt-text", ""], "--tgt-text is '': pass one sentence in one line"),
        (
            ["--model", "MODEL", "--src-text", "dog " * 31, "--tgt-text", "Hund"],
            "the source has .* pieces and a picture has room for 30: use a shorter sentence",
        ),
        (["--model", "nowhere", "--src-text", "a"], "nowhere"),
        (["--learned-model", "nowhere"], "nowhere"),
    ],
)
@pytest.mark.usefixtures("quick")
def test_bad_input_gets_a_sentence_and_leaves_nothing(
    words: list[str], said: str, model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = [word.replace("MODEL", str(model_folder)) for word in words]
    with pytest.raises(UserError, match=said):
        run_main(monkeypatch, "--out", tmp_path / "out", *words)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_with_files_is_not_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine.txt").write_text("mine", encoding="utf-8")
    with pytest.raises(UserError, match="exists: choose another name, or remove it"):
        run_main(monkeypatch, "--out", tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]


HOSTILE = '"><script>alert(1)</script>'


def picture(name: str, title: str, inches: float = 4.0) -> Picture:
    figure = Figure(figsize=(inches, 1))
    figure.add_subplot().plot([0, 1], [0, 1])
    return Picture(
        name=name, title=title, section="3.5", caption=f"{title} <in> words.", alt=f"{title} drawn", figure=figure
    )


def test_the_folder_has_a_page_and_png_files(tmp_path: Path) -> None:
    out = tmp_path / "new" / "out"
    assert write_pictures(out, [picture("one", "First one"), picture("two", "Second")], []) == out / "index.html"
    assert sorted(path.name for path in out.iterdir()) == ["index.html", "one.png", "two.png"]
    with Image.open(out / "one.png") as image:
        assert (image.size, image.mode) == ((400, 100), "P")
        assert len(image.convert("RGB").getcolors(10_000)) > 1
    # No temporary folder is left.
    assert list(out.parent.iterdir()) == [out]


def test_the_page_is_self_contained_and_says_what_to_see(tmp_path: Path) -> None:
    drawn = [picture("one", "First one"), picture("two", "Second", 10.0)]
    html = write_pictures(tmp_path / "out", drawn, [HOSTILE]).read_text(encoding="utf-8")
    page = lxml.html.document_fromstring(html)
    assert [section.get("id") for section in page.xpath("//section")] == ["first-one", "second"]
    assert page.xpath("//ul/li/a/@href") == ["#first-one", "#second"]
    assert page.xpath("//figcaption/text()") == [f"{name} <in> words. Section 3.5." for name in ("First one", "Second")]
    assert page.xpath("//img/@alt") == ["First one drawn", "Second drawn"]
    for source in page.xpath("//img/@src"):
        kind, content = source.split(",", 1)
        assert kind == "data:image/svg+xml;base64"
        assert base64.b64decode(content).startswith(b"<svg")
    # A wide picture scrolls at full size on a phone.
    assert page.xpath("//figure/@class") == ["map", "map wide"]
    assert page.xpath("//meta[@http-equiv]/@content")[0].startswith("default-src 'none'")
    assert "prefers-color-scheme: dark" in html
    # A sentence is text, not markup.
    assert HOSTILE in page.xpath("//header//p/text()")
    assert page.xpath("//script") == []


def test_an_empty_folder_is_filled(tmp_path: Path) -> None:
    write_pictures(tmp_path, [picture("one", "One")], ["half of a pair: \ud800"])
    assert "half of a pair: ?" in (tmp_path / "index.html").read_text(encoding="utf-8")


def test_nothing_is_left_of_a_folder_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk is full at the second picture."""
    drawn: list[object] = []

    def fail(figure: Figure) -> bytes:
        drawn.append(figure)
        if len(drawn) == 2:
            raise OSError(28, "No space left on device")
        buffer = io.BytesIO()
        figure.savefig(buffer, format="png")
        return buffer.getvalue()

    monkeypatch.setattr(module, "as_png", fail)
    with pytest.raises(UserError, match=r"out cannot be written \(No space left on device\): free"):
        write_pictures(tmp_path / "out", [picture("one", "One"), picture("two", "Two")], [])
    assert list(tmp_path.iterdir()) == []
