"""The softmax of the loss as Inductor compiles it for a GPU: kernels, and bytes a logit that they read and write.

Prints JSON. A tensor that a kernel reads several times counts once.
"""

import json
import re

import torch
from torch._inductor import config
from torch._inductor.utils import run_and_get_code

from dist_transformer.model import loss

_ROWS, _VOCABULARY = 3_136, 37_000


def main() -> dict[str, float]:
    logits = torch.zeros(_ROWS, 37_056, device="cuda", dtype=torch.bfloat16)[:, :_VOCABULARY]
    picks = torch.zeros(_ROWS, 1, device="cuda", dtype=torch.int64)
    # Kernels then report what they move; those from the cache would not be written again.
    config.benchmark_kernel = config.force_disable_caches = True
    with torch.no_grad():
        _, code = run_and_get_code(loss._compiled_softmax_rows(), logits, picks, 0.1, True)
    moved = [float(gigabytes) for gigabytes in re.findall(r"'kernel_num_gb': ([\d.e-]+)", "".join(code))]
    return {"kernels": len(moved), "bytes_a_logit": 1e9 * sum(moved) / (_ROWS * _VOCABULARY)}


if __name__ == "__main__":
    print(json.dumps(main()))
