"""The parts of a sweep; the whole of it is in test_average_tool.py."""

import json
from pathlib import Path

import pytest

from dist_transformer.averaging.sweep import describe_steps, validation_text
from dist_transformer.base.errors import UserError
from dist_transformer.base.files import sha256_of
from dist_transformer.data.folder.reader import DataFolder
from dist_transformer.evaluation.evaluate import read_test_set


def test_the_dev_set_is_the_validation_text_of_the_run(toy_data: DataFolder, tmp_path: Path) -> None:
    sha256 = sha256_of(toy_data.path / "index.json")
    settings = tmp_path / "config.json"
    settings.write_text(json.dumps({"data": [str(toy_data.path), "x"], "data_sha256": [sha256, ""]}))
    assert tuple(read_test_set(*validation_text(tmp_path))) == tuple(toy_data.valid_text())
    settings.write_text(json.dumps({"data": [str(toy_data.path)], "data_sha256": [sha256[::-1]]}))
    with pytest.raises(UserError, match=r"is not the one that .* was trained on: pass --src and --ref"):
        validation_text(tmp_path)
    for lost in ({}, {"data": ["x"]}):
        settings.write_text(json.dumps(lost))
        with pytest.raises(UserError, match=r"config\.json does not name the training data: pass --src and --ref"):
            validation_text(tmp_path)
    for place in ("s3://bucket/data", str(tmp_path / "gone")):
        settings.write_text(json.dumps({"data": [place], "data_sha256": [sha256]}))
        with pytest.raises(UserError, match=f"validated on text of {place}, which is not available: pass --src and"):
            validation_text(tmp_path)


def test_steps_in_words() -> None:
    assert describe_steps([7]) == "7"
    assert describe_steps([5, 7]) == "5, 7"
    assert describe_steps([5, 7, 9]) == "5 to 9, 2 apart"
    assert describe_steps([5, 7, 10]) == "5, 7, 10"
