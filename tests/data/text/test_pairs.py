import bz2
import functools
import gzip
import io
import json
import lzma
import os
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest
from backports import zstd

from dist_transformer.base.errors import UserError
from dist_transformer.data.text.lines import LONGEST_LINE, read_lines, read_stream
from dist_transformer.data.text.pairs import JsonlFile, LineFiles, TsvFile, expand, language_of, line_files
from dist_transformer.data.text.tables import ParquetFile
from tests.data.text.reading import refusal, write


def test_only_newline_ends_a_line(tmp_path: Path) -> None:
    text = "a\x0bb\x0cc\x85d\u2028e\u2029f\x1cg\n\nsecond\rhalf\r\n last "
    path = write(tmp_path / "t.en", text.encode())
    assert list(read_lines(path)) == ["a\x0bb\x0cc\x85d\u2028e\u2029f\x1cg", "", "second\rhalf", " last "]


def test_byte_order_mark_is_removed_at_the_start_of_the_file_only(tmp_path: Path) -> None:
    path = write(tmp_path / "t.en", "\ufeffone\n\ufefftwo\n".encode())
    assert list(read_lines(path)) == ["one", "\ufefftwo"]


PACKERS: dict[str, Callable[[bytes], bytes]] = {
    ".gz": gzip.compress,
    ".xz": lzma.compress,
    ".bz2": bz2.compress,
    # As the program zstd does.
    ".zst": functools.partial(zstd.compress, options={zstd.CompressionParameter.checksum_flag: 1}),
}
ALL = ["ein", "zwei ü", "drei"]


@pytest.mark.parametrize("suffix", PACKERS)
def test_compressed_files_read_as_plain_ones(tmp_path: Path, suffix: str) -> None:
    first, second = PACKERS[suffix]("ein\nzwei ü\n".encode()), PACKERS[suffix](b"drei")
    assert list(read_lines(write(tmp_path / f"t.en{suffix}", first))) == ALL[:2]
    for between in (b"", PACKERS[suffix](b"")):
        assert list(read_lines(write(tmp_path / f"t.en{suffix}", first + between + second))) == ALL


@pytest.mark.parametrize("suffix", PACKERS)
def test_all_of_a_compressed_file_is_read_or_it_is_refused(tmp_path: Path, suffix: str) -> None:
    first, second = PACKERS[suffix]("ein\nzwei ü\n".encode()), PACKERS[suffix](b"drei")
    flipped = second[:-6] + bytes([second[-6] ^ 255]) + second[-5:]
    damaged = {
        "empty": b"",
        "zeros alone": bytes(64),
        "cut": first[:-6],
        "later part cut": first + second[:-6],
        "later part begun": first + second[:5],
        "later part damaged": first + flipped,
        "other bytes between": first + b"\r\n" + second,
        "other bytes at the end": first + b"<html>502 Bad Gateway</html>",
        "a kind of its own between": first + (gzip.compress(b"") if suffix != ".gz" else lzma.compress(b"")) + second,
    }
    # gzip and xz let zero bytes follow a part: gzip any number, xz multiples of four.
    for zeros, allowed in ((1, (".gz",)), (4, (".gz", ".xz")), (2**17, (".gz", ".xz"))):
        for place, after in (("between", second), ("at the end", b"")):
            if suffix in allowed:
                padded = write(tmp_path / f"t{suffix}", first + bytes(zeros) + after)
                assert list(read_lines(padded)) == (ALL if after else ALL[:2]), (zeros, place)
            else:
                damaged[f"{zeros} zeros {place}"] = first + bytes(zeros) + after
    for name, content in damaged.items():
        with pytest.raises(UserError) as caught:
            print(name, list(read_lines(write(tmp_path / f"t{suffix}", content))))
        assert str(caught.value).startswith(f"{tmp_path}/t{suffix} is not a complete {suffix} file (after line "), name


def test_a_pipe_is_refused_before_it_is_opened(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    fields = {"path": tmp_path / "pipe", "source_field": "en", "target_field": "de"}
    plain = write(tmp_path / "t", b"a\n")
    for source in (
        LineFiles(source=plain, target=tmp_path / "pipe"),
        TsvFile(path=tmp_path / "pipe"),
        JsonlFile(**fields),
        ParquetFile(**fields),
        # The name of a pipe of a shell, in a process to which it was not passed.
        TsvFile(path=Path("/dev/fd/9999")),
    ):
        name = source.files()[-1]
        assert refusal(source) == (
            f"{name} is a pipe or a device, and texts are read more than once: write it to a file first"
        )


def test_line_files_pair_line_by_line(tmp_path: Path) -> None:
    sources = line_files(
        [write(tmp_path / "a.en", b"1\n2\n"), write(tmp_path / "b.en", b"3")],
        [write(tmp_path / "a.de", b"eins\r\nzwei"), write(tmp_path / "b.de", b"drei\n")],
    )
    assert [list(source.pairs()) for source in sources] == [[("1", "eins"), ("2", "zwei")], [("3", "drei")]]
    assert sources[0].languages == ("en", "de")


@pytest.mark.parametrize(("source_lines", "target_lines"), [(5, 2), (2, 5), (0, 1), (1, 0)])
def test_misaligned_files_are_refused_with_both_counts(tmp_path: Path, source_lines: int, target_lines: int) -> None:
    source = write(tmp_path / "a.en", b"x\n" * source_lines)
    target = write(tmp_path / "a.de", b"y\n" * target_lines)
    message = refusal(LineFiles(source=source, target=target))
    assert f"{source} and {target} must have the same number of lines ({source_lines} and {target_lines}):" in message


def test_unpaired_files_are_refused() -> None:
    with pytest.raises(UserError, match=r"2 source files \(a, b\) and 1 target files \(c\)"):
        line_files([Path("a"), Path("b")], [Path("c")])
    with pytest.raises(UserError, match="a is both source and target: pass the file of the other language"):
        line_files([Path("a")], [Path("a")])


def test_invalid_utf8_is_refused_with_file_and_line(tmp_path: Path) -> None:
    path = write(tmp_path / "latin.de", "gut\nGrün\n".encode("latin-1"))
    with pytest.raises(UserError, match=r"latin\.de line 2 is not UTF-8 \(byte 0xfc at position 2\): convert .*CP1252"):
        list(read_lines(path))


def test_missing_and_unreadable_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"none\.en does not exist"):
        list(read_lines(tmp_path / "none.en"))
    with pytest.raises(UserError, match="cannot be read"):
        list(read_lines(tmp_path))


def test_tsv_columns(tmp_path: Path) -> None:
    path = write(tmp_path / "t.tsv", b'"a\tb"\t7\nc\td\t8\n')
    assert list(TsvFile(path=path).pairs()) == [('"a', 'b"'), ("c", "d")]
    assert list(TsvFile(path=path, source_column=2, target_column=0).pairs()) == [("7", '"a'), ("8", "c")]
    assert "t.tsv line 1 has 3 tab-separated columns, but 4 are needed" in refusal(TsvFile(path=path, target_column=3))
    blank = write(tmp_path / "blank.tsv", b"\na\tb\n \r\n\t\nc\td\n\n")
    assert list(TsvFile(path=blank).pairs()) == [("", ""), ("a", "b"), ("", ""), ("", ""), ("c", "d"), ("", "")]
    for row, columns in ((b"c\td\te\n", 3), (b"c\n", 1)):
        uneven = write(tmp_path / "uneven.tsv", b"a\tb\n" + row)
        assert f"uneven.tsv line 2 has {columns} tab-separated columns, but the first row has 2" in refusal(
            TsvFile(path=uneven)
        )
    with pytest.raises(UserError, match="TSV columns 0 and -1"):
        TsvFile(path=path, target_column=-1)


def test_jsonl_fields_and_line_breaks(tmp_path: Path) -> None:
    rows = [{"en": "a\nb\r\nc", "de": "ä\u2028", "id": 1}, {"en": "", "de": "d"}]
    content = "\n\n".join(json.dumps(row) for row in rows) + "\n"
    source = JsonlFile(path=write(tmp_path / "t.jsonl", content.encode()), source_field="en", target_field="de")
    # The blank line between them is counted as empty.
    assert list(source.pairs()) == [("a b c", "ä\u2028"), ("", ""), ("", "d")]
    assert source.languages == ("en", "de")


@pytest.mark.parametrize("field", ["{}", "translation.{}"])
def test_jsonl_fields_within_others(tmp_path: Path, field: str) -> None:
    path = write(tmp_path / "t.jsonl", b'{"id": 1, "translation": {"en": "a", "de": "b"}}\n')
    source = JsonlFile(path=path, source_field=field.format("en"), target_field=field.format("de"))
    assert list(source.pairs()) == [("a", "b")]
    assert source.languages == ("en", "de")
    wrong = JsonlFile(path=path, source_field=field.format("en"), target_field=field.format("fr"))
    assert f'no field "{field.format("fr")}" (it has id, translation, translation.en, translation.de)' in refusal(wrong)


def test_a_field_name_may_have_dots(tmp_path: Path) -> None:
    path = write(tmp_path / "t.jsonl", b'{"a.b": "x", "c.d": {"e": {"f": "y"}}}\n')
    assert list(JsonlFile(path=path, source_field="a.b", target_field="c.d.e.f").pairs()) == [("x", "y")]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"{", "line 2 is not JSON"),
        (b"[1]", "line 2 is not a JSON object"),
        (b'{"en": "x", "de": "y", "en": "z"}', "line 2 is not JSON (an object has the name 'en' twice)"),
        (
            b'{"en": "x", "de": "y", "more": [{"l": {"k": 1, "k": 2}}]}',
            "line 2 is not JSON (an object has the name 'k' twice)",
        ),
        (b'{"en": "x", "fr": "y"}', 'line 2 has no field "de" (it has en, fr)'),
        (b'{"en": "x", "de": null}', 'line 2 has NoneType in field "de", not a string'),
        (b'{"en": "x", "de": "\\ud800"}', "line 2 holds half of a surrogate pair"),
    ],
)
def test_bad_jsonl_is_refused_with_file_and_line(tmp_path: Path, line: bytes, message: str) -> None:
    path = write(tmp_path / "t.jsonl", b'{"en": "x", "de": "y"}\n' + line + b"\n")
    assert f"{path} {message}" in refusal(JsonlFile(path=path, source_field="en", target_field="de"))


@pytest.mark.parametrize(
    ("name", "language"),
    [
        ("train.en", "en"),
        ("train.de.gz", "de"),
        ("train.tok.zh.xz", "zh"),
        ("train.pt-BR", "pt-BR"),
        ("train.en_XX", "en_XX"),
        ("flores.zho_Hans", "zho_Hans"),
        ("ui.zh-Hans-CN.gz", "zh-Hans-CN"),
        ("train.src", None),
        ("train.tgt.gz", None),
        ("corpus.txt", None),
    ],
)
def test_language_of_a_file_name(name: str, language: str | None) -> None:
    assert language_of(Path("folder.fr") / name) == language


def test_patterns_stand_for_the_files_they_match(tmp_path: Path) -> None:
    for name in ("p2.en", "p10.en", "p1.en", "p1.de", "odd[1].en"):
        write(tmp_path / name, b"x\n")
    (tmp_path / "deep/er").mkdir(parents=True)
    write(tmp_path / "deep/er/p3.en", b"x\n")

    def found(*patterns: str) -> list[str]:
        return [str(path.relative_to(tmp_path)) for path in expand([tmp_path / name for name in patterns], "--src")]

    assert found("p*.en", "p1.de") == ["p1.en", "p10.en", "p2.en", "p1.de"]
    assert found("**/p3.en") == ["deep/er/p3.en"]
    # A file of that very name is that file, and a plain name that is missing is named when it is read.
    assert found("odd[1].en", "none.en") == ["odd[1].en", "none.en"]
    with pytest.raises(UserError, match=r'--src ".*/q\*\.en" matches no file: check the pattern'):
        found("p1.en", "q*.en")


LONG, LIMIT = "a" * (LONGEST_LINE + 1), "ü" * (LONGEST_LINE // 2)


@pytest.mark.parametrize("end", ["\n", "\r\n", ""])
def test_a_line_up_to_the_limit_is_read_and_a_longer_one_is_refused_by_its_number(tmp_path: Path, end: str) -> None:
    assert list(read_lines(write(tmp_path / "a", f"x\n{LIMIT}{end}".encode()))) == ["x", LIMIT]
    with pytest.raises(UserError, match=r"b line 2 has more than 1,048,576 bytes: split it"):
        list(read_lines(write(tmp_path / "b", f"x\n{LONG}{end}".encode())))


def test_pairs_with_a_long_line_are_none(tmp_path: Path) -> None:
    source = write(tmp_path / "t.en", f"a\n{LONG}\nc\nd\n".encode())
    target = write(tmp_path / "t.de", f"A\nB\n{LONG * 5}\nD\n".encode())
    pairs = LineFiles(source=source, target=target)
    assert list(pairs.pairs()) == [("a", "A"), None, None, ("d", "D")]
    with pytest.raises(UserError, match=r"t\.de, line 2 has more than"):
        list(pairs.whole_pairs())
    tsv = TsvFile(path=write(tmp_path / "t.tsv", f"a\tb\n{LONG}\tx\nc\td\n".encode()))
    assert list(tsv.pairs()) == [("a", "b"), None, ("c", "d")]
    lines = "".join(json.dumps({"s": text, "t": "t"}) + "\n" for text in ("a", LONG, "c"))
    jsonl = JsonlFile(path=write(tmp_path / "t.jsonl", lines.encode()), source_field="s", target_field="t")
    assert list(jsonl.pairs()) == [("a", "t"), None, ("c", "t")]


@pytest.mark.parametrize("suffix", PACKERS)
def test_a_bomb_takes_little_memory(tmp_path: Path, suffix: str) -> None:
    bomb = write(tmp_path / f"t{suffix}", PACKERS[suffix](b"a" * 2**27))
    tracemalloc.start()
    pairs = list(LineFiles(source=bomb, target=write(tmp_path / "t", b"x\n")).pairs())
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert pairs == [None]
    assert peak < 2**24


TEXT = "Ein Satz.\nNoch ein Satz.\n"
# Content under a name, and what the error says of it.
FOREIGN = [
    ("t.de", TEXT.encode("utf-16"), "is text in UTF-16, not plain text in UTF-8: convert it with iconv -f UTF-16 -t"),
    ("t.de", TEXT.encode("utf-16-le"), "iconv -f UTF-16LE -t UTF-8"),
    ("t.de", TEXT.encode("utf-16-be"), "iconv -f UTF-16BE -t UTF-8"),
    ("t.de", TEXT.encode("utf-32"), "iconv -f UTF-32 -t UTF-8"),
    ("t.de", gzip.compress(b"x"), "is a gzip file, not plain text in UTF-8: rename it so that its name ends in .gz"),
    ("t.de", zstd.compress(b"x"), "rename it so that its name ends in .zst"),
    ("t.de.bz2", gzip.compress(b"x"), "is a gzip file, not a .bz2 file: rename it so that its name ends in .gz"),
    ("t.de.zst", b"plain\n", "is not a complete .zst file"),
    ("t.de.gz", gzip.compress(gzip.compress(b"x")), "contains a gzip file, not plain text in UTF-8: unpack it"),
    (
        "t.zip",
        b"PK\x03\x04\x14\0",
        "is a zip archive or a document in one, such as .docx, not plain text",
    ),
    ("t.7z", b"7z\xbc\xaf\x27\x1c\0\4", "is a 7z archive"),
    ("t.tar.gz", gzip.compress(b"t.de".ljust(257, b"\0") + b"ustar\0" + b"00"), "contains a tar archive"),
    ("t.de", b"%PDF-1.7\n%\xe2\xe3\n", "is a PDF document, not plain text in UTF-8: extract its text"),
    ("t.de", b"PAR1\x15\x04", "is a Parquet file, not plain text in UTF-8: pass it to prepare with --parquet"),
    ("t.tmx", b'<?xml version="1.0"?>\n<tmx version="1.4">', "is a document in XML, SGML or HTML, such as TMX"),
    ("t.de", b'\xef\xbb\xbf\n <tmx version="1.4">\n<body>', "such as TMX, not plain text in UTF-8: pass TMX to pr"),
    ("t.de.gz", gzip.compress(b"<!DOCTYPE html>\n<title>x"), "contains a document in XML, SGML or HTML"),
    ("t.de.sgm", b'<srcset setid="newstest2014" srclang="any">\n', "is a document in XML, SGML or HTML"),
    ("t.de", b"eins\rzwei\rdrei", "has lines that end in CR alone, as on the old Mac, and no LF: convert it"),
]


@pytest.mark.parametrize(("name", "content", "message"), FOREIGN, ids=range(len(FOREIGN)))
def test_what_is_not_text_is_named_with_its_remedy(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    path = write(tmp_path / name, content)
    with pytest.raises(UserError) as caught:
        list(read_lines(path))
    assert str(caught.value).startswith(f"{path} ")
    assert message in str(caught.value)
    if not name.endswith((".gz", ".bz2", ".zst")):
        with pytest.raises(UserError, match=r"standard input (is|has) "):
            list(read_stream(io.BufferedReader(io.BytesIO(content)), "standard input"))


@pytest.mark.parametrize(
    "content",
    [
        *(b"", b"\n", b"a\r", b"a\r\n", b"a\rb\n", b"\0\n", b"\0\0 x", b"PAR1 is a word\n"),
        *(b"<b>bold</b>\n<html>\n", b"<2de> word\n", b"<xml> and <tmx-like> are tags\n", b"< ?xml\n"),
    ],
)
def test_odd_text_is_text(tmp_path: Path, content: bytes) -> None:
    lines = [line.removesuffix("\r") for line in content.decode().removesuffix("\n").split("\n")] if content else []
    assert list(read_lines(write(tmp_path / "t", content))) == lines


def test_a_zstandard_window_that_is_too_large_is_refused(tmp_path: Path) -> None:
    compressor = zstd.ZstdCompressor(options={zstd.CompressionParameter.window_log: 28})
    packed = compressor.compress(b"a" * 2**20)
    with pytest.raises(UserError, match=r"t\.zst is not a complete \.zst file .*too much memory"):
        list(read_lines(write(tmp_path / "t.zst", packed)))


@pytest.mark.parametrize(
    ("sources", "targets", "wrong", "right"),
    [
        ("a.en b.en", "b.de a.de", "b.de", "a.de"),
        ("x.en a.en.gz b.eng_Latn", "x.de b.deu_Latn a.de.gz", "b.deu_Latn", "a.de.gz"),
        ("x/train.en y/train.en", "y/train.de x/train.de", "y/train.de", "x/train.de"),
        ("a.en b.en", "a.de b.de", None, None),
        ("a.en b.en", "c.de d.de", None, None),
        # Two translations of the same sources.
        ("a.en a.en", "b.de a.de", None, None),
        ("en/1.txt en/2.txt", "de/1.txt de/2.txt", None, None),
    ],
)
def test_targets_in_another_order_are_refused(sources: str, targets: str, wrong: str | None, right: str | None) -> None:
    ours, theirs = (list(map(Path, names.split())) for names in (sources, targets))
    if wrong is None:
        assert [(pair.source, pair.target) for pair in line_files(ours, theirs)] == list(zip(ours, theirs, strict=True))
        return
    with pytest.raises(UserError, match=f"would be paired with {wrong}, but {right} is given, too: pass the target"):
        line_files(ours, theirs)
