"""Beam search in slots on the null GPU, whose steps are recorded as a graph. Prints JSON: what CUDA refused, nodes."""

import dataclasses
import json

import numpy as np
import torch

from dist_transformer.config.presets import PRESETS
from dist_transformer.inference import beam
from dist_transformer.inference.decoding import Decoding
from dist_transformer.model.transformer import Transformer
from dist_transformer.runtime.device import find_device
from tests.nullgpu.counts import Counts

_VOCABULARY = 37_000


def main() -> list[dict[str, object]]:
    torch.manual_seed(0)
    device, rng, counts = find_device("cuda"), np.random.default_rng(0), Counts()
    config = dataclasses.replace(PRESETS["base"].model, vocab_size=_VOCABULARY)
    model = Transformer(config).to(device).cast_parameters(torch.bfloat16).eval()
    found = []
    for room, slots in ((32, 512), (64, 256), (128, 128)):
        lengths = rng.integers(room // 2, room, slots + 50)
        sources = [rng.integers(4, _VOCABULARY, length).tolist() for length in lengths]
        with torch.inference_mode():
            search = beam._Search(model, sources, Decoding(), slots)
            counts.reset()
            beam._recorded(search._step, device)
            calls = counts.read()
            counts.reset()
            search._step()
            step = counts.read()
        found.append(
            {
                "slots": slots,
                "source_room": room,
                "nodes": calls["graph nodes captured"],
                "refused": {name: count for name, count in calls.items() if name.startswith("ERROR")},
                "cudnn_kernels": sum(count for name, count in step.items() if "cudnn" in name.lower()),
                "waits_of_a_step": sum(count for name, count in step.items() if name.startswith("SYNC")),
            }
        )
    return found


if __name__ == "__main__":
    print(json.dumps(main()))
