import pytest

from dist_transformer.base.errors import UserError
from dist_transformer.config.measures import MEASURES, ValidationConfig, badness, words_of_command


def test_losses_and_edits_are_better_if_lower() -> None:
    lower = {measure for measure in MEASURES if badness(measure, 1.0) < badness(measure, 2.0)}
    higher = {measure for measure in MEASURES if badness(measure, 2.0) < badness(measure, 1.0)}
    assert (lower, higher) == ({"nll", "ter"}, {"bleu", "chrf", "command"})


def test_a_command_is_split_as_a_shell_would() -> None:
    command = "'my env/bin/comet' -s {source} --hyp={hypothesis} \"a b\""
    assert words_of_command(command) == ["my env/bin/comet", "-s", "{source}", "--hyp={hypothesis}", "a b"]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"best_by": "chrf", "validate_sentences": 0}, "best_by is 'chrf', and chrF needs sentences: set valid"),
        ({"best_by": "command"}, "best_by is 'command': set validation_command, the program that computes it"),
        (
            {"validation_command": "comet '{hypothesis}"},
            'validation_command is "comet \'{hypothesis}", which cannot be split into words (No closing quotation): cl',
        ),
        (
            {"validation_command": "comet {source}"},
            "validation_command is 'comet {source}' and has no word with {hypothesis}: write {hypothesis} where",
        ),
        ({"validation_command": ""}, "validation_command is '' and has no word with {hypothesis}: write"),
        (
            {"validation_command": "comet {hypothesis}", "validate_sentences": 0},
            "validation_command is 'comet {hypothesis}' and needs sentences: set validate_sentences above 0",
        ),
        ({"validation_command_minutes": 0.0}, "validation_command_minutes is 0.0: it must be above 0"),
    ],
)
def test_settings_that_compute_no_measure_are_refused(settings: dict[str, object], message: str) -> None:
    with pytest.raises(UserError) as refused:
        ValidationConfig(**settings)  # type: ignore[arg-type]
    assert str(refused.value).startswith(message)
