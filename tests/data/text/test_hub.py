from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import pytest

from dist_transformer.base.errors import TransientError
from dist_transformer.data.text import tables
from dist_transformer.data.text.lines import LONGEST_LINE
from dist_transformer.data.text.tables import HubDataset
from tests.data.text.reading import refusal, write


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")
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
    assert f'the texts of "n" in dataset "{hub}" must be strings, not int' in refusal(
        hub_source(hub, streaming=streaming, target_language="n")
    )


@pytest.mark.parametrize(
    ("read", "left_out"),
    [
        (["x.jsonl", "x2.jsonl"], ["y.parquet"]),
        (["train-0.jsonl"], ["part-1.jsonl"]),
        (["train/x.jsonl", "test/x.jsonl"], ["extra/x.jsonl.gz", "y.csv"]),
    ],
)
def test_a_folder_of_which_a_part_would_be_read_is_refused(hub: Path, read: list[str], left_out: list[str]) -> None:
    row = b'{"en": "a", "de": "b"}\n'
    for name in (*read, "README.md", "LICENSE.txt", "dataset_infos.json", ".git/x.json", "__pycache__/x.json"):
        (hub / name).parent.mkdir(exist_ok=True)
        write(hub / name, b"{}" if name == "dataset_infos.json" else row)
    whole = len([name for name in read if "test" not in name])
    assert len(list(hub_source(hub).pairs())) == whole
    for name in left_out:
        (hub / name).parent.mkdir(exist_ok=True)
        write(hub / name, row)
    assert refusal(hub_source(hub)).startswith(
        f'the datasets library reads {len(read)} of the data files in "{hub}" and leaves out {len(left_out)} '
        f"({', '.join(sorted(left_out))}), because"
    )
    write(hub / "README.md", f"---\nconfigs:\n- config_name: default\n  data_files: {read[0]}\n---\n".encode())
    assert len(list(hub_source(hub).pairs())) == 1


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


def test_a_text_above_the_limit_is_left_out(hub: Path) -> None:
    rows = f'{{"en": "a", "de": "{"x" * (LONGEST_LINE + 1)}"}}\n', '{"en": "ü 😀", "de": "c"}\n' * 2
    write(hub / "train.jsonl", "".join(rows).encode())
    assert list(hub_source(hub).pairs()) == [None, *[("ü 😀", "c")] * 2]
