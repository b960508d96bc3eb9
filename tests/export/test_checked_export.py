"""An export is written if its outputs are ours, and otherwise nothing is."""

import dataclasses
import functools
import itertools
import json
import re
import signal
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from tqdm import tqdm

from dist_transformer.base.checks import Check, failed
from dist_transformer.base.errors import UserError
from dist_transformer.config.directions import Direction
from dist_transformer.data.vocabulary.byte_bpe import learn_byte_bpe
from dist_transformer.data.vocabulary.kinds import LearnedKind, Learning, wrap_pair
from dist_transformer.data.vocabulary.tokenizer import Tokenizer, Vocabulary
from dist_transformer.export import checked_export, ctranslate2, gate, libraries, marian, tokenizer_files
from dist_transformer.export.checked_export import Export, export_model
from dist_transformer.export.ctranslate2 import CTranslate2Peer
from dist_transformer.export.libraries import ExportSettings
from dist_transformer.inference.translation import ScoredText, Translation
from dist_transformer.inference.translator import Translator
from dist_transformer.model.transformer import Transformer
from dist_transformer.model_folder import ModelInfo, write_model_folder
from tests.support.tiny import tiny_config

CPU = torch.device("cpu")
ROWS = ["token ids", "decoding", "log-probabilities", "greedy search", "beam search"]
Lines = tuple[list[str], list[str]]
Make = Callable[..., ExportSettings]


@pytest.fixture(autouse=True)
def few_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dev texts of a test are short, and so are outputs of models that never learned to end them."""
    monkeypatch.setattr(gate, "COMPARED_LINES", 20)
    monkeypatch.setattr(libraries, "_LONGEST_OUTPUT", 12)


@pytest.fixture
def make_settings(toy_tokenizer: Tokenizer, toy_lines: Lines, model_info: ModelInfo, tmp_path: Path) -> Make:
    """Settings to export a random model: `make_settings(to="hf", norm="pre", lines=20, license=…)`."""

    def make(
        *,
        to: str,
        lines: int = 20,
        changes: dict[str, object] | None = None,
        directions: tuple[Direction, ...] = (),
        vocabulary: Vocabulary | None = None,
        **more: object,
    ):
        tags = [tag for direction in directions for tag in direction.tags]
        tokenizer = vocabulary or toy_tokenizer
        if tags and vocabulary is None:
            tokenizer = learn_byte_bpe(itertools.chain(*toy_lines), vocab_size=400, tags=tags)
        torch.manual_seed(5)
        config = tiny_config(encoder_layers=2, max_positions=160)
        changed = dataclasses.replace(config, **(changes or {}))
        model = Transformer(changed.for_vocabularies(*tokenizer.sizes)).eval()
        with torch.no_grad():
            # Biases and norms, too: a forgotten one would otherwise be the zero or one it starts at.
            for name, parameter in model.named_parameters():
                if name != "embedding":
                    parameter.add_(torch.randn_like(parameter) * 0.1)
        write_model_folder(
            tmp_path / "model",
            info=dataclasses.replace(
                model_info, model=model.config, tokenizer_sha256=tokenizer.sha256, directions=directions
            ),
            weights=dict(model.state_dict()),
            tokenizer_json=tokenizer.content,
        )
        for name, side in zip(("dev.en", "dev.de"), toy_lines, strict=True):
            (tmp_path / name).write_text("".join(f"{line}\n" for line in side[:lines]), encoding="utf-8")
        given = {"model": tmp_path / "model", "source": tmp_path / "dev.en", "reference": tmp_path / "dev.de"}
        return ExportSettings(**{**given, "to": to, "out": tmp_path / "made" / "out", **more})

    return make


class Watched(tqdm):
    """Progress as it was reported."""

    def __init__(self) -> None:
        super().__init__(disable=True)
        self.said: list[str] = []

    def write(self, line: str, **_: object) -> None:
        self.said.append(line)

    def update(self, units: int) -> None:
        self.n += units


def run(settings: ExportSettings, progress: Watched | None = None) -> tuple[Export, list[Check]]:
    shown: list[Check] = []
    made = export_model(settings, CPU, progress=Watched() if progress is None else progress, show=shown.extend)
    return made, shown


def run_through(settings: ExportSettings) -> Export:
    """Export what must pass all checks."""
    made, checks = run(settings)
    assert [check.name for check in checks] == ROWS
    assert failed(checks) == []
    return made


def refused(settings: ExportSettings, message: str) -> list[str]:
    """Export what must be refused; gives the names of the checks that failed."""
    shown: list[Check] = []
    with pytest.raises(UserError, match=message):
        export_model(settings, CPU, progress=Watched(), show=shown.extend)
    assert not settings.out.exists()
    assert not settings.out.parent.exists() or not list(settings.out.parent.iterdir())
    return failed(shown)


def test_a_folder_for_transformers(make_settings: Make, tmp_path: Path) -> None:
    """The folder alone gives the outputs that were compared, by the settings of search that it holds."""
    from ctranslate2.converters import TransformersConverter
    from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

    settings = make_settings(to="hf", name="toy", license="mit")
    made = run_through(settings)
    names = {"README.md", "config.json", "generation_config.json", "model.safetensors"}
    assert {path.name for path in settings.out.iterdir()} == names | {"tokenizer.json", "tokenizer_config.json"}
    assert len({path.stat().st_mode for path in settings.out.iterdir()}) == 1
    generation = json.loads((settings.out / "generation_config.json").read_text(encoding="utf-8"))
    assert generation == {
        "num_beams": 4,
        "length_penalty": 0.5,
        "max_new_tokens": 12,
        "early_stopping": "never",
        "suppress_tokens": [0, 1, 2],
        "decoder_start_token_id": 2,
        "bos_token_id": 2,
        "eos_token_id": 3,
        "pad_token_id": 0,
    }
    tokenizer, model = AutoTokenizer.from_pretrained(settings.out), AutoModelForSeq2SeqLM.from_pretrained(settings.out)
    inputs = tokenizer(made.dev.sources[:3], padding=True, return_tensors="pt")
    outputs = tokenizer.batch_decode(model.generate(**inputs), skip_special_tokens=True)
    assert outputs == made.outputs[:3]
    text = "a </s> <pad> b"
    ids = tokenizer(text)["input_ids"]
    assert (ids[-1], ids.count(3)) == (3, 1)
    assert tokenizer.decode(ids, skip_special_tokens=True) == text
    # Their converter lets every MarianMTModel begin with a zero vector; with <pad> as the last entry it would convert.
    with pytest.raises(ValueError, match="vocabulary"):
        TransformersConverter(str(settings.out)).convert(str(tmp_path / "converted"))
    assert "`ct2-transformers-converter` assumes" in (settings.out / "README.md").read_text(encoding="utf-8")


@pytest.fixture
def run_card(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Run the example of a folder's card on some lines, as users do, and return what it prints."""

    def run_it(folder: Path, lines: Sequence[str], front: str = "") -> str:
        card = (folder / "README.md").read_text(encoding="utf-8")
        (example,) = re.findall(r"```python\n(.*?)```", card, re.DOTALL)
        shown = f'"{front}A sentence.", "{front}Another one."'
        assert shown in example
        example = example.replace(shown, ", ".join(repr(front + line) for line in lines))
        # The card does not depend on the folder's place and name.
        monkeypatch.chdir(folder.rename(folder.with_name("moved")))
        capsys.readouterr()
        exec(compile(example, "card", "exec"), {})
        return capsys.readouterr().out.strip()

    return run_it


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"norm": "pre", "positions": "learned", "tie_embeddings": "none"},
        {"activation": "swish", "output_bias": True},
    ],
    ids=["post", "pre", "bias"],
)
def test_a_folder_for_ctranslate2(
    changes: dict[str, object], make_settings: Make, run_card: Callable[..., str]
) -> None:
    """The lines of its card translate as was compared."""
    settings = make_settings(to="ctranslate2", changes=changes)
    made = run_through(settings)
    assert made.precision == "float32"
    names = {"README.md", "config.json", "model.bin", "shared_vocabulary.json", "tokenizer.json"}
    assert {path.name for path in settings.out.iterdir()} == names
    assert run_card(settings.out, made.dev.sources[:3]) == str(made.outputs[:3])


@pytest.mark.parametrize(
    ("to", "kinds", "ties"),
    [
        ("hf", ("sentencepiece", "sentencepiece-bpe"), "target"),
        ("hf", ("sentencepiece-bpe", "sentencepiece"), "none"),
        ("ctranslate2", ("byte-bpe", "sentencepiece"), "none"),
        ("ctranslate2", ("sentencepiece", "byte-bpe"), "target"),
    ],
)
def test_two_vocabularies(
    to: str,
    kinds: tuple[LearnedKind, LearnedKind],
    ties: str,
    make_settings: Make,
    toy_lines: Lines,
    run_card: Callable[..., str],
) -> None:
    tag, size = "<2de>", {"sentencepiece": 150, "sentencepiece-bpe": 140, "byte-bpe": 300}
    source, target = (
        Learning(kind=kind, vocab_size=size[kind], tags=tags).learn(lines)
        for kind, lines, tags in zip(kinds, toy_lines, ((tag,), ()), strict=True)
    )
    one = Direction(source_language="en", target_language="de", tags=(tag,))
    changes = {"tie_embeddings": ties, "output_bias": True}
    settings = make_settings(to=to, vocabulary=wrap_pair(source, target), changes=changes, directions=(one,))
    made = run_through(settings)
    front = ">>2de<<" if to == "hf" else ""
    assert run_card(settings.out, made.dev.sources[:3], front) == str(made.outputs[:3])


def test_transformers_has_no_tokenizer_for_two_of_bytes(make_settings: Make, toy_lines: Lines) -> None:
    sides = (learn_byte_bpe(lines, vocab_size=300) for lines in toy_lines)
    assert refused(make_settings(to="hf", vocabulary=wrap_pair(*sides)), "has no tokenizer for two vocabularies") == []


@pytest.mark.parametrize(
    ("quantization", "share"), [("int8", 0.5), ("int8_bfloat16", 0.5), ("int16", 0.7), ("bfloat16", 0.6)]
)
def test_a_quantised_model_passes_in_fp32_first(quantization: str, share: float, make_settings: Make) -> None:
    """It may be computed in another type: not every processor has every one."""
    settings = make_settings(to="ctranslate2", quantization=quantization)
    made, checks = run(settings)
    assert [check.name for check in checks] == [*ROWS[:-1], quantization]
    assert f"computed here in {made.precision} (" in checks[-1].found
    plain = dataclasses.replace(settings, quantization=None, out=settings.out.with_name("plain"))
    run(plain)
    sizes = [(each.out / "model.bin").stat().st_size for each in (settings, plain)]
    assert sizes[0] < sizes[1] * share
    assert sorted(path.name for path in settings.out.parent.iterdir()) == ["out", "plain"]


def test_a_quantised_model_that_loses_more_is_refused(make_settings: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checked_export, "QUANTISED_LOSS", -1.0)
    settings = make_settings(to="ctranslate2", quantization="int8")
    assert refused(settings, r"was not written, because its outputs differ from those of .* \(int8\)") == ["int8"]


def test_one_wrong_weight_is_refused(make_settings: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    parts, name = marian.marian_parts, "model.encoder.layers.1.fc1.bias"
    monkeypatch.setattr(marian, "marian_parts", lambda model: parts(model) | {name: (parts(model)[name][0] + 1, None)})
    assert "log-probabilities" in refused(make_settings(to="hf"), r"was not written, .*log-probabilities")


@pytest.mark.parametrize("to", ["hf", "ctranslate2"])
def test_other_token_ids_are_refused(to: str, make_settings: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tokenizer that makes `</s>` of the text `</s>`: only hostile strings show it."""
    config, write = tokenizer_files.tokenizer_config, tokenizer_files.whole_tokenizer
    wrong_config = functools.partial(config, split_special_tokens=False)
    monkeypatch.setattr(tokenizer_files, "tokenizer_config", wrong_config)
    monkeypatch.setattr(ctranslate2, "whole_tokenizer", lambda *given, **_: write(*given, knows_specials=True))
    assert "token ids" in refused(make_settings(to=to), "was not written")


def test_another_search_is_refused(make_settings: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Greedy outputs that differ in one line of a hundred."""
    greedy = CTranslate2Peer.greedy

    def other_greedy(self, sources: Sequence[list[int]], longest: int) -> list[list[int]]:
        outputs = greedy(self, sources, longest)
        return [[*outputs[0][1:], 5], *outputs[1:]]

    monkeypatch.setattr(CTranslate2Peer, "greedy", other_greedy)
    assert refused(make_settings(to="ctranslate2"), "was not written") == ["greedy search"]


def test_another_bleu_of_the_same_model_is_a_caution(make_settings: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Translator, "translate", lambda self, lines: translations(lines))
    settings = make_settings(to="ctranslate2")
    made, checks = run(settings)
    assert [check.name for check in checks if check.state == "warn"] == ["beam search"]
    assert abs(made.bleu(made.outputs).value - made.bleu(made.ours).value) > checked_export.BLEU_TOLERANCE
    card = (settings.out / "README.md").read_text(encoding="utf-8")
    assert "| beam search | **Caution:** " in card
    assert "the models agree and their searches differ" in card
    assert {check["state"] for check in made.report()["checks"]} == {"ok", "warn"}


def translations(lines: Sequence[str]) -> list[object]:
    """Outputs that are the references' beginnings: a BLEU above 0."""
    text = "der Hund und die Katze , das Haus . ein"
    return [Translation(hypotheses=(ScoredText(text=f"{text} {line}", score=0.0, tokens=()),)) for line in lines]


@pytest.mark.parametrize("quantization", [None, "int8"])
def test_without_text_a_built_in_one_is_compared(
    quantization: str | None, make_settings: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All built-in lines go through the tokenizers, some through the models, and the card states no BLEU."""
    monkeypatch.setattr(gate, "COMPARED_LINES", 1000)
    monkeypatch.setattr(checked_export, "BUILT_IN_LINES", 8)
    settings = make_settings(to="ctranslate2", quantization=quantization, source=None, reference=None)
    progress = Watched()
    made, checks = run(settings, progress)
    assert progress.said == ["comparing 8 lines, 8 of them by beam search (seed 1)"]
    assert [check.name for check in checks] == [*ROWS[:-1], quantization or "beam search"]
    assert checks[0].found == "the same for 1,000 lines and 57 hostile strings"
    # What a quantised model loses is unknown then.
    assert [check.state for check in checks] == ["ok"] * 4 + ["warn" if quantization else "ok"]
    assert (made.report()["bleu"], made.report()["sentences"]) == (None, 8)
    metadata, text = (settings.out / "README.md").read_text(encoding="utf-8").split("\n---\n", 1)
    assert "model-index" not in metadata
    assert "BLEU on" not in text
    with pytest.raises(UserError, match=r"^reference needs source: pass --src, or leave --ref out$"):
        make_settings(to="hf", source=None)


def test_a_sample_is_compared_and_stated_beforehand(make_settings: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same lines each time; the outputs belong to the lines whose numbers are stated."""
    monkeypatch.setattr(gate, "COMPARED_LINES", 40)
    monkeypatch.setattr(checked_export, "SEARCHED_LINES", 10)
    settings = make_settings(to="ctranslate2", lines=50, quantization="int8")
    progress = Watched()
    made, checks = run(settings, progress)
    assert progress.said == ["comparing 40 lines, 10 of them by beam search (seed 1)"]
    # Lines without text are not translated: the empty one, and U+0000 alone.
    assert progress.total == progress.n + 2 > 2
    assert checks[0].found == "the same for 40 lines and 57 hostile strings"
    numbers = made.report()["line_numbers"]
    assert (len(numbers), made.report()["sentences"]) == (10, 10)
    assert numbers == sorted(set(numbers))
    assert numbers != list(range(1, 11))
    lines = settings.source.read_text(encoding="utf-8").splitlines()
    assert made.dev.sources == [lines[number - 1] for number in numbers]
    peer = CTranslate2Peer(settings.out, CPU, made.tokenizer, made.info)
    assert peer.translate(made.dev.sources) == made.outputs
    again = dataclasses.replace(settings, out=settings.out.with_name("again"))
    assert run(again)[0].dev.numbers == numbers


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_leaves_nothing(number: signal.Signals, make_settings: Make) -> None:
    class Ended(Watched):
        def set_description_str(self, name: str) -> None:
            if name == "our beam search":
                assert len(list(settings.out.parent.iterdir())) == 2
                signal.raise_signal(number)

    settings = make_settings(to="ctranslate2")
    # A shell that runs the tests in the background has SIGINT ignored.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with pytest.raises(SystemExit if number == signal.SIGTERM else KeyboardInterrupt):
        run(settings, Ended())
    assert list(settings.out.parent.iterdir()) == []
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_lines_that_ours_would_split_are_left_out(make_settings: Make) -> None:
    """A comparison of fewer lines is a caution."""
    settings = make_settings(to="ctranslate2", lines=22)
    lines = settings.source.read_text(encoding="utf-8").splitlines()
    lines[3], lines[5], lines[7] = "  ", "a " * 200, "\u200b\u00ad"
    settings.source.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    made, checks = run(settings)
    assert made.dev.numbers == [number for number in range(1, 23) if number not in (4, 6, 8)]
    assert [(check.name, check.state) for check in checks[:2]] == [("dev text", "warn"), ("token ids", "ok")]
    assert checks[0].found == "only 19 lines were compared, so rare differences may be missed"
    card = (settings.out / "README.md").read_text(encoding="utf-8")
    assert "| dev text | **Caution:** only 19 lines were compared" in card
    settings.source.write_text(" \n" * 22, encoding="utf-8")
    other = dataclasses.replace(settings, out=settings.out.with_name("folder") / "other")
    refused(other, r"^--src has 22 lines, all of them blank or too long: pass other text")


def test_what_is_there_stays(make_settings: Make) -> None:
    settings = make_settings(to="hf")
    settings.out.mkdir(parents=True)
    (settings.out / "mine").write_text("mine")
    with pytest.raises(UserError, match="exists: choose another name, or remove it"):
        run(settings)
    assert [path.name for path in settings.out.parent.rglob("*")] == ["out", "mine"]


DIRECTIONS = (
    Direction(source_language="en", target_language="de", tags=("<2de>",)),
    Direction(source_language="de", target_language="en", tags=("<2en>", "<bt>")),
)


@pytest.mark.usefixtures("distant")
@pytest.mark.parametrize(
    ("to", "more", "message"),
    [
        ("hf", {"directions": DIRECTIONS}, "choose one of en-de, de-en with --direction"),
        ("hf", {"changes": {"norm": "pre"}}, "MarianMTModel does not support norm = 'pre'"),
        ("hf", {"changes": {"norm_epsilon": 1e-6}}, "MarianMTModel does not support norm_epsilon = 1e-06"),
        ("hf", {"changes": {"positions": "learned"}}, "MarianMTModel does not support positions = 'learned'"),
        ("hf", {"changes": {"head_width": 4}}, "MarianMTModel has no separate head width"),
        ("hf", {"changes": {"attention": "distant"}}, "MarianMTModel does not support attention = 'distant'"),
        ("ctranslate2", {"changes": {"attention": "distant"}}, "CTranslate2 supports only softmax attention"),
        ("ctranslate2", {"changes": {"head_width": 4}}, "CTranslate2 has no separate head width"),
    ],
)
def test_what_a_library_cannot_express_is_refused(
    to: str, more: dict[str, object], message: str, make_settings: Make
) -> None:
    refused(make_settings(to=to, **more), message)


def test_a_library_that_is_missing(make_settings: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dist_transformer.export.libraries.find_spec", lambda name: None)
    message = r"^transformers is not installed: in the clone, pip install -e '.\[export\]'$"
    refused(make_settings(to="hf"), message)


def test_a_quantization_without_effect_is_refused(make_settings: Make) -> None:
    with pytest.raises(UserError, match=r"^quantization int8 is for CTranslate2: pass --to ctranslate2"):
        make_settings(to="hf", quantization="int8")


@pytest.mark.parametrize("to", ["hf", "ctranslate2"])
def test_one_direction_of_a_model_with_tags(to: str, make_settings: Make) -> None:
    """The exported tokenizer puts the tags in front, so that its user needs to know nothing of them."""
    settings = make_settings(to=to, directions=DIRECTIONS, direction="de-en")
    # An empty folder gives its place.
    settings.out.mkdir(parents=True)
    made = run_through(settings)
    state = json.loads((settings.out / "tokenizer.json").read_text(encoding="utf-8"))
    names = [next(iter(entry.values()))["id"] for entry in state["post_processor"]["single"]]
    assert names == ["<2en>", "<bt>", "A", "</s>"]
    card = (settings.out / "README.md").read_text(encoding="utf-8")
    assert "puts `<2en> <bt>` in front of every text" in card
    if to == "hf":
        generation = json.loads((settings.out / "generation_config.json").read_text(encoding="utf-8"))
        assert generation["suppress_tokens"] == [0, 1, 2, 4, 5, 6]
    else:
        assert 'suppress_sequences=[["<pad>"], ["<s>"], ["<2de>"], ["<2en>"], ["<bt>"]]' in card
    assert len(made.outputs) == 20


def test_forgotten_tags_are_found(make_settings: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = tokenizer_files.whole_tokenizer
    monkeypatch.setattr(tokenizer_files, "whole_tokenizer", lambda one, tags, **more: whole(one, tags[1:], **more))
    settings = make_settings(to="hf", directions=DIRECTIONS, direction="de-en")
    assert refused(settings, r"was not written, .*\(token ids\)") == ["token ids"]
