import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from dist_transformer.base.errors import UserError
from dist_transformer.base.files import sha256_of
from dist_transformer.base.tensor_file import TensorFile, is_finite
from dist_transformer.base.verified import Stated

TENSORS = {
    "matrix": torch.randn(7, 3, generator=torch.manual_seed(1)),
    "a vector": torch.arange(5.0),
    "number": torch.tensor(3.5),
    "empty": torch.empty(0, 4),
}
WAYS = [TensorFile.in_memory, TensorFile.on_disk]
Open = Callable[[Path, Stated], TensorFile]


def stated(path: Path) -> Stated:
    return Stated(sha256_of(path), "SUMS", "restore it")


@pytest.mark.parametrize("way", WAYS)
def test_what_the_library_wrote_is_read(way: Open, tmp_path: Path) -> None:
    path = tmp_path / "t.safetensors"
    save_file({**TENSORS, "half": torch.ones(3).bfloat16()}, path, metadata={"step": "7"})
    file = way(path, stated(path))
    assert sorted(file.names()) == ["a vector", "empty", "half", "matrix", "number"]
    assert file.metadata == {"step": "7"}
    for name, tensor in TENSORS.items():
        assert torch.equal(file.tensor(name), tensor)
        assert (file.shape(name), file.dtype(name)) == (tuple(tensor.shape), "F32")
    for first, end in ((0, 7), (2, 5), (6, 7), (3, 3)):
        assert torch.equal(file.rows("matrix", first, end), TENSORS["matrix"][first:end])
    assert file.dtype("half") == "BF16"
    with pytest.raises(UserError, match=r"t\.safetensors stores 'half' as BF16, but weights must be F32: restore it"):
        file.tensor("half")


def test_tensors_are_finite_or_not() -> None:
    largest = torch.finfo(torch.float32).max
    assert is_finite(torch.full((1000,), largest))
    assert is_finite(torch.empty(0))
    for bad in (float("nan"), float("inf"), float("-inf")):
        assert not is_finite(torch.tensor([1.0, bad, -largest]))
    # Their sum is no number either.
    assert not is_finite(torch.tensor([float("inf"), float("-inf")]))


def entry(start: int, end: int, shape: Any, dtype: Any = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    "header",
    [
        {"a": entry(0, 8, [3])},
        {"a": entry(0, 12, [3])},
        {"a": entry(0, 4, [1])},
        {"a": entry(4, 8, [1])},
        {"a": entry(0, 4, [1]), "b": entry(0, 8, [2])},
        {"a": entry(0, 4, [1]), "b": entry(8, 4, [-1])},
        {"a": entry(0, 8, [-1, -2])},
        {"a": entry(0, 8, [2.0])},
        {"a": entry(0, 8, "22")},
        {"a": entry(0, 8, None)},
        {"a": {"dtype": "F32", "shape": [2]}},
        {"a": {"dtype": "F32", "shape": [2], "data_offsets": [0]}},
        {"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, "8"]}},
        {"a": {"dtype": "F32", "shape": [2], "data_offsets": [0.0, 8.0]}},
        {"a": {"dtype": "F32", "shape": [2], "data_offsets": [False, 8]}},
        {"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8, 8]}},
        {"a": {"dtype": "F32", "shape": [2], "data_offsets": {"0": 0, "8": 8}}},
        {"a": {"dtype": "F32", "shape": [2], "data_offsets": [[0], [8]]}},
        {"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 10**30]}},
        {"a": entry(0, 8, [True, 2])},
        {"a": entry(0, 8, {"2": 2})},
        {"a": entry(0, 8, [[2]])},
        {"a": entry(0, 8, [2**63])},
        {"a": entry(0, 8, [2**62] * 10**5)},
        {"a": entry(0, 8, [2], None)},
        {"a": entry(0, 8, [2], ["F32"])},
        {"a": entry(0, 8, [2], 32)},
        {"a": None},
        {"a": "F32"},
        {"a": []},
        [],
        None,
        7,
        '{"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 1e400]}}',
        '{"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, NaN]}}',
        '{"a": {"dtype": "F32", "shape": [%s], "data_offsets": [0, 8]}}' % ("9" * 5000),
        {"__metadata__": {"step": 7}, "a": entry(0, 8, [2])},
        {"__metadata__": None, "a": entry(0, 8, [2])},
        {"__metadata__": [], "a": entry(0, 8, [2])},
        "[" * 100_000,
        "{",
        "\udcff",
    ],
    ids=lambda header: str(header)[:80],
)
def test_a_header_that_is_none_is_refused(way: Open, header: Any, tmp_path: Path) -> None:
    """The file has the stated hash. The numbers take 8 bytes."""
    encoded = header.encode(errors="surrogateescape") if isinstance(header, str) else json.dumps(header).encode()
    path = tmp_path / "t.safetensors"
    path.write_bytes(len(encoded).to_bytes(8, "little") + encoded + bytes(8))
    with pytest.raises(UserError) as refused:
        way(path, stated(path))
    said = str(refused.value)
    assert said.startswith(f"{path} cannot be read as safetensors (")
    # Words of Python about its own types say nothing about the file.
    assert not re.search(r"'\w+' object|argument|unpack|subscript", said)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("content", [b"", b"\x01", b"\xff" * 8, (2**40).to_bytes(8, "little"), b"\x03" + bytes(7)])
def test_a_file_that_ends_too_early_is_refused(way: Open, content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "t.safetensors"
    path.write_bytes(content)
    with pytest.raises(UserError, match=r"cannot be read as safetensors \(.*\): restore it"):
        way(path, stated(path))
