"""Every flag that names a text refuses what cannot be read as a whole, and leaves nothing."""

import io
import lzma
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from dist_transformer.base.errors import UserError
from dist_transformer.cli import average, evaluate, export, prepare, score, translate
from tests.averaging.conftest import save

PREPARE = ("--src-lang", "en", "--tgt-lang", "de", "--vocab-size", 400, "--out", "OUT")
FIELDS = ("--src-field", "en", "--tgt-field", "de")
SEARCH = ("--model", "MODEL", "--beam", 2, "--max-extra-tokens", 1, "--device", "cpu")
TEXTS = ("--src", "TEXT", "--tgt", "TEXT2")
# BAD is the flag's file, TEXT and TEXT2 are of as many lines.
CASES: list[tuple[Callable[[], None], tuple[object, ...]]] = [
    (prepare.main, ("--src", "BAD", "--tgt", "TEXT", *PREPARE)),
    (prepare.main, ("--src", "TEXT", "--tgt", "BAD", *PREPARE)),
    (prepare.main, ("--tsv", "BAD", *PREPARE)),
    (prepare.main, ("--jsonl", "BAD", *FIELDS, *PREPARE)),
    (prepare.main, (*TEXTS, "--valid-src", "BAD", "--valid-tgt", "TEXT", *PREPARE)),
    (prepare.main, (*TEXTS, "--valid-src", "TEXT", "--valid-tgt", "BAD", *PREPARE)),
    (translate.main, ("--input", "TEXT", "BAD", "--output", "OUT", *SEARCH)),
    (translate.main, ("--prefix", "BAD", *SEARCH)),
    (translate.main, ("--closest-to", "BAD", *SEARCH)),
    (translate.main, ("--input", "TEXT", "--output", "OUT", "--prefix", "BAD", *SEARCH)),
    (evaluate.main, ("--src", "BAD", "--ref", "TEXT", "--json", "OUT", *SEARCH)),
    (evaluate.main, ("--src", "TEXT", "--ref", "TEXT2", "BAD", "--json", "OUT", *SEARCH)),
    (evaluate.main, ("--hypotheses", "TEXT", "BAD", "--ref", "TEXT", "--tgt-lang", "de", "--json", "OUT")),
    (score.main, ("--src", "BAD", "--tgt", "TEXT", "--model", "MODEL", "--out", "OUT", "--device", "cpu")),
    (score.main, ("--src", "TEXT", "--tgt", "BAD", "--model", "MODEL", "--out", "OUT", "--device", "cpu")),
    (export.main, ("--src", "BAD", "--ref", "TEXT", "--to", "hf", "--model", "MODEL", "--out", "OUT")),
    (average.main, ("--run-dir", "RUN", "--sweep", "1", "--src", "TEXT", "--ref", "BAD", "--out", "OUT")),
]


@pytest.mark.parametrize(("main", "words"), CASES, ids=[f"{main.__module__} {words}" for main, words in CASES])
def test_what_cannot_be_read_as_a_whole(
    main: Callable[[], None],
    words: tuple[object, ...],
    model_folder: Path,
    run: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    bad, text = tmp_path / "bad.xz", b'{"en": "a\\tb", "de": "c"}\t\n' * 200
    bad.write_bytes(lzma.compress(text[: len(text) // 2]) + b"not xz" + lzma.compress(text[len(text) // 2 :]))
    expected = f"{bad} is not a complete .xz file (after line "
    files = {"BAD": bad, "TEXT": tmp_path / "text", "TEXT2": tmp_path / "text2"}
    for name in ("text", "text2"):
        (tmp_path / name).write_bytes(text)
    if main is average.main:
        save(run, 1)
    places = {"OUT": tmp_path / "new" / "out", "MODEL": model_folder, "RUN": run, **files}
    # A command changes what signals do, for a process of its own.
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setattr(sys, "argv", ["x", *(str(places.get(str(word), word)) for word in words)])
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BufferedReader(io.BytesIO(text))))
    with pytest.raises((UserError, SystemExit)) as caught:
        main()
    said = capsys.readouterr()
    # Where ranks work together, the first one prints it.
    assert (
        (str(caught.value) if isinstance(caught.value, UserError) else said.err)
        .removeprefix("error: ")
        .startswith(expected)
    )
    assert "OUT" in words or not said.out
    assert not list(places["OUT"].parent.glob("**/*"))
