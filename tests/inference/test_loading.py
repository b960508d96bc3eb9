"""The arithmetic of a model."""

import re
from pathlib import Path

import pytest
import torch

from dist_transformer.base.errors import UserError
from dist_transformer.inference.decoding import Loading, Precision
from dist_transformer.inference.loading import as_arithmetic, with_agreed_precision
from dist_transformer.model import cpu_kernels
from dist_transformer.runtime import device, distributed

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("wanted", "ranks", "chosen"),
    [
        (None, [True, True], "bf16"),
        # On nodes of several kinds, all ranks decode in what each has instructions for.
        (None, [True, False], "fp32"),
        ("bf16", [False, False], "bf16"),
        ("fp32", [True, True], "fp32"),
    ],
)
def test_the_precision_is_that_of_all_ranks(
    wanted: Precision | None, ranks: list[bool], chosen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []
    monkeypatch.setattr(device, "multiplies_bf16", lambda of: asked.append(of) or ranks[0])
    monkeypatch.setattr(distributed, "gather_objects", lambda mine: ranks)
    assert with_agreed_precision(Loading(precision=wanted), CPU) == Loading(precision=chosen)  # type: ignore[arg-type]
    assert asked == ([] if wanted else [CPU])


@pytest.mark.parametrize(("has_bf16", "dtype"), [(True, torch.bfloat16), (False, torch.float32)])
def test_int8_leaves_the_rest_to_the_faster_dtype(
    has_bf16: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device, "multiplies_bf16", lambda of: has_bf16)
    monkeypatch.setattr(device, "multiplies_int8", lambda of: True)
    monkeypatch.setattr(cpu_kernels, "takes", lambda dtype: True)
    assert as_arithmetic("int8", CPU) == (dtype, True)
    assert as_arithmetic("fp32", CPU) == (torch.float32, False)
    assert as_arithmetic("bf16", CPU) == (torch.bfloat16, False)


@pytest.mark.parametrize(
    ("of", "instructions", "compiles", "message"),
    [
        ("cuda", True, True, "precision is int8, but it computes on a CPU alone: use bf16 or fp32"),
        ("cpu", False, True, "precision is int8, but this CPU has no instructions for it (VNNI): use bf16 or fp32"),
        ("cpu", True, False, "precision is int8, but its C++ code does not compile (see the note): use bf16 or fp32"),
    ],
)
def test_where_int8_does_not_compute(
    of: str, instructions: bool, compiles: bool, message: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "cpuinfo"
    file.write_text("flags : avx512_vnni\n" if instructions else "flags : avx512f\n")
    monkeypatch.setattr(device, "_CPU_INFO", file)
    monkeypatch.setattr(device, "multiplies_bf16", lambda of: True)
    monkeypatch.setattr(cpu_kernels, "takes", lambda dtype: compiles)
    with pytest.raises(UserError, match=f"^{re.escape(message)}$"):
        as_arithmetic("int8", torch.device(of))
