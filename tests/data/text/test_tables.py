from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dist_transformer.base.errors import TransientError, UserError
from dist_transformer.data.text import tables
from dist_transformer.data.text.files import PairSource
from dist_transformer.data.text.lines import LONGEST_LINE
from dist_transformer.data.text.tables import HubDataset, ParquetFile


def write(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


def refusal(source: PairSource) -> str:
    with pytest.raises(UserError) as caught:
        list(source.pairs())
    return str(caught.value)


def table(path: Path, columns: dict[str, Any], **options: Any) -> ParquetFile:
    pq.write_table(pa.table(columns), path, **options)
    return ParquetFile(path=path, source_field="en", target_field="de")


def test_parquet_with_two_columns(tmp_path: Path) -> None:
    rows = 2_500
    english = [f"number {i}" for i in range(rows)]
    german: list[str | None] = [f"Nummer\n{i}" for i in range(rows)]
    german[7] = None
    columns = {"id": range(rows), "de": german, "en": pa.array(english).dictionary_encode()}
    source = table(tmp_path / "t.parquet", columns, row_group_size=999)
    pairs = list(source.pairs())
    assert [pair[0] for pair in pairs] == english
    assert [pair[1] for pair in pairs] == [f"Nummer {i}" if i != 7 else "" for i in range(rows)]
    assert (source.name, source.languages, source.files()) == ("t.parquet", ("en", "de"), [tmp_path / "t.parquet"])


def test_parquet_with_a_translation_column(tmp_path: Path) -> None:
    rows = [{"de": "eins", "en": "one", "fr": "un"}, None, {"de": None, "en": "three", "fr": ""}]
    source = table(tmp_path / "t.parquet", {"translation": rows, "id": [1, 2, 3]})
    assert list(source.pairs()) == [("one", "eins"), ("", ""), ("three", "")]
    dotted = ParquetFile(path=source.path, source_field="translation.en", target_field="translation.de")
    assert list(dotted.pairs()) == list(source.pairs())
    assert dotted.languages == ("en", "de")


def test_a_parquet_file_is_read_a_piece_at_a_time(tmp_path: Path) -> None:
    # One row group of 60 MB of text that does not compress: the first pairs come before a fifth of it is in memory.
    text = [f"{i * 7919 % 1_000_003:07}" * 100 for i in range(40_000)]
    columns = {"en": text, "de": text[::-1]}
    source = table(tmp_path / "t.parquet", columns, row_group_size=40_000, compression="none", use_dictionary=False)
    del columns
    before = pa.total_allocated_bytes()
    pairs = source.pairs()
    assert next(pairs) == (text[0], text[-1])
    assert pa.total_allocated_bytes() - before < 12_000_000
    assert sum(1 for _ in pairs) == 39_999


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"en": ["a"], "fr": ["b"]}, 'has no column "de" (it has en, fr): name the columns with --src-field'),
        ({"translation": [{"en": "a", "nl": "b"}]}, 'has no column "de" (it has translation, translation.en, '),
        ({"en": ["a"], "de": [1]}, 'the column "de" must hold strings, not int64'),
        ({"en": ["a"], "translation": [1]}, 'has no column "de" (it has en, translation)'),
    ],
)
def test_wrong_columns_are_named(tmp_path: Path, columns: dict[str, Any], message: str) -> None:
    assert message in refusal(table(tmp_path / "t.parquet", columns))


def test_damaged_and_missing_parquet_files_are_named(tmp_path: Path) -> None:
    rows = [str(i) for i in range(5_000)]
    source = table(tmp_path / "t.parquet", {"en": rows, "de": rows}, row_group_size=1_000, use_dictionary=False)
    content = source.path.read_bytes()
    write(source.path, content[:-100])
    assert "t.parquet is not a complete Parquet file of UTF-8 text (after row 0: " in refusal(source)
    # The last row group is overwritten, the footer is not.
    write(source.path, content[: len(content) // 2] + bytes(range(256)) * 20 + content[len(content) // 2 + 5_120 :])
    assert "t.parquet is not a complete Parquet file of UTF-8 text (after row " in refusal(source)
    source.path.unlink()
    assert refusal(source) == f"{source.path} does not exist: check the name"
    source.path.mkdir()
    assert f"{source.path} " in refusal(source)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    datasets.disable_progress_bars()
    (tmp_path / "set").mkdir()
    return tmp_path / "set"


def hub_source(folder: Path, **changes: Any) -> HubDataset:
    return HubDataset(**{"dataset": str(folder), "source_language": "en", "target_language": "de", **changes})


@pytest.mark.parametrize("streaming", [False, True])
def test_hub_dataset_with_a_translation_column(hub: Path, streaming: bool) -> None:
    rows = [{"translation": {"de": f"Nummer {i}", "en": f"number {i}"}} for i in range(1_001)]
    datasets.Dataset.from_list(rows).to_parquet(hub / "train.parquet")
    datasets.Dataset.from_list(rows[:3]).to_parquet(hub / "validation.parquet")
    pairs = list(hub_source(hub, streaming=streaming).pairs())
    assert len(pairs) == 1_001
    assert pairs[1_000] == ("number 1000", "Nummer 1000")
    assert len(list(hub_source(hub, streaming=streaming, split="validation").pairs())) == 3
    assert 'has no language "fr" (it has de, en)' in refusal(hub_source(hub, streaming=streaming, target_language="fr"))
    message = refusal(hub_source(hub, streaming=streaming, split="nosuch"))
    assert "split nosuch) cannot be loaded" in message
    assert "--dataset-split" in message


@pytest.mark.parametrize("streaming", [False, True])
def test_hub_dataset_with_a_column_a_language(hub: Path, streaming: bool) -> None:
    write(hub / "train.jsonl", b'{"en": "a\\nb", "de": "c", "n": 1}\n{"en": null, "de": "d", "n": 2}\n')
    assert list(hub_source(hub, streaming=streaming).pairs()) == [("a b", "c"), ("", "d")]
    message = refusal(hub_source(hub, streaming=streaming, target_language="fr"))
    assert 'neither a column "fr" nor a column "translation" (it has en, de, n)' in message
    assert 'the texts of "n" must be strings, not int' in refusal(
        hub_source(hub, streaming=streaming, target_language="n")
    )


@pytest.mark.parametrize("streaming", [False, True])
def test_every_word_of_a_csv_file_is_text(hub: Path, streaming: bool) -> None:
    words = ["NA", "null", "nan", "N/A", "None", "1.50", "True", "", "1e3"]
    write(
        hub / "train.csv",
        "".join(f"{line}\n" for line in ("en,de,n", *(f"{word},{word},1" for word in words))).encode(),
    )
    assert list(hub_source(hub, streaming=streaming).pairs()) == [(word, word) for word in words]


def test_a_revision_is_asked_for_and_recorded(hub: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def load_dataset(*_: Any, revision: str | None, **others: Any) -> datasets.Dataset:
        asked.append((revision, others.get("name"), others.get("data_dir")))
        return datasets.Dataset.from_list([{"en": "a", "de": "b"}])

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    monkeypatch.setattr(datasets, "load_dataset_builder", lambda *_, **__: SimpleNamespace(config=None))
    source = hub_source(hub, dataset="owner/set", config="de-en", revision="1f2e3d")
    assert list(source.pairs()) == [("a", "b")]
    assert source.name == "owner/set@1f2e3d/train"
    assert hub_source(hub, dataset="owner/set").name == "owner/set/train"
    # The branch of the hub's converter has folders in place of configurations.
    list(hub_source(hub, dataset="owner/set", config="de-en", revision="refs/convert/parquet").pairs())
    assert asked == [("1f2e3d", "de-en", None), ("refs/convert/parquet", None, "de-en")]


@pytest.mark.parametrize("streaming", [False, True])
def test_the_hubs_parquet_branch_has_a_folder_per_configuration(hub: Path, streaming: bool) -> None:
    """Two configurations, as the hub's converter lays out iwslt2017: only the rows of the chosen one are read."""
    for config, languages in (("set-de-en", ("de", "en")), ("set-en-fr", ("en", "fr"))):
        for split in ("train", "validation"):
            rows = [{"translation": {lang: f"{lang} {split} {i}" for lang in languages}} for i in range(2)]
            (hub / config / split).mkdir(parents=True)
            datasets.Dataset.from_list(rows).to_parquet(hub / config / split / "0000.parquet")
    source = hub_source(hub, config="set-de-en", revision="refs/convert/parquet", streaming=streaming)
    assert list(source.pairs()) == [("en train 0", "de train 0"), ("en train 1", "de train 1")]
    message = refusal(hub_source(hub, config="set-en-nl", revision="refs/convert/parquet", streaming=streaming))
    assert "(config set-en-nl, split train) cannot be loaded" in message


def test_a_dataset_with_a_loading_script_is_refused_with_the_fix(hub: Path) -> None:
    write(hub / "set.py", b"raise SystemExit('nobody runs this')\n")
    assert refusal(hub_source(hub, config="set-de-en")) == (
        f'dataset "{hub}" is made by a loading script, which the datasets library does not run: '
        "read the hub's copy as Parquet files with --dataset-revision refs/convert/parquet"
    )


def test_texts_above_the_limit_make_a_pair_none(tmp_path: Path) -> None:
    rows = [
        {"en": "a", "de": "b"},
        {"en": "ü" * (LONGEST_LINE // 2 + 1), "de": "b"},
        {"en": "a" * LONGEST_LINE, "de": "b"},
    ]
    datasets.Dataset.from_list(rows).to_parquet(tmp_path / "t.parquet")
    source = ParquetFile(path=tmp_path / "t.parquet", source_field="en", target_field="de")
    assert [pair and len(pair[0]) for pair in source.pairs()] == [1, None, LONGEST_LINE]


def test_a_stream_that_breaks_off_can_be_tried_again(hub: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "_BATCH_ROWS", 10)
    rows = "".join(f'{{"en": "a", "de": "{i}"}}\n' for i in range(30))
    write(hub / "train-0.jsonl", rows.encode())
    write(hub / "train-1.jsonl", b"{broken\n")
    source = hub_source(hub, streaming=True)
    pairs = []
    with pytest.raises(TransientError, match=r"failed after row 30 .*: run the same command again, which resumes"):
        pairs += source.pairs()
    assert source.files() == [hub / "train-0.jsonl", hub / "train-1.jsonl"]
