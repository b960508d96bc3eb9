"""Several directions in one mixture: distinguished by tags, each with its validation set, mixed by temperature."""

import itertools
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from dist_transformer.base.errors import UserError
from dist_transformer.config.directions import Direction
from dist_transformer.config.presets import PRESETS
from dist_transformer.config.settings import TrainConfig
from dist_transformer.data.folder.reader import DataFolder
from dist_transformer.data.loading.loader import TrainingData, open_training_data
from dist_transformer.data.prepare.pipeline import prepare
from dist_transformer.data.prepare.settings import PrepareSettings
from dist_transformer.data.text.pairs import line_files

Prepare = Callable[..., Path]


@pytest.fixture(scope="module")
def make(toy_data: DataFolder, tmp_path_factory: pytest.TempPathFactory) -> Prepare:
    """Prepares toy text of one direction with one vocabulary that has three tags."""
    folder, text = tmp_path_factory.mktemp("directions"), toy_data.path / "text"
    learned: list[Path] = []

    def build(name: str, source: str, target: str, *tags: str, split: str = "valid", languages: str = "") -> Path:
        files = [text / f"{split}.{language}" for language in (source, target)]
        source_language, _, target_language = (languages or f"{source}-{target}").partition("-")
        vocabulary = {"tokenizer": learned[0]} if learned else {"vocab_size": 400, "tags": ("<bt>", "<2de>", "<2en>")}
        settings = PrepareSettings(
            out=folder / name,
            sources=tuple(line_files([files[0]], [files[1]])),
            source_language=source_language,
            target_language=target_language,
            source_tags=tags,
            valid_pairs=10,
            **vocabulary,
        )
        prepare(settings, lambda _: None)
        learned.append(folder / name / "tokenizer.json")
        return folder / name

    return build


@pytest.fixture(scope="module")
def folders(make: Prepare) -> dict[str, Path]:
    return {
        "en-de": make("en-de", "en", "de", "<2de>", split="train"),
        "back": make("back", "en", "de", "<2de>", "<bt>"),
        "de-en": make("de-en", "de", "en", "<2en>"),
        "fr-en": make("fr-en", "de", "en", "<2en>", languages="fr-en"),
        "de-en untagged": make("de-en untagged", "de", "en"),
        "en-de untagged": make("en-de untagged", "en", "de"),
        "en-fr like en-de": make("en-fr like en-de", "en", "de", "<2de>", languages="en-fr"),
    }


def open_data(*places: Path, **settings: object) -> TrainingData:
    config: TrainConfig = PRESETS["tiny"].changed(data=tuple(map(str, places)), run_dir=Path("run"), **settings)
    return open_training_data(config.corpora, config.batch, seed=config.seed)


def test_the_first_folder_of_a_direction_has_its_tags_and_validation_set(folders: dict[str, Path]) -> None:
    data = open_data(folders["en-de"], folders["back"], folders["de-en"], folders["fr-en"])
    assert data.directions == (
        Direction(source_language="en", target_language="de", tags=("<2de>",)),
        Direction(source_language="de", target_language="en", tags=("<2en>",)),
        Direction(source_language="fr", target_language="en", tags=("<2en>",)),
    )
    assert [folder.path.name for folder in data.of_directions] == ["en-de", "de-en", "fr-en"]


def test_batches_have_the_tags_of_their_corpus(folders: dict[str, Path]) -> None:
    """`<bt>` is 4, `<2de>` 5 and `<2en>` 6."""
    data = open_data(folders["en-de"], folders["de-en"], data_weights=(1.0, 1.0))
    pairs = data.folders[0].train.info.pairs
    packs = next(data.plan.steps(data.plan.start(), 4)).packs
    for pack in (packs[number : number + 1] for number in range(4)):
        batch = data.collator.build(pack)
        tokens, offsets = batch.source.tokens_T.numpy(), batch.source.offsets_N.numpy()
        firsts = tokens[offsets[: len(pack.pair_ids)]]
        assert set(firsts.tolist()) == {5 if pack.pair_ids[0] < pairs else 6}


@pytest.mark.parametrize(
    ("names", "problem"),
    [
        (("en-de untagged", "de-en untagged"), "is en-de and .* is de-en, but both have no tags, so a model"),
        (("en-de", "de-en", "en-fr like en-de"), "is en-de and .* is en-fr, but both have the same tags .<2de>., so a"),
    ],
)
def test_directions_that_no_tag_tells_apart_are_refused(
    folders: dict[str, Path], names: tuple[str, ...], problem: str
) -> None:
    with pytest.raises(UserError, match=problem) as caught:
        open_data(*(folders[name] for name in names))
    assert str(caught.value).endswith("prepare them with another --src-tag each")


@pytest.mark.parametrize("names", [("en-de untagged", "en-de"), ("en-de untagged", "de-en"), ("de-en", "fr-en")])
def test_one_target_language_needs_no_tags(folders: dict[str, Path], names: tuple[str, ...]) -> None:
    """Or a tag on one side only."""
    assert len(open_data(*(folders[name] for name in names)).folders) == 2


def test_frequencies_of_a_temperature_by_hand(folders: dict[str, Path]) -> None:
    """T = 5 draws corpora of m and n target tokens as m^(1/5) to n^(1/5)."""
    places = folders["en-de"], folders["de-en"]
    large, small = (DataFolder.open(place).index.train.target_tokens for place in places)
    assert large > 8 * small
    for temperature, share in ((1, small / (large + small)), (5, 1 / (1 + (large / small) ** 0.2)), (1e9, 0.5)):
        data = open_data(*places, data_temperature=temperature)
        steps = list(itertools.islice(data.plan.steps(data.plan.start(), 4), 60))
        first_id = data.folders[0].train.info.pairs
        tokens = np.zeros(2)
        for pack in (pack for step in steps for pack in step.packs if pack is not None):
            tokens[int(pack.pair_ids[0] >= first_id)] += pack.target_tokens
        assert tokens[1] / tokens.sum() == pytest.approx(share, abs=0.01)
