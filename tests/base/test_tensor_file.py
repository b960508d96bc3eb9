import torch

from dist_transformer.base.tensor_file import is_finite


def test_tensors_are_finite_or_not() -> None:
    largest = torch.finfo(torch.float32).max
    assert is_finite(torch.full((1000,), largest))
    assert is_finite(torch.empty(0))
    for bad in (float("nan"), float("inf"), float("-inf")):
        assert not is_finite(torch.tensor([1.0, bad, -largest]))
    # Their sum is no number either.
    assert not is_finite(torch.tensor([float("inf"), float("-inf")]))
