"""The flags that every command refuses."""

from pathlib import Path

import pytest

from dist_transformer.base.errors import UserError
from dist_transformer.cli import demo
from dist_transformer.cli.parser import make_parser


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--model a --model b", "--model appears twice"),
        ("--model=a --model=a", "--model appears twice"),
        ("-m a --model b", "--model appears twice"),
        ("--src a b --src c", "--src appears twice: pass it once, with all its values"),
        ("--folder a --folder b", "--folder appears twice"),
    ],
)
def test_a_flag_that_is_given_twice_is_refused(words: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    parser = make_parser("Test.")
    parser.add_argument("--model", "-m", type=Path)
    parser.add_argument_group("text").add_argument("--src", nargs="+")
    parser.add_mutually_exclusive_group().add_argument("--folder")
    parser.add_argument("--tag", action="append")
    # Parses share nothing, and a list of single values may grow.
    for _ in range(2):
        assert parser.parse_args(["--src", "a", "b", "--tag", "c", "--tag", "d"]).src == ["a", "b"]
    with pytest.raises(SystemExit) as ended:
        parser.parse_args(words.split())
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


def test_a_path_that_no_file_can_have_is_refused() -> None:
    parser = make_parser("Test.")
    parser.add_argument_group("files").add_argument("--src", nargs="+", type=Path)
    assert parser.parse_args(["--src", "a b", "ü"]).src == [Path("a b"), Path("ü")]
    for path, said in (("", "is empty"), ("\udcff", "not UTF-8")):
        with pytest.raises(UserError, match=said):
            parser.parse_args(["--src", "a", path])


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--lines 1" + "0" * 5000, "invalid"),
        ("--lines 1.5", "invalid"),
        ("--hours 1,5", "invalid"),
    ],
)
def test_a_number_that_nothing_can_have_is_refused(words: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    parser = make_parser("Test.")
    parser.add_argument("--lines", type=int)
    parser.add_argument_group("time").add_argument("--hours", type=float)
    taken = parser.parse_args(["--lines", "-3", "--hours", "2.5"])
    assert (taken.lines, taken.hours) == (-3, 2.5)
    with pytest.raises(SystemExit):
        parser.parse_args(words.split())
    assert said in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize("count", ["0", "-1", "1025", "1099511627775", "1e3", "nan"])
def test_a_number_that_other_commands_get_is_refused_before_they_start(
    count: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for flag in ("--processes", "--train-pairs", "--average"):
        monkeypatch.setattr("sys.argv", ["demo", f"{flag}={'-1' if flag == '--train-pairs' else count}"])
        with pytest.raises(SystemExit) as ended:
            demo.parse_arguments()
        assert ended.value.code == 2
        assert f"argument {flag}: " in capsys.readouterr().err
