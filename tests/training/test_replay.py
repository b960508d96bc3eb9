"""Ten steps of a training, replayed by a plain loop in float64: the paper's equations, one sentence at a time."""

import itertools
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from dist_transformer.config.plain import read_json
from dist_transformer.data.folder.reader import DataFolder
from dist_transformer.data.loading.loader import open_training_data
from dist_transformer.data.vocabulary.tokenizer import EOS_ID
from dist_transformer.model.transformer import Transformer
from dist_transformer.run.folder import settings_of
from tests.conftest import run_ranks
from tests.inference.test_scoring import InFloat64

STEPS, WARMUP, PEAK, CLIP, SMOOTHING = 10, 4, 1e-2, 0.5, 0.1
BETA1, BETA2, EPSILON = 0.9, 0.98, 1e-6
SETTINGS = (
    *("--preset", "tiny", "--model.width", 16, "--model.heads", 2, "--model.ffn-width", 16, "--model.dropout", 0.0),
    *("--batch.max-target-tokens", 64, "--batch.packs-per-step", 3, "--precision", "fp32", "--validate-every", 0),
    *("--optimizer.schedule", "inverse_sqrt", "--optimizer.peak-lr", PEAK, "--optimizer.warmup-steps", WARMUP),
    *("--optimizer.max-grad-norm", CLIP, "--optimizer.label-smoothing", SMOOTHING),
    *("--optimizer.beta1", BETA1, "--optimizer.beta2", BETA2, "--optimizer.epsilon", EPSILON),
)


@pytest.mark.slow
def test_ten_steps_are_those_of_a_plain_loop(toy_data: DataFolder, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    places = ("--data", toy_data.path, "--run-dir", run_dir)
    run_ranks(1, "-m", "dist_transformer.train", *SETTINGS, *places, "--max-steps", STEPS)
    config = settings_of(read_json(run_dir / "config.json"), run_dir / "config.json")
    torch.manual_seed(config.seed)
    network = InFloat64(Transformer(config.model))
    weights = {name: tensor.clone().requires_grad_() for name, tensor in network.weights.items()}
    network.weights = weights
    first, second = ({name: torch.zeros_like(tensor) for name, tensor in weights.items()} for _ in range(2))
    data = open_training_data(config.corpora, config.batch, seed=config.seed)
    steps = itertools.islice(data.plan.steps(data.plan.start(), config.batch.packs_per_step), STEPS)
    clipped = 0
    for number, step in enumerate(steps, 1):
        split = data.first.train
        split.hold(range(len(split.info.shards)))
        source, source_lengths, target, target_lengths = split.tokens(step.packs.pair_ids)
        losses = []
        for ids, labels in zip(
            np.split(source, np.cumsum(source_lengths)[:-1]),
            np.split(target, np.cumsum(target_lengths)[:-1]),
            strict=True,
        ):
            log_p = network.distributions(ids.tolist(), labels.tolist()).log()
            right = log_p[torch.arange(len(labels) + 1), torch.tensor([*labels.tolist(), EOS_ID])]
            losses.append(-((1 - SMOOTHING) * right + SMOOTHING * log_p.mean(-1)).sum())
        (sum(losses) / step.target_tokens).backward()  # type: ignore[union-attr]
        with torch.no_grad():
            gradients = {name: tensor.grad for name, tensor in weights.items()}
            norm = math.sqrt(sum(float(gradient.square().sum()) for gradient in gradients.values()))
            clipped += norm > CLIP
            rate = PEAK * min(number / WARMUP, (WARMUP / number) ** 0.5)
            for name, tensor in weights.items():
                gradient = gradients[name] * min(1.0, CLIP / norm)
                first[name] = BETA1 * first[name] + (1 - BETA1) * gradient
                second[name] = BETA2 * second[name] + (1 - BETA2) * gradient**2
                mean, square = first[name] / (1 - BETA1**number), second[name] / (1 - BETA2**number)
                tensor.sub_(rate * mean / (square.sqrt() + EPSILON))
                tensor.grad = None
    assert clipped > 0
    trained = load_file(run_dir / "weights" / f"step-{STEPS:08d}.safetensors")
    farthest = {name: float((trained[name].double() - weights[name]).abs().max()) for name in trained}
    assert max(farthest.values()) < 1e-5, farthest
