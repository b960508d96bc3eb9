"""Read parallel text from tables: Parquet files, and datasets that the `datasets` library opens.

The two texts of a row are two columns, or two fields of a column `translation`. A missing text counts as empty.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from dist_transformer.base.errors import TransientError, UserError
from dist_transformer.data.text.compressed import refuse_pipe
from dist_transformer.data.text.pairs import (
    NESTED,
    FieldFile,
    Pair,
    field_names,
    find_field,
    listed,
    one_line,
    short_pair,
)

# A cell of a column's dictionary, stored once, may be the text of every row: 16 rows of the longest line are 32 MiB.
_BATCH_ROWS = 16
# A row group of a web-scale file holds a million rows, so it is read through a buffer instead of whole.
_PARQUET_BUFFER = 1 << 20
_TEXTS = (pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view)
# The branch of a dataset on the hub where the hub's converter puts Parquet files: a folder per configuration, and no
# names of configurations.
_CONVERTED_BRANCH = "refs/convert/parquet"
# The beginning of the library's message where a dataset's files come from a script, which it does not run.
_SCRIPT_REFUSED = "Dataset scripts are no longer supported"
# Names of files that may hold pairs.
_TABLE = re.compile(r".*(\.(parquet|jsonl?|ndjson|csv|tsv|arrow)(\.(gz|bz2|xz|zst|zip))?|\.zip)", re.IGNORECASE)


class ParquetFile(FieldFile):
    """A Parquet file; the two texts are string columns, or string fields of its column `translation`."""

    def pairs(self) -> Iterator[Pair | None]:
        row = 0
        try:
            refuse_pipe(self.path)
            with pq.ParquetFile(self.path, buffer_size=_PARQUET_BUFFER, pre_buffer=False) as file:
                paths = [self._column(file.schema_arrow, field) for field in (self.source_field, self.target_field)]
                wanted = [".".join(path) for path in paths]
                for batch in file.iter_batches(_BATCH_ROWS, columns=wanted, use_threads=False):
                    sources, targets = (_values(batch, path) for path in paths)
                    for source, target in zip(sources, targets, strict=True):
                        row += 1
                        where = f"{self.path} row {row}"
                        yield short_pair(one_line(source or "", where), one_line(target or "", where))
        except FileNotFoundError:
            raise UserError(f"{self.path} does not exist: check the name") from None
        except (pa.ArrowException, UnicodeDecodeError, OSError) as error:
            if isinstance(error, OSError) and error.strerror:
                raise UserError(
                    f"{self.path} cannot be read ({error.strerror}): check the file and its rights"
                ) from None
            raise UserError(
                f"{self.path} is not a complete Parquet file of UTF-8 text (after row {row}, {first_line(error)}): "
                "download it again, or check --parquet"
            ) from None

    def _column(self, schema: pa.Schema, field: str) -> list[str]:
        """Return the path of names that leads to a field's column."""
        fields = _fields(schema)
        path = find_field(fields, field)
        if path is None:
            raise UserError(
                f'{self.path} has no column "{field}" (it has {listed(field_names(fields))}): '
                "name the columns with --src-field and --tgt-field"
            )
        kind: Any = schema
        for name in path:
            if [column.name for column in kind].count(name) > 1:
                raise UserError(
                    f'{self.path} has two columns "{name}", so it is open which one is meant: write the file again '
                    "with different names"
                )
            kind = kind.field(name).type
        stored = kind.value_type if pa.types.is_dictionary(kind) else kind
        if not any(is_text(stored) for is_text in _TEXTS):
            raise UserError(
                f'the column "{field}" in {self.path} must hold strings, not {kind}: '
                "name the columns with --src-field and --tgt-field"
            )
        return path


def _fields(columns: pa.Schema | pa.StructType) -> dict[str, Any]:
    """Return the types of columns by name; a struct is the mapping of its fields."""
    return {column.name: _fields(column.type) if pa.types.is_struct(column.type) else column.type for column in columns}


def _values(batch: pa.RecordBatch, path: list[str]) -> list[str | None]:
    """Return the values of a column, or of a field of a struct column."""
    column = batch.column(path[0])
    return (pc.struct_field(column, path[1:]) if path[1:] else column).to_pylist()


@dataclass(frozen=True, kw_only=True, slots=True)
class HubDataset:
    """A dataset that `datasets.load_dataset` opens: a hub name or a local folder of JSON, Parquet, … files.

    Its rows have a `translation` column of {language: text}, or one column per language.
    """

    dataset: str
    source_language: str
    target_language: str
    config: str | None = None
    revision: str | None = None
    """Commit, tag or branch of the hub's repository; default: its newest commit, which is not recorded.

    In `refs/convert/parquet`, `config` is the folder of the configuration.
    """
    split: str = "train"
    streaming: bool = False
    """Whether rows are read as they arrive, without storing anything in the cache of `datasets`."""

    @property
    def name(self) -> str:
        dataset = Path(self.dataset).name if Path(self.dataset).exists() else self.dataset
        return f"{dataset}{f'@{self.revision}' if self.revision else ''}/{self.split}"

    @property
    def languages(self) -> tuple[str | None, str | None]:
        return self.source_language, self.target_language

    def files(self) -> list[Path]:
        """List the files of a local folder; for a dataset of the hub, the list is empty."""
        path = Path(self.dataset)
        return sorted(file for file in path.rglob("*") if file.is_file()) if path.is_dir() else []

    def pairs(self) -> Iterator[Pair | None]:
        where = f'dataset "{self.dataset}", split "{self.split}"'
        number = 0
        for batch in self._batches():
            sources, targets = (self._column(batch, lang) for lang in (self.source_language, self.target_language))
            for source, target in zip(sources, targets, strict=True):
                number += 1
                row = f"{where}, row {number}"
                yield short_pair(one_line(source or "", row), one_line(target or "", row))

    def _batches(self) -> Iterator[Mapping[str, list[Any]]]:
        import datasets

        part = {"data_dir" if self.revision == _CONVERTED_BRANCH else "name": self.config}
        rows = 0
        try:
            place = {"path": self.dataset, "revision": self.revision, **part}
            builder = datasets.load_dataset_builder(**place)
            self._refuse_part(builder)
            table = builder.config
            options: dict[str, Any] = {}
            if hasattr(table, "keep_default_na"):
                # Each text of a CSV file as it stands: otherwise the words NA, null and nan would count as missing, and
                # a column of numbers would not be text.
                columns = (self.source_language, self.target_language)
                options = {"keep_default_na": False, "converters": dict.fromkeys(columns, str)}
            dataset = datasets.load_dataset(**place, **options, split=self.split, streaming=self.streaming)
            for batch in dataset.iter(batch_size=_BATCH_ROWS):
                yield batch
                rows += len(next(iter(batch.values())))
        except UserError:
            raise
        except Exception as error:  # one of many types: not found, no network, unknown config or split, gated, …
            if rows:
                raise TransientError(
                    f'dataset "{self.dataset}" (split {self.split}) failed after row {rows:,} '
                    f"({first_line(error)}): run the same command again, which resumes"
                ) from error
            if str(error).startswith(_SCRIPT_REFUSED):
                raise UserError(
                    f'dataset "{self.dataset}" is made by a loading script, which the datasets library does not run: '
                    f"read the hub's copy as Parquet files with --dataset-revision {_CONVERTED_BRANCH}"
                ) from error
            raise UserError(
                f'dataset "{self.dataset}" (config {self.config or "default"}, split {self.split}) cannot be loaded '
                f"({first_line(error)}): check --dataset, --dataset-config, --dataset-revision "
                "and --dataset-split, and that the hub can "
                "be reached"
            ) from error

    def _refuse_part(self, builder: Any) -> None:
        """Refuse a local folder of which the library reads a part, unless its card says which.

        The library takes files of one kind, and if some are named after splits, only those.
        """
        from datasets.data_files import FILES_TO_IGNORE
        from huggingface_hub import DatasetCard

        if not Path(self.dataset).is_dir():
            return
        folder = Path(self.dataset, builder.config.data_dir or "").resolve()
        card = folder / "README.md"
        by_card = card.is_file() and "configs" in DatasetCard.load(card, ignore_metadata_errors=True).data.to_dict()
        if by_card or not builder.config.data_files:
            return
        read = {Path(file) for files in builder.config.data_files.values() for file in files}
        names = (file.relative_to(folder) for file in sorted(folder.rglob("*")) if file.is_file() and file not in read)
        unread = [
            str(name)
            for name in names
            if _TABLE.fullmatch(name.name) and name.name not in FILES_TO_IGNORE
            # The library passes over these on purpose.
            if not any(part.startswith((".", "__")) for part in name.parts)
        ]
        if unread:
            raise UserError(
                f'the datasets library reads {len(read)} of the data files in "{self.dataset}" and leaves out '
                f"{len(unread)} ({listed(unread[:3])}{', …' * (len(unread) > 3)}), because it takes files of one kind, "
                "and only those named after a split (train, …) if there are any: rename or move files, or list those "
                "to read under configs in the folder's README.md"
            )

    def _column(self, batch: Mapping[str, list[Any]], language: str) -> list[str | None]:
        if language in batch:
            texts = batch[language]
        elif NESTED in batch and all(isinstance(row, dict) for row in batch[NESTED]):
            texts = [row.get(language) for row in batch[NESTED]]
            known = sorted({name for row in batch[NESTED] for name in row})
            if language not in known:
                raise UserError(
                    f'dataset "{self.dataset}" has no language "{language}" (it has {", ".join(known)}): '
                    "choose with --src-lang and --tgt-lang"
                )
        else:
            raise UserError(
                f'dataset "{self.dataset}" has neither a column "{language}" nor a column "{NESTED}" '
                f"(it has {listed(batch)}): choose the columns with --src-lang and --tgt-lang"
            )
        for text in texts:
            if text is not None and not isinstance(text, str):
                raise UserError(
                    f'the texts of "{language}" in dataset "{self.dataset}" must be strings, not '
                    f"{type(text).__name__}: choose the columns with --src-lang and --tgt-lang"
                )
        return texts


def first_line(error: Exception) -> str:
    return str(error).strip().split("\n")[0] or type(error).__name__
