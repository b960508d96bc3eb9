import tracemalloc
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dist_transformer.data.text.lines import LONGEST_LINE
from dist_transformer.data.text.tables import ParquetFile
from tests.data.text.reading import refusal, write


def table(path: Path, columns: dict[str, Any], **options: Any) -> ParquetFile:
    pq.write_table(pa.table(columns), path, **options)
    return ParquetFile(path=path, source_field="en", target_field="de")


def test_parquet_with_two_columns(tmp_path: Path) -> None:
    rows = 2_500
    english = [f"number {i}" for i in range(rows)]
    german: list[str | None] = [f"Nummer\n{i}" for i in range(rows)]
    german[7] = None
    columns = {"id": range(rows), "de": german, "en": pa.array(english).dictionary_encode()}
    source = table(tmp_path / "t.parquet", columns, row_group_size=999)
    pairs = list(source.pairs())
    assert [pair[0] for pair in pairs] == english
    assert [pair[1] for pair in pairs] == [f"Nummer {i}" if i != 7 else "" for i in range(rows)]
    assert (source.name, source.languages, source.files()) == ("t.parquet", ("en", "de"), [tmp_path / "t.parquet"])


def test_parquet_with_a_translation_column(tmp_path: Path) -> None:
    rows = [{"de": "eins", "en": "one", "fr": "un"}, None, {"de": None, "en": "three", "fr": ""}]
    source = table(tmp_path / "t.parquet", {"translation": rows, "id": [1, 2, 3]})
    assert list(source.pairs()) == [("one", "eins"), ("", ""), ("three", "")]
    dotted = ParquetFile(path=source.path, source_field="translation.en", target_field="translation.de")
    assert list(dotted.pairs()) == list(source.pairs())
    assert dotted.languages == ("en", "de")


def test_a_parquet_file_is_read_a_piece_at_a_time(tmp_path: Path) -> None:
    # One row group of 60 MB of text that does not compress: the first pairs come before a fifth of it is in memory.
    text = [f"{i * 7919 % 1_000_003:07}" * 100 for i in range(40_000)]
    columns = {"en": text, "de": text[::-1]}
    source = table(tmp_path / "t.parquet", columns, row_group_size=40_000, compression="none", use_dictionary=False)
    del columns
    before = pa.total_allocated_bytes()
    pairs = source.pairs()
    assert next(pairs) == (text[0], text[-1])
    assert pa.total_allocated_bytes() - before < 12_000_000
    assert sum(1 for _ in pairs) == 39_999


def test_a_text_that_many_rows_share_is_not_in_memory_once_per_row(tmp_path: Path) -> None:
    shared = pa.DictionaryArray.from_arrays(pa.array([0] * 300, pa.int32()), ["word " * 200_000])
    source = table(tmp_path / "t.parquet", {"en": shared, "de": shared}, compression="zstd")
    assert (tmp_path / "t.parquet").stat().st_size < 5_000
    tracemalloc.start()
    assert sum(1 for _ in source.pairs()) == 300
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 100_000_000


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"en": ["a"], "fr": ["b"]}, 'has no column "de" (it has en, fr): name the columns with --src-field'),
        ({"translation": [{"en": "a", "nl": "b"}]}, 'has no column "de" (it has translation, translation.en, '),
        ({"en": ["a"], "de": [1]}, 'the column "de" in TABLE must hold strings, not int64'),
        ({"en": ["a"], "de": [["b"]]}, 'the column "de" in TABLE must hold strings, not list<element: string>'),
        ({"en": ["a"], "translation": [[{"de": "b"}]]}, 'has no column "de" (it has en, translation)'),
    ],
)
def test_wrong_columns_are_named(tmp_path: Path, columns: dict[str, Any], message: str) -> None:
    assert message.replace("TABLE", str(tmp_path / "t.parquet")) in refusal(table(tmp_path / "t.parquet", columns))


def test_two_columns_of_one_name_are_refused(tmp_path: Path) -> None:
    english, german = pa.array(["a"]), pa.array(["b"])
    inner = pa.StructArray.from_arrays([english, english, german], ["en", "en", "de"])
    source = ParquetFile(path=tmp_path / "t.parquet", source_field="en", target_field="de")
    for arrays, names in (([english, english, german], ["en", "en", "de"]), ([inner], ["translation"])):
        pq.write_table(pa.Table.from_arrays(arrays, names=names), source.path)
        assert refusal(source) == (
            f'{source.path} has two columns "en", so it is open which one is meant: write the file again with '
            "different names"
        )
    pq.write_table(pa.Table.from_arrays([english, german, german, german], names=["en", "x", "x", "de"]), source.path)
    assert list(source.pairs()) == [("a", "b")]


def test_a_column_comes_before_a_field_of_the_same_dotted_name(tmp_path: Path) -> None:
    columns = {"t": [{"en": "x", "de": "y"}], "t.en": ["a"], "de": pa.array(["b"], pa.string_view())}
    pq.write_table(pa.table(columns), tmp_path / "t.parquet")
    source = ParquetFile(path=tmp_path / "t.parquet", source_field="t.en", target_field="de")
    assert list(source.pairs()) == [("a", "b")]
    dotted = ParquetFile(path=tmp_path / "t.parquet", source_field="t.de", target_field="de")
    assert list(dotted.pairs()) == [("y", "b")]


def test_damaged_and_missing_parquet_files_are_named(tmp_path: Path) -> None:
    rows = [str(i) for i in range(5_000)]
    source = table(tmp_path / "t.parquet", {"en": rows, "de": rows}, row_group_size=1_000, use_dictionary=False)
    content = source.path.read_bytes()
    write(source.path, content[:-100])
    assert "t.parquet is not a complete Parquet file of UTF-8 text (after row 0, " in refusal(source)
    # The last row group is overwritten, the footer is not.
    write(source.path, content[: len(content) // 2] + bytes(range(256)) * 20 + content[len(content) // 2 + 5_120 :])
    assert "t.parquet is not a complete Parquet file of UTF-8 text (after row " in refusal(source)
    source.path.unlink()
    assert refusal(source) == f"{source.path} does not exist: check the name"
    source.path.mkdir()
    assert f"{source.path} " in refusal(source)


def test_texts_above_the_limit_make_a_pair_none(tmp_path: Path) -> None:
    rows = [
        {"en": "a", "de": "b"},
        {"en": "ü" * (LONGEST_LINE // 2 + 1), "de": "b"},
        {"en": "a" * LONGEST_LINE, "de": "b"},
    ]
    datasets.Dataset.from_list(rows).to_parquet(tmp_path / "t.parquet")
    source = ParquetFile(path=tmp_path / "t.parquet", source_field="en", target_field="de")
    assert [pair and len(pair[0]) for pair in source.pairs()] == [1, None, LONGEST_LINE]
