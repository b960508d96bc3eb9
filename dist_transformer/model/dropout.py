"""Dropout, with cheap random numbers on a CPU.

On a CPU, the generator behind `torch.nn.functional.dropout` took 14% of a training step. A hash of the element's place
and a random seed takes a hundredth of that time and has the same effect, with the probability rounded to 1/65536.
"""

import numpy as np
import torch
from torch.nn import functional

from dist_transformer.model import cpu_kernels


def random_bits(shape: torch.Size) -> torch.Tensor:
    """Draw 16 random bits per element, int16, by one number of torch's generator."""
    seed, count = int(torch.empty((), dtype=torch.int64).random_(-(2**63), None)), -(-shape.numel() // 2)
    words = cpu_kernels.random_words if cpu_kernels.takes(torch.float32) else _random_words
    return words(seed % 2**64, count).view(torch.int16)[: shape.numel()].view(shape)


def _random_words(seed: int, count: int) -> torch.Tensor:
    """Compute the same as `cpu_kernels.random_words` without a compiler."""
    words = np.arange(count, dtype=np.uint32) ^ np.uint32(seed % 2**32)
    words = _mixed(_mixed(words) + np.uint32(seed >> 32))
    return torch.from_numpy(words.view(np.int32))


def _mixed(words: np.ndarray) -> np.ndarray:
    words = (words ^ (words >> np.uint32(16))) * np.uint32(0x7FEB352D)
    words = (words ^ (words >> np.uint32(15))) * np.uint32(0x846CA68B)
    mixed: np.ndarray = words ^ (words >> np.uint32(16))
    return mixed


def dropout(x: torch.Tensor, p: float, training: bool) -> torch.Tensor:
    """Zero each element with probability `p` and scale the others by 1 / (1 - p), when `training`."""
    if not training or p == 0 or x.device.type != "cpu" or torch.compiler.is_compiling():
        return functional.dropout(x, p, training)
    keep = cpu_kernels.Keep.all_but(p)
    kept = (random_bits(x.shape) >= keep.lowest).to(x.dtype)
    return x * kept.mul_(keep.scale)
