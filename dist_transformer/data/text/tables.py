"""Read parallel text from Parquet files.

The two texts of a row are two columns, or two fields of a column `translation`. A missing text counts as empty.
"""

from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from dist_transformer.base.errors import UserError
from dist_transformer.data.text.compressed import refuse_pipe
from dist_transformer.data.text.files import (
    FieldFile,
    Pair,
    field_names,
    find_field,
    listed,
    one_line,
    short_pair,
)
from dist_transformer.data.text.hub import first_line

# A cell of a column's dictionary, stored once, may be the text of every row: 16 rows of the longest line are 32 MiB.
_BATCH_ROWS = 16
# A row group of a web-scale file holds a million rows, so it is read through a buffer instead of whole.
_PARQUET_BUFFER = 1 << 20
_TEXTS = (pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view)


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
