"""Folders of M2M100 and NLLB become model folders that give the same outputs, and go back as they came."""

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

from dist_transformer.base.errors import UserError
from dist_transformer.data.vocabulary.kinds import load_vocabulary
from dist_transformer.data.vocabulary.m2m100 import M2M100Vocabulary
from dist_transformer.data.vocabulary.tokenizer import EOS_ID
from dist_transformer.export import gate
from dist_transformer.export.checked_export import export_model
from dist_transformer.export.libraries import ExportSettings
from dist_transformer.importing import checked_import, m2m100_folder
from dist_transformer.inference.decoding import Decoding
from dist_transformer.inference.scoring import score_ids, score_pairs
from dist_transformer.inference.translator import Translator
from dist_transformer.model_folder import load_model, read_model_info
from dist_transformer.run.layout import read_records
from tests.conftest import ROOT, run_command, run_ranks
from tests.importing.marian_folders import CPU, SILENT, Lines, run
from tests.support.m2m100 import MODEL_FILE, SURPLUS, write_folder

TAGS = {"m2m100": ("__en__", "__de__"), "nllb": ("eng_Latn", "deu_Latn")}
LINES = ["The cat sleeps.", "A man sees the old house in a park.", "They sing"]


@pytest.fixture(scope="module", params=TAGS)
def family(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def folder(family: str, toy_lines: Lines, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("theirs") / family
    write_folder(path, [*toy_lines[0], *toy_lines[1]], family)
    return path


@pytest.fixture(scope="module")
def ours(folder: Path) -> Path:
    out = folder.with_name(f"{folder.name}-ours")
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(gate, "COMPARED_LINES", 30)
        run(folder, out)
    return out


def translator_of(path: Path, tags: tuple[str, ...], **settings: Any) -> Translator:
    model, vocabulary, _ = load_model(path, CPU)
    return Translator(model, vocabulary, CPU, Decoding(**settings), tags=tags)


def their_greedy(folder: Path, tags: tuple[str, ...], lines: list[str]) -> list[str]:
    """Translate with the library alone, by its own names of the languages."""
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForSeq2SeqLM.from_pretrained(folder)
    tokenizer.src_lang = tags[0].strip("_")
    inputs = tokenizer(lines, padding=True, return_tensors="pt")
    inputs["decoder_input_ids"] = torch.tensor([[2, tokenizer.convert_tokens_to_ids(tags[1])]] * len(lines))
    rows = model.config.vocab_size
    never = [token for token in (*tokenizer.all_special_ids, *range(rows - 2, rows)) if token != tokenizer.eos_token_id]
    search = {"num_beams": 1, "max_new_tokens": 4, "suppress_tokens": never, "forced_bos_token_id": None}
    found = model.generate(**inputs, **search)
    return [text.strip() for text in tokenizer.batch_decode(found, skip_special_tokens=True)]


def test_a_folder_becomes_a_model_that_translates_alike(family: str, folder: Path, ours: Path, tmp_path: Path) -> None:
    names = [check.name for check in run(folder, tmp_path / "again")]
    assert names == ["surplus rows", "token ids", "decoding", "log-probabilities", "greedy search"]
    info, tags = read_model_info(ours), TAGS[family]
    assert info.direction.tags == tags
    assert info.direction.name == "-".join(tag.strip("_") for tag in tags)
    assert (info.model.first_position, info.model.begin_with_end, info.model.norm) == (2, True, "pre")
    rows = json.loads((folder / "config.json").read_text())["vocab_size"]
    assert info.model.vocab_size == rows - SURPLUS
    # Both directions, though the folder names one. The language counts as a token.
    for way in (tags, tags[::-1]):
        theirs = their_greedy(folder, way, LINES)
        # The most probable token at every step; a beam of 1 may also end with the second one.
        translator = translator_of(ours, way, sample=True, top_k=1)
        cut = [translator.tokenizer.target.decode(one.hypotheses[0].tokens[:5]) for one in translator.translate(LINES)]
        assert cut == theirs
    assert len(set(theirs)) == len(LINES)


def test_the_language_is_given_to_search_samples_prefixes_and_scores(family: str, ours: Path) -> None:
    tags = TAGS[family]
    first = translator_of(ours, tags).tokenizer.target.tag_ids(tags[1:])
    for settings in ({"beam": 3, "nbest": 3}, {"sample": True, "nbest": 2}, {"beam": 2, "repetition_penalty": 1.2}):
        for translation in translator_of(ours, tags, **settings).translate(LINES):
            for one in translation.hypotheses:
                assert [token for token in one.tokens if token in (*first, *range(4))] == first
    translator = translator_of(ours, tags, beam=2)
    begun = translator.translate(LINES, prefixes=["Die al", "", "Ein"])
    assert begun[0].text.startswith("Die al")
    assert begun[2].text.startswith("Ein")
    assert begun[1].text == translator.translate(LINES)[1].text
    # The score of a hypothesis is the probability of what follows the language; its length counts the language.
    best = begun[1].hypotheses[0]
    pair = (translator.source_ids(LINES[1]), list(best.tokens))
    (scored,) = score_ids(translator.model, [pair], given=1, device=CPU)
    assert scored.tokens == (*best.tokens[1:], EOS_ID)
    assert best.score == pytest.approx(scored.log_probability / ((5 + len(best.tokens) + 1) / 6) ** 0.6, rel=1e-5)
    line, text = [LINES[1]], [best.text]
    (again,) = score_pairs(translator.model, translator.tokenizer, line, text, device=CPU, tags=tags)
    assert again.tokens == (*translator.tokenizer.target.encode(best.text), EOS_ID)


def test_two_codes_are_the_tags_of_a_direction(family: str, ours: Path) -> None:
    vocabulary, tags = load_vocabulary(ours / "tokenizer.json"), TAGS[family]
    assert isinstance(vocabulary, M2M100Vocabulary)
    assert vocabulary.tags_between(*(tag.strip("_") for tag in tags)) == tags
    assert vocabulary.fronts(tags) == tuple([number] for number in vocabulary.source.tag_ids(tags))
    with pytest.raises(UserError, match="the vocabulary has no language xx: name one of"):
        vocabulary.tags_between("xx", tags[1])
    with pytest.raises(UserError, match=f"needs two tags, the codes of both languages, not {tags[0]}: pass two of"):
        vocabulary.fronts(tags[:1])
    # Text that spells a language stays text.
    assert not {*vocabulary.source.encode(tags[0])} & {*vocabulary.source.tag_ids(tags)}


def test_it_goes_back_as_it_came(family: str, folder: Path, ours: Path, tmp_path: Path) -> None:
    export_model(ExportSettings(model=ours, to="hf", out=tmp_path / "hf"), CPU, progress=SILENT, show=list)
    for file in folder.iterdir():
        if file.name not in ("config.json", "generation_config.json", "model.safetensors"):
            assert (tmp_path / "hf" / file.name).read_bytes() == file.read_bytes(), file.name
    before, after = (safetensors.torch.load_file(path / "model.safetensors") for path in (folder, tmp_path / "hf"))
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        assert torch.equal(after[name], tensor[: len(tensor) - SURPLUS] if "shared" in name else tensor), name
    classes = {json.loads((path / "config.json").read_text())["architectures"][0] for path in (folder, tmp_path / "hf")}
    assert classes == {"M2M100ForConditionalGeneration"}
    assert their_greedy(tmp_path / "hf", TAGS[family], LINES) == their_greedy(folder, TAGS[family], LINES)


def test_another_direction_changes_only_the_languages_of_the_tokenizer(
    family: str, folder: Path, ours: Path, tmp_path: Path
) -> None:
    tags = TAGS[family][::-1]
    settings = ExportSettings(model=ours, to="hf", out=tmp_path / "hf", tags=tags)
    made = export_model(settings, CPU, progress=SILENT, show=list)
    was, is_now = (
        json.loads((path / "tokenizer_config.json").read_text(encoding="utf-8")) for path in (folder, settings.out)
    )
    languages = dict(zip(("src_lang", "tgt_lang"), (tag.strip("_") for tag in tags), strict=True))
    assert is_now == was | languages
    # The example of its card needs nothing more.
    assert run_card(settings.out, made.dev.sources[:3]) == made.outputs[:3]


def test_ctranslate2_gives_the_same_outputs(ours: Path, tmp_path: Path) -> None:
    settings = ExportSettings(model=ours, to="ctranslate2", out=tmp_path / "out")
    made = export_model(settings, CPU, progress=SILENT, show=list)
    assert [check.state for check in made.checks if check.name == "greedy search"] == ["ok"]
    assert run_card(settings.out, made.dev.sources[:3]) == made.outputs[:3]


def run_card(folder: Path, lines: list[str]) -> list[str]:
    """Run the example of a folder's card on some lines."""
    (example,) = re.findall(r"```python\n(.*?)```", (folder / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    example = example.replace('folder = "."', f"folder = {str(folder)!r}")
    example = example.replace('"A sentence.", "Another one."', ", ".join(map(repr, lines)))
    names: dict[str, Any] = {"print": lambda texts: names.update(printed=texts)}
    exec(compile(example, "card", "exec"), names)
    return [text.strip(" ") for text in names["printed"]]


def cut_out_positions(patched: pytest.MonkeyPatch) -> None:
    patched.setattr(m2m100_folder, "FIRST_POSITION", 1)


def leave_out_the_source(patched: pytest.MonkeyPatch) -> None:
    patched.setattr(M2M100Vocabulary, "fronts", lambda self, tags: ([], self.tag_ids(tags[1:])))


def leave_out_the_target(patched: pytest.MonkeyPatch) -> None:
    patched.setattr(M2M100Vocabulary, "fronts", lambda self, tags: (self.tag_ids(tags[:1]), []))


def swap_the_languages(patched: pytest.MonkeyPatch) -> None:
    patched.setattr(M2M100Vocabulary, "fronts", lambda self, tags: (self.tag_ids(tags[1:]), self.tag_ids(tags[:1])))


@pytest.mark.parametrize(
    ("plant", "rows"),
    [
        (cut_out_positions, "log-probabilities, greedy search"),
        (leave_out_the_source, "token ids"),
        (leave_out_the_target, "greedy search"),
        (swap_the_languages, "token ids, greedy search"),
    ],
)
def test_the_gate_refuses_a_wrong_model(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, plant: Any, rows: str
) -> None:
    plant(monkeypatch)
    with pytest.raises(UserError, match=rf"outputs differ from those of .*\({rows}\)"):
        run(folder, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("file", "change", "message"),
    [
        ("config.json", {"tie_word_embeddings": False}, "one embedding and an output apart from it, which"),
        ("config.json", {"scale_embedding": False}, "embeddings that are not scaled, which"),
        ("config.json", {"decoder_start_token_id": 0}, "a decoder that does not begin with </s>, which"),
        ("tokenizer_config.json", {"legacy_behaviour": True}, "legacy_behaviour, with a source's language behind"),
        ("tokenizer_config.json", {"src_lang": "xx"}, "the vocabulary has no language xx"),
        ("tokenizer_config.json", {"tgt_lang": None}, "many languages: pass two of them with --src-lang and --tgt-l"),
    ],
)
def test_what_ours_cannot_express_is_refused_by_name(
    toy_lines: Lines, tmp_path: Path, file: str, change: dict[str, object], message: str
) -> None:
    write_folder(tmp_path / "theirs", toy_lines[0], "nllb", pieces=100)
    path = tmp_path / "theirs" / file
    path.write_text(json.dumps(json.loads(path.read_text(encoding="utf-8")) | change), encoding="utf-8")
    with pytest.raises(UserError, match=re.escape(message)):
        run(tmp_path / "theirs", tmp_path / "out")


@pytest.mark.parametrize(
    ("content", "message"),
    [(None, "tokenizer.json cannot be read"), ("{}", "transformers cannot load the tokenizer of")],
)
def test_a_folder_without_a_tokenizer_is_refused(
    toy_lines: Lines, tmp_path: Path, content: str | None, message: str
) -> None:
    write_folder(tmp_path / "theirs", toy_lines[0], "nllb", pieces=100)
    path = tmp_path / "theirs" / "tokenizer.json"
    path.unlink() if content is None else path.write_text(content, encoding="utf-8")
    with pytest.raises(UserError, match=message):
        run(tmp_path / "theirs", tmp_path / "out")


def test_a_vocabulary_that_is_cut_to_a_text_splits_it_as_before(
    family: str, folder: Path, ours: Path, toy_lines: Lines, tmp_path: Path
) -> None:
    text = [*toy_lines[0][:15], *toy_lines[1][:15]]
    (tmp_path / "keep.txt").write_text("".join(f"{line}\n" for line in text), encoding="utf-8")
    shown = run(folder, tmp_path / "cut", keep_text=(tmp_path / "keep.txt",))
    whole, cut = (load_vocabulary(path / "tokenizer.json").source for path in (ours, tmp_path / "cut"))
    assert (
        shown[0].found == f"{cut.vocab_size:,} of {whole.vocab_size:,} entries, which are all that the text needs, stay"
    )
    assert len(cut.pieces) - cut.first_piece < 0.9 * (len(whole.pieces) - whole.first_piece)
    assert cut.tags == whole.tags
    for one, other in zip(whole.encode_batch(text), cut.encode_batch(text), strict=True):
        assert [whole.pieces[token] for token in one] == [cut.pieces[token] for token in other]
    # Rows of what stays are the same, and so are the logits, up to rounding.
    models = [load_model(path, CPU)[0] for path in (ours, tmp_path / "cut")]
    number = {piece: token for token, piece in enumerate(whole.pieces)}
    rows = [number[piece] for piece in cut.pieces]
    assert torch.equal(models[1].embedding, models[0].embedding[rows])
    export_model(ExportSettings(model=tmp_path / "cut", to="hf", out=tmp_path / "hf"), CPU, progress=SILENT, show=list)
    tokenizers = [AutoTokenizer.from_pretrained(path) for path in (folder, tmp_path / "hf")]
    for line in text:
        one, other = (tokenizer.convert_ids_to_tokens(tokenizer(line)["input_ids"]) for tokenizer in tokenizers)
        assert one == other
    sizes = [(path / MODEL_FILE).stat().st_size for path in (folder, tmp_path / "hf")]
    assert sizes[1] < sizes[0]


def prepared(model: Path, lines: Lines, folder: Path) -> Path:
    """Prepare text for a copy of NLLB."""
    files: list[object] = []
    for side, texts in zip(("src", "tgt"), lines, strict=True):
        (folder / side).write_text("".join(f"{text}\n" for text in texts), encoding="utf-8")
        files += [f"--{side}", folder / side]
    words = (*files, "--tokenizer", model, "--src-lang", "eng_Latn", "--tgt-lang", "deu_Latn", "--out", folder / "data")
    run_command(sys.executable, "-m", "dist_transformer", "prepare", *words)
    return folder / "data"


def train(model: Path, data: Path, run_dir: Path, *, ranks: int, stage: int, steps: int) -> list[float]:
    """Train by the preset, whose warm-up has small rates, so that rounding does not grow much; return the losses."""
    places = ("--init-from", model, "--data", data, "--run-dir", run_dir)
    batch = ("--batch.max-target-tokens", 256, "--batch.packs-per-step", 4, "--precision", "fp32")
    brief = ("--max-steps", steps, "--log-every", 1, "--validate-every", 0, "--patience", 0)
    config = ("--deepspeed-config", ROOT / "ds_configs" / f"zero{stage}.json")
    run_ranks(ranks, "-m", "dist_transformer.train", "--preset", "finetune", *places, *batch, *brief, *config)
    return [record["loss"] for record in read_records(run_dir, "train")]


@pytest.mark.slice(name="exports")
@pytest.mark.parametrize("family", ["nllb"], indirect=True)
def test_a_copy_is_trained_at_every_stage_and_given_back(ours: Path, toy_lines: Lines, tmp_path: Path) -> None:
    data, run_dir = prepared(ours, toy_lines, tmp_path), tmp_path / "run"
    for part, (ranks, stage) in enumerate([(1, 1), (2, 3), (2, 2), (1, 0)], start=1):
        found = train(ours, data, run_dir, ranks=ranks, stage=stage, steps=5 * part)
    assert found == pytest.approx(train(ours, data, tmp_path / "whole", ranks=2, stage=0, steps=20), abs=1e-5)
    model = tmp_path / "model"
    run_command(sys.executable, "-m", "dist_transformer", "average", "--run-dir", run_dir, "--last", 2, "--out", model)
    translations = translator_of(model, TAGS["nllb"]).translate(LINES)
    assert len({translation.hypotheses[0].text for translation in translations}) == len(LINES)
    for target in ("hf", "ctranslate2"):
        settings = ExportSettings(model=model, to=target, out=tmp_path / target)  # type: ignore[arg-type]
        made = export_model(settings, CPU, progress=SILENT, show=list)
        states = {check.name: check.state for check in made.checks}
        assert (states["log-probabilities"], states["greedy search"]) == ("ok", "ok")


@pytest.mark.slice(name="exports")
def test_a_network_of_the_size_of_nllb(toy_lines: Lines, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The network of 600M, with a vocabulary of 300 pieces."""
    monkeypatch.setattr(checked_import, "READ_LINES", 5)
    write_folder(tmp_path / "theirs", toy_lines[0], "nllb", layers=12, width=1024, heads=16, ffn=4096)
    run(tmp_path / "theirs", tmp_path / "ours")
