"""Large files cut at line ends: the parts give what the whole file gives."""

import gzip
import io
import itertools
import tempfile
from collections.abc import Sequence
from pathlib import Path

import pytest
from backports import zstd
from hypothesis import given, settings
from hypothesis import strategies as st

from dist_transformer.base.errors import UserError
from dist_transformer.data.prepare import pipeline, split_files
from dist_transformer.data.prepare.mpi_ranks import MpiRanks
from dist_transformer.data.prepare.split_files import split_sources
from dist_transformer.data.prepare.tasks import TaskRunner
from dist_transformer.data.prepare.work_dir import Work
from dist_transformer.data.prepare.worker_pool import WorkerPool
from dist_transformer.data.text.lines import Span, read_short_lines
from dist_transformer.data.text.pairs import JsonlFile, LineFiles, PairSource, TsvFile
from tests.data.prepare.preparing import corpus, files_of, run, write_pairs


def split(folder: Path, *sources: PairSource) -> list[tuple[int, PairSource]]:
    (folder / "work" / "results").mkdir(parents=True)
    with WorkerPool(1) as pool:
        work = Work(folder=folder / "work")
        return split_sources(TaskRunner(work=work, pool=pool, ranks=MpiRanks(), show=False), sources)


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(split_files, "PART_BYTES", 40)
    monkeypatch.setattr(split_files, "BLOCK_BYTES", 16)


LINES = st.lists(
    st.text(st.characters(exclude_characters="\n\r\0", codec="utf-8"), max_size=30), min_size=1, max_size=30
)


@settings(deadline=None)
@given(LINES, st.sampled_from(["\n", "\r\n"]), st.booleans(), st.booleans(), st.integers(1, 50))
def test_parts_are_the_whole(lines: Sequence[str], end: str, is_open: bool, mark: bool, block: int) -> None:
    """Any lines, ends and sizes of blocks, with or without a last line end and a byte order mark."""
    content = (b"\xef\xbb\xbf" if mark else b"") + (end.join(lines) + ("" if is_open else end)).encode()
    target = "".join(f"{number}\n" for number, _ in enumerate(io.BytesIO(content)))
    with tempfile.TemporaryDirectory() as name, pytest.MonkeyPatch.context() as patch:
        patch.setattr(split_files, "PART_BYTES", 40)
        patch.setattr(split_files, "BLOCK_BYTES", block)
        folder = Path(name)
        files = LineFiles(source=folder / "a.en", target=folder / "a.de")
        files.source.write_bytes(content)
        files.target.write_text(target)
        parts = split(folder, files)
        assert [pair for _, part in parts for pair in part.pairs()] == list(files.pairs())
        assert (len(parts) > 1) == (max(files.source.stat().st_size, files.target.stat().st_size) > 40)


@pytest.mark.usefixtures("small_parts")
def test_only_large_plain_files_are_cut(tmp_path: Path) -> None:
    rows = "".join(f"{number}\tnumber\n" for number in range(20))
    (tmp_path / "large.tsv").write_text(rows)
    (tmp_path / "small.tsv").write_text("1\tone\n")
    (tmp_path / "large.tsv.gz").write_bytes(gzip.compress(rows.encode() * 20))
    (tmp_path / "large.tsv.zst").write_bytes(zstd.compress(rows.encode() * 20))
    (tmp_path / "large.jsonl").write_text("".join(f'{{"en": "{number}", "de": "eins"}}\n\n' for number in range(9)))
    sources = [TsvFile(path=tmp_path / name) for name in ("small.tsv", "large.tsv", "large.tsv.gz", "large.tsv.zst")]
    rest = JsonlFile(path=tmp_path / "large.jsonl", source_field="en", target_field="de")
    parts = split(tmp_path, *sources, rest)
    # By hand: 190 bytes of TSV are five parts of at most 40, and 259 bytes of JSON are seven.
    assert [number for number, _ in parts] == [0, *[1] * 5, 2, 3, *[4] * 7]
    for number, source in enumerate((*sources, rest)):
        assert [pair for owner, part in parts if owner == number for pair in part.pairs()] == list(source.pairs())


@pytest.mark.usefixtures("small_parts")
def test_a_part_knows_the_columns_of_the_first_row(tmp_path: Path) -> None:
    rows = ["\n", *(f"{number}\tnumber\n" for number in range(12)), "a\ttab\tmore\n"]
    (tmp_path / "t.tsv").write_text("".join(rows))
    parts = [part for _, part in split(tmp_path, TsvFile(path=tmp_path / "t.tsv"))]
    assert len(parts) > 1
    with pytest.raises(UserError, match=r"t\.tsv line 14 has 3 tab-separated columns, but the first row has 2: fix"):
        list(parts[-1].pairs())


@pytest.mark.usefixtures("small_parts")
def test_the_data_folder_is_that_of_whole_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline, "CHUNK_PAIRS", 7)
    index, report = run(tmp_path, corpus(60), workers=2)
    assert index.pairs_read == 60
    assert [line for line in report if line.startswith("read")] == ["read: 60 pairs from train.en + train.de"]
    monkeypatch.setattr(split_files, "PART_BYTES", 2**20)
    run(tmp_path, corpus(60), "whole")
    assert files_of(tmp_path / "out") == files_of(tmp_path / "whole")


@pytest.mark.usefixtures("small_parts")
def test_bad_text_is_found_in_a_part_as_in_the_whole(tmp_path: Path) -> None:
    source, target = write_pairs(tmp_path, "train", corpus(20))
    files = LineFiles(source=source, target=target)
    target.write_text(target.read_text() + "one more\n")
    with pytest.raises(
        UserError, match=r"train\.en and .*train\.de must have the same number .* \(20 and 21\): line i"
    ):
        split(tmp_path, files)
    rows = [f"{number}\tnumber\n".encode() for number in range(20)]
    (tmp_path / "bad.tsv").write_bytes(b"".join([*rows[:13], b"\xff\tno text\n", *rows[13:]]))
    bad = TsvFile(path=tmp_path / "bad.tsv")
    for sources in ([bad], [part for _, part in split(tmp_path / "other", bad)]):
        with pytest.raises(UserError, match=r"bad\.tsv line 14 is not UTF-8"):
            list(itertools.chain.from_iterable(part.pairs() for part in sources))


def test_a_file_that_becomes_shorter(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("one\ntwo\n")
    assert list(read_short_lines(tmp_path / "text", Span(first=1, count=1, place=0, skipped=1))) == ["two"]
    with pytest.raises(UserError, match="became shorter while it was read"):
        list(read_short_lines(tmp_path / "text", Span(first=1, count=2, place=0, skipped=1)))
