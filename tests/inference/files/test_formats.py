import json

import pytest

from dist_transformer.inference.files.formats import OutputFormat, add_noise
from dist_transformer.inference.translator import ScoredText, Translation

BLANK = Translation(hypotheses=(ScoredText(text="", score=0.0, tokens=()),))
TWO = Translation(
    hypotheses=(
        ScoredText(text='gut\tund "süß"', score=-0.12345678, tokens=(5,)),
        ScoredText(text="gut", score=-2.0, tokens=(6,)),
    )
)


@pytest.mark.parametrize(
    ("nbest", "two", "blank"),
    [
        (None, 'gut\tund "süß"\n', "\n"),
        ("moses", '7 ||| gut\tund "süß" ||| -0.123457\n7 ||| gut ||| -2.000000\n', "7 |||  ||| 0.000000\n"),
        ("tsv", '7\t0\t-0.123457\tgut und "süß"\n7\t1\t-2.000000\tgut\n', "7\t0\t0.000000\t\n"),
        (
            "jsonl",
            '{"line": 7, "translations": [{"text": "gut\\tund \\"süß\\"", "score": -0.123457}, '
            '{"text": "gut", "score": -2.0}]}\n',
            '{"line": 7, "translations": [{"text": "", "score": 0.0}]}\n',
        ),
    ],
)
def test_lines_of_each_format(nbest: str | None, two: str, blank: str) -> None:
    output = OutputFormat(nbest=nbest)
    assert output.text_of(7, TWO) == two
    assert output.text_of(7, BLANK) == blank


def test_json_gives_back_the_texts() -> None:
    row = json.loads(OutputFormat(nbest="jsonl").text_of(0, TWO))
    assert [one["text"] for one in row["translations"]] == [one.text for one in TWO.hypotheses]


def test_noise_goes_by_seed_and_line() -> None:
    words = Translation(hypotheses=(ScoredText(text="a b c d e f g h", score=-1.0, tokens=()),))
    found = [OutputFormat(noise_seed=seed).text_of(line, words) for seed in (0, 1) for line in (0, 1)]
    assert found == [f"{add_noise('a b c d e f g h', seed=seed, line=line)}\n" for seed in (0, 1) for line in (0, 1)]
    assert OutputFormat(noise_seed=0).text_of(3, BLANK) == "\n"
