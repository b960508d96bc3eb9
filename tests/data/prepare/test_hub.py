"""A dataset of the hub that a loading script makes: its copy as Parquet files, over HTTP from a local stand-in."""

import sys
from pathlib import Path

import datasets
import pytest

from dist_transformer.data.folder.reader import DataFolder
from tests.conftest import run_command
from tests.hub_server import DATASET, serve_hub


@pytest.mark.system
def test_a_dataset_with_a_script_is_read_from_the_hubs_parquet_branch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The branch has two configurations; only the texts of the chosen one come."""
    main, converted = tmp_path / "main", tmp_path / "converted"
    main.mkdir()
    (main / f"{DATASET.rpartition('/')[2]}.py").write_text("raise SystemExit('nobody runs this')\n")
    for config, languages in (("talks-en-zh", ("en", "zh")), ("talks-en-fr", ("en", "fr"))):
        for split, pairs in (("train", 30), ("validation", 5)):
            rows = [
                {"translation": {language: f"{language} {split} {i}" for language in languages}} for i in range(pairs)
            ]
            (converted / config / split).mkdir(parents=True)
            datasets.Dataset.from_list(rows).to_parquet(converted / config / split / "0000.parquet")
    command: list[object] = [sys.executable, "tools/prepare_data.py", "--dataset", DATASET, "--dataset-config"]
    command += ["talks-en-zh", "--src-lang", "en", "--tgt-lang", "zh", "--vocab-size", 300, "--out", tmp_path / "data"]
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    with serve_hub({"main": main, "refs/convert/parquet": converted}) as url:
        monkeypatch.setenv("HF_ENDPOINT", url)
        refusal = run_command(*command, status=1).splitlines()[-1]
        run_command(*command, "--dataset-revision", "refs/convert/parquet", "--dataset-valid-split", "validation")
    assert refusal.startswith(
        f'error: dataset "{DATASET}" is made by a loading script, which the datasets library does '
    )
    assert refusal.endswith("read the hub's copy as Parquet files with --dataset-revision refs/convert/parquet")
    folder = DataFolder.open(tmp_path / "data")
    assert (folder.index.train.pairs, folder.index.corpus) == (30, f"{DATASET}@refs/convert/parquet/train")
    assert (tmp_path / "data" / "valid" / "target.txt").read_text("utf-8").splitlines() == [
        f"zh validation {i}" for i in range(5)
    ]
