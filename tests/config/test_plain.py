"""JSON that another person or program may have written."""

from pathlib import Path

import pytest

from dist_transformer.base.errors import UserError
from dist_transformer.config.plain import read_json
from dist_transformer.config.settings import ModelConfig, TrainConfig


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[" * 100_000, "it is nested too deeply"),
        ('{"a": 1, "b": {"c": 1, "c": 2}}', "has the name 'c' twice"),
        ('{"a": "\\ud800"}', "half of a surrogate pair"),
        ('{"a": ' + "9" * 5000 + "}", "cannot be read as JSON"),
        ('{"a": 1\x00}', "cannot be read as JSON"),
    ],
    ids=lambda text: text[:20],
)
def test_hostile_json_is_refused_in_one_line(content: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    file.write_text(content)
    with pytest.raises(UserError, match=message) as refused:
        read_json(file)
    assert str(refused.value).isprintable()


def test_a_whole_pair_of_surrogates_is_a_character(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('{"a": "\\ud83d\\ude00"}')
    assert read_json(tmp_path / "a.json") == {"a": "😀"}


@pytest.mark.parametrize(
    "field", ["width", "encoder_layers", "decoder_layers", "heads", "head_width", "ffn_width", "max_positions"]
)
def test_a_model_that_no_machine_holds_is_refused(field: str) -> None:
    with pytest.raises(UserError, match=f"{field} is 1000000000: it must be at most"):
        ModelConfig(**{field: 10**9})


def test_a_number_above_64_bits_is_refused() -> None:
    with pytest.raises(UserError, match="max_steps is 1000000000000000000000: use a smaller number"):
        TrainConfig.of(data=("d",), run_dir=Path("r"), max_steps=10**21)


def test_a_message_is_one_line_whatever_a_file_holds() -> None:
    assert str(UserError("a\nb\x1b[2J\ud800\u2028 — é\xa0")) == "a\\nb\\x1b[2J\\ud800\\u2028 — é\xa0"
    assert len(str(UserError("x" * 10**6))) < 5_000
