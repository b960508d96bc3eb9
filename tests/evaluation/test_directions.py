"""A model folder of two directions, wherever it is decoded: every source begins with the tags of the chosen one."""

from pathlib import Path

import pytest
import torch

import dist_transformer
from dist_transformer.base.errors import UserError
from dist_transformer.config.command_line import read_keywords
from dist_transformer.config.directions import Direction
from dist_transformer.data.vocabulary.byte_bpe import learn_byte_bpe
from dist_transformer.data.vocabulary.kinds import load_vocabulary
from dist_transformer.evaluation.evaluate import Evaluation, evaluate
from dist_transformer.evaluation.settings import EvaluateSettings
from dist_transformer.inference import translator
from dist_transformer.inference.beam import beam_search
from dist_transformer.inference.decoding import Decoding, ExactLoading
from dist_transformer.model.transformer import Transformer
from dist_transformer.model_folder import ModelInfo, write_model_folder
from dist_transformer.serving.models import load_models
from tests.support.tiny import tiny_config

CPU = torch.device("cpu")
SHORT = Decoding(max_extra_tokens=3)


@pytest.fixture(scope="module")
def folder(toy_lines: tuple[list[str], list[str]], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Untrained; `<2de>` is 4 and `<2en>` is 5."""
    tokenizer = learn_byte_bpe([*toy_lines[0], *toy_lines[1]], vocab_size=400, tags=("<2de>", "<2en>"))
    config = tiny_config(vocab_size=tokenizer.vocab_size)
    torch.manual_seed(3)
    model = Transformer(config)
    info = ModelInfo(
        model=config,
        tokenizer_sha256=tokenizer.sha256,
        source_language="en",
        target_language="de",
        directions=(
            Direction(source_language="en", target_language="de", tags=("<2de>",)),
            Direction(source_language="de", target_language="en", tags=("<2en>",)),
        ),
        corpus="toy grammar",
        synthetic=True,
        steps=(1,),
    )
    path = tmp_path_factory.mktemp("both") / "model"
    write_model_folder(path, info=info, weights=dict(model.state_dict()), tokenizer_json=tokenizer.content)
    return path


@pytest.fixture
def read_by_the_model(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    seen: list[list[int]] = []

    def watched(model, sources, **settings):  # type: ignore[no-untyped-def]
        seen.extend(list(source) for source in sources)
        return beam_search(model, sources, **settings)

    monkeypatch.setattr(translator, "beam_search", watched)
    return seen


@pytest.mark.parametrize(("tags", "prefix"), [(None, [5]), (["<2de>", "<2en>"], [4, 5]), ([], [])])
def test_an_evaluation_reads_the_tags_of_its_direction(
    folder: Path, tmp_path: Path, read_by_the_model: list[list[int]], tags: list[str] | None, prefix: list[int]
) -> None:
    source, reference = tmp_path / "s", tmp_path / "r"
    source.write_text("Ein Hund.\n")
    reference.write_text("A dog.\n")

    def evaluated(**way: object) -> Evaluation:
        values = {"model": folder, "src": source, "ref": reference, "max_extra_tokens": 3, **way}
        return evaluate(read_keywords(EvaluateSettings, values, "test").build(EvaluateSettings), device=CPU)

    found = evaluated(direction="de-en", tags=tags)
    text = load_vocabulary(folder / "tokenizer.json").encode("Ein Hund.")
    assert read_by_the_model == [[*prefix, *text]]
    report = found.report(tmp_path / "h")
    assert (report["direction"], report["tags"]) == ("de-en", ["<2en>"] if tags is None else tags)
    with pytest.raises(UserError, match="choose one of en-de, de-en with --direction"):
        evaluated()


def test_a_served_model_reads_and_shows_them(folder: Path, read_by_the_model: list[list[int]]) -> None:
    (model,) = load_models([[folder]], ExactLoading(direction="de-en"), SHORT, CPU)
    shown = model.translate("Ein Hund.")
    assert read_by_the_model[0][0] == 5
    assert shown["source_pieces"][0] == "<2en>"
    assert (shown["source_language"], shown["target_language"]) == ("de", "en")
    with pytest.raises(UserError, match="choose one of en-de, de-en with --direction"):
        load_models([[folder]], ExactLoading(), SHORT, CPU)


def test_a_model_in_python_faces_one_direction(folder: Path) -> None:
    model = dist_transformer.load(folder, device="cpu", direction="de-en")
    assert model.attention("Ein Hund.", "A dog.").source[0] == "<2en>"
    untagged = dist_transformer.load(folder, device="cpu", direction="de-en", tags=[])
    assert untagged.attention("Ein Hund.", "A dog.").source[0] != "<2en>"
    (tagged_score,), (plain_score,) = (one.score(["Ein Hund."], ["A dog."]) for one in (model, untagged))
    assert tagged_score.tokens == plain_score.tokens
    assert tagged_score.log_probability != plain_score.log_probability
    assert model.translate("Ein Hund.", max_extra_tokens=3) != untagged.translate("Ein Hund.", max_extra_tokens=3)
    with pytest.raises(UserError, match="choose one of en-de, de-en with --direction"):
        dist_transformer.load(folder, device="cpu")
