"""The command line of any dataclass of settings: what every command takes and refuses."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest

from dist_transformer.base.errors import UserError
from dist_transformer.config.command_line import Page, parse, read_keywords
from dist_transformer.config.schema import FLAT, FlagRules, setting


@dataclass(frozen=True, kw_only=True, slots=True)
class Search:
    """Search."""

    beam: int = 4
    """Hypotheses."""
    hours: float | None = None
    """Longest time."""

    def __post_init__(self) -> None:
        if self.beam < 1:
            raise UserError(f"beam is {self.beam}: it must be 1 or more")


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """Text to read."""

    folder: Path = setting(position=True)
    """Folder to read."""
    src: tuple[Path, ...] = ()
    """Texts."""
    form: Literal["text", "tsv"] = "text"
    """Form of the texts."""
    source_tags: tuple[str, ...] = setting((), flag="src_tag")
    """Tags in front of the texts."""
    verify: bool = False
    """Check it first."""
    program: str | None = setting(None, program=True)
    """Program to run."""
    made: Path | None = setting(None, python_only=True)
    """Folder of text that was made."""
    search: Annotated[Search, FLAT]


def parsed(*words: object, rules: FlagRules | None = None) -> Settings:
    return parse(Settings, Page(text="Test."), rules=rules, words=[str(word) for word in words])


def test_flags_become_a_dataclass() -> None:
    words = ["--src", "a", "b", "--form", "tsv", "--src-tag", "<2de>", "--verify", "--beam", "3", "--hours", "2.5"]
    expected = Settings(
        folder=Path("f"),
        src=(Path("a"), Path("b")),
        form="tsv",
        source_tags=("<2de>",),
        verify=True,
        search=Search(beam=3, hours=2.5),
    )
    # Parses share nothing.
    for place in (["f", *words], ["--folder", "f", *words], [*words, "--local_rank=1", "--folder=f"]):
        assert parsed(*place) == expected
    assert parsed("--local_rank", "1", "f", *words) == parsed("f", *words, "--local-rank=1") == expected
    assert parsed("f", "--no-verify", "--hours", "None") == Settings(folder=Path("f"), search=Search())


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("f --beam 2 --beam 3", "--beam appears twice: pass it once, with all its values"),
        ("f --beam=2 --beam=2", "--beam appears twice"),
        ("f --src a b --src c", "--src appears twice"),
        ("f --verify --no-verify", "--verify appears twice"),
        ("f --folder f", "--folder is given twice, once without the flag: pass it once"),
        ("", "--folder is missing: pass it; see pytest --help"),
        ("f g", "unrecognized arguments: g; see pytest --help"),
        ("f --beam 1" + "0" * 5000, "--beam is '10000"),
        ("f --beam 1.5", "--beam is '1.5': it must be a whole number"),
        ("f --hours 1,5", "--hours is '1,5': it must be a number"),
        ("f --beam", "--beam needs a value; see pytest --help"),
        ("f --beam 0", "--beam is 0: it must be 1 or more"),
        ("f --form tvs", "--form tvs is unknown: did you mean tsv?"),
        ("f --form", "--form needs a value: choose one of text, tsv"),
        ("f --made a", "--made is not a flag here: "),
    ],
)
def test_what_is_wrong_is_said(words: str, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["pytest"])
    with pytest.raises(UserError) as refused:
        parsed(*words.split())
    assert str(refused.value).startswith(said)


def test_a_path_that_no_file_can_have_is_refused() -> None:
    assert parsed("f", "--src", "a b", "ü").src == (Path("a b"), Path("ü"))
    for path, said in (("", "is empty"), ("\udcff", "not UTF-8")):
        for words in (["f", "--src", "a", path], [path]):
            with pytest.raises(UserError, match=said):
                parsed(*words)


def test_a_file_has_the_names_of_fields_and_of_flags(tmp_path: Path) -> None:
    for line in ("src_tag: [a]", "source_tags: [a]", "src_tag: a"):
        (tmp_path / "a.yaml").write_text(f"folder: f\nbeam: 2\n{line}\n")
        settings = parsed("--config", tmp_path / "a.yaml", "--beam", 3)
        assert settings == Settings(folder=Path("f"), source_tags=("a",), search=Search(beam=3))
    for text, said in (
        ("folder: f\nbeam: 0\n", r"^beam in \S*b.yaml \(line 2\) is 0: it must be 1 or more$"),
        ("folder: f\nsrc_tag: [a]\nsource_tags: [b]\n", r"b.yaml has source_tags twice, under two names: remove one$"),
        ("folder: ''\n", "^a path is empty"),
        ("folder: f\nmade: g\n", r"b.yaml, line 2, made is not a setting here"),
    ):
        (tmp_path / "b.yaml").write_text(text)
        with pytest.raises(UserError, match=said):
            parsed("--config", tmp_path / "b.yaml")


def test_printed_settings_can_be_read_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Although they have all settings, also those without effect."""
    words, rules = ["f", "--src", "a", "--beam", "3"], FlagRules(conflicts={("--src", "--hours"): "alas"})
    with pytest.raises(SystemExit) as ended:
        parsed(*words, "--print-config", rules=rules)
    assert not ended.value.code
    (tmp_path / "a.yaml").write_text(capsys.readouterr().out)
    assert parsed("--config", tmp_path / "a.yaml", rules=rules) == parsed(*words)
    with pytest.raises(UserError, match=r"^--src has no effect with --hours, alas: leave --src or --hours out$"):
        parsed("--config", tmp_path / "a.yaml", "--hours", "2", rules=rules)


def test_keywords_have_what_only_python_states() -> None:
    keywords: dict[str, Any] = {"folder": "f", "src": "a", "src_tag": ["b"], "made": Path("m"), "program": "mine"}
    expected = Settings(
        folder=Path("f"), src=(Path("a"),), source_tags=("b",), made=Path("m"), program="mine", search=Search()
    )
    assert read_keywords(Settings, keywords, "read").build(Settings) == expected
    with pytest.raises(UserError, match=r"^in read, folders is not a setting here: did you mean folder\?$"):
        read_keywords(Settings, {"folders": "f"}, "read")
