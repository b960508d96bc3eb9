"""A lane of Hugging Face's `MarianMTModel`, in a process of its own.

    python -m benchmarks.race.huggingface WAY LANE TOKENS

LANE/config.json has the settings. TOKENS is the mean number of real target tokens of a step.
"""

import json
import os
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import MarianMTModel

from benchmarks.race.lane import LARGEST
from benchmarks.training.peers import PaddedContender, TrainerContender, in_bf16, marian_logits
from benchmarks.training.text import TextSample
from dist_transformer.base.files import whole_path, write_file
from dist_transformer.config.plain import from_plain, read_json
from dist_transformer.config.settings import TrainConfig
from dist_transformer.data.folder.reader import DataFolder
from dist_transformer.export.marian import marian_model
from dist_transformer.model.transformer import Transformer
from dist_transformer.runtime.device import choose_precision


def main(way: str, lane: Path, tokens: float) -> None:
    file = lane / "config.json"
    config = from_plain(TrainConfig, read_json(file), str(file))
    torch.manual_seed(config.seed)
    data = DataFolder.open(Path(config.corpora.data[0]))
    model = config.model.for_vocabularies(*data.index.vocab_sizes)
    config = replace(config, model=model, precision=choose_precision(torch.device("cpu"), None))
    # The first weights are its own.
    marian: Any = MarianMTModel(marian_model(Transformer(config.model)).config)
    # Without compilation, it takes less time than sdpa on these short sentences.
    marian.set_attn_implementation("sdpa" if way == "compiled" else "eager")
    sample = TextSample(data.train, pairs=data.train.info.pairs, longest=LARGEST, seed=1)
    contender: TrainerContender | PaddedContender
    if way == "trainer":
        pairs = round(tokens / float(sample.sizes[:, 1].mean()))
        contender = TrainerContender(marian, sample, config, pairs=pairs)
    else:
        marian = in_bf16(marian) if config.arithmetic == "bf16" else marian
        rows = sample.epochs(tokens, seed=config.seed)
        compiles = way == "compiled"
        contender = PaddedContender(marian, partial(marian_logits, marian), rows, sample, config, compiles=compiles)
    (lane / "weights").mkdir()
    total, every = 0, config.checkpoints.save_every
    for step in range(every, config.max_steps + 1, every):
        total += contender.train(every).target_tokens
        write_file(lane / "tokens.json", json.dumps(total / step))
        masters = {name: getattr(weight, "master", weight) for name, weight in marian.named_parameters()}
        with whole_path(lane / "weights" / f"step-{step}.safetensors") as path:
            # Tied weights have several names, of which a file takes copies.
            save_file({name: tensor.detach().clone() for name, tensor in (marian.state_dict() | masters).items()}, path)
    # The trainer's thread waits for another step.
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), float(sys.argv[3]))
