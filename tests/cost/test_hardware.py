import pytest

from dist_transformer.base.errors import UserError
from dist_transformer.cost.hardware import GPUS, gpu_kind, kind_of_device, peak_flops


def test_an_unknown_gpu_lists_the_known_ones() -> None:
    with pytest.raises(UserError, match=r"--gpu p100 is unknown: choose one of b200, h200, h100, .*rtx3090, or cpu"):
        gpu_kind("p100", "bf16")


def test_bf16_is_refused_where_there_is_none() -> None:
    with pytest.raises(UserError, match="--gpu v100-16 has no bf16: plan and train with --precision fp32"):
        gpu_kind("v100-16", "bf16")
    assert gpu_kind("v100-16", "fp32") is GPUS["v100-16"]
    assert gpu_kind("cpu", "bf16") is None


@pytest.mark.parametrize(
    ("described", "name"),
    [
        ("NVIDIA H100 80GB HBM3, 79 GiB", "h100"),
        ("NVIDIA A100-SXM4-80GB, 79 GiB", "a100-80"),
        ("NVIDIA A100-SXM4-40GB, 39 GiB", "a100-40"),
        ("NVIDIA GeForce RTX 4090, 24 GiB", "rtx4090"),
        ("NVIDIA A10, 22 GiB", "a10"),
        # A slower one.
        ("NVIDIA A10G, 22 GiB", None),
        ("Tesla T4, 15 GiB", None),
    ],
)
def test_devices_as_torch_names_them(described: str, name: str | None) -> None:
    assert kind_of_device(described) == name


@pytest.mark.parametrize(
    ("described", "precision", "peak"),
    [
        # Datasheets: H100 989 TFLOP/s in bf16 and 67 in fp32, A100 19.5 in fp32.
        ("NVIDIA H100 80GB HBM3, 79 GiB", "bf16", 989e12),
        ("NVIDIA H100 80GB HBM3, 79 GiB", "fp32", 67e12),
        ("NVIDIA A100-SXM4-80GB, 79 GiB", "fp32", 19.5e12),
        ("Tesla V100-SXM2-16GB, 16 GiB", "bf16", None),
        ("Tesla T4, 15 GiB", "fp32", None),
    ],
)
def test_the_peak_of_a_device(described: str, precision: str, peak: float | None) -> None:
    assert peak_flops(described, precision) == peak
