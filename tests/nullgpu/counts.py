"""The counts of the stub in its process."""

import ctypes
import tempfile
from pathlib import Path


class Counts:
    def __init__(self) -> None:
        self.library = ctypes.CDLL("libcuda.so.1")

    def reset(self) -> None:
        self.library.null_reset()

    def read(self) -> dict[str, int]:
        """Return the counts by name: `kernel:…`, `SYNC …`, `ERROR …`, copies and their bytes."""
        with tempfile.NamedTemporaryFile() as file:
            self.library.null_dump(file.name.encode())
            rows = [line.split("\t") for line in Path(file.name).read_text().splitlines()]
        return {name: int(count) for count, name in rows}
