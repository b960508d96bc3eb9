"""Checkpoint averaging (section 6.1): the mean of the weights of several training steps, as a model folder.

The mean of the fp32 weights is computed in float64 and rounded to fp32 once. The whole result is in memory, but only
some rows of the sources at a time, for any number of sources. Each source is read twice: for its hash and for its
numbers.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from dist_transformer.averaging.choice import ChosenWeights
from dist_transformer.averaging.sources import WeightSource, check_together, open_weights
from dist_transformer.base.errors import UserError
from dist_transformer.data.vocabulary.kinds import load_vocabulary
from dist_transformer.data.vocabulary.tokenizer import Vocabulary
from dist_transformer.model.transformer import Transformer, parameter_shapes
from dist_transformer.model_folder import ModelInfo, for_decoding, refuse_other_content, write_model_folder

# Numbers per block: 4 MB in float64, which stay in the cache. This is twice as fast as 16 MB.
_BLOCK_NUMBERS = 2**19


@dataclass(frozen=True, kw_only=True, slots=True)
class MeanWeights:
    """The mean of several sets of weights, with the other contents of its model folder."""

    info: ModelInfo
    weights: dict[str, torch.Tensor]
    """Weights in fp32 by the names of `Transformer.state_dict()`."""
    tokenizer: Vocabulary
    tokenizer_json: bytes

    def to_model(self, device: torch.device, dtype: torch.dtype, in_int8: bool = False) -> Transformer:
        """Make a model of the weights, which leave this object, in evaluation mode."""
        model = Transformer(self.info.model)
        model.load_state_dict(self.weights)
        self.weights.clear()
        return for_decoding(model, device, dtype, in_int8)


def average(paths: Sequence[Path], out: Path, *, notes: Sequence[str] = ()) -> ModelInfo:
    """Write the mean of the weights at `paths` to the model folder `out`, which is whole or absent at any time.

    Args:
        notes: lines of the model card about the choice of the weights.

    Raises:
        UserError: `mean_weights` failed, or `out` holds other files or cannot be written.
    """
    refuse_other_content(out)
    mean = mean_weights(paths)
    write_model_folder(
        out,
        info=mean.info,
        weights=mean.weights,
        tokenizer_json=mean.tokenizer_json,
        notes=[f"Normalisation of text: {mean.tokenizer.source.text_rule}", *notes],
    )
    return mean.info


def write_mean(chosen: ChosenWeights, out: Path, *notes: str) -> ModelInfo:
    """Write the mean of chosen weights as `average` does, with a note on the choice unless the user named the files."""
    return average(chosen.paths, out, notes=[*([f"Chosen: {chosen.how}"] if chosen.how else []), *notes])


def mean_weights(paths: Sequence[Path]) -> MeanWeights:
    """Compute the mean of the weights at `paths`; each source counts as many times as it has training steps.

    Raises:
        UserError: sources do not fit together, appear twice or hold numbers that are not finite; the message names
            them.
    """
    sources = [open_weights(path) for path in paths]
    check_together(sources)
    first = sources[0]
    tokenizer = load_vocabulary(first.tokenizer_file, sha256=first.info.tokenizer_sha256)
    # A source that is the mean of k steps counts k times, so that the result is the mean of all steps.
    weights = weighted_mean(sources, [len(source.info.steps) for source in sources])
    steps = tuple(sorted(step for source in sources for step in source.info.steps))
    run = next((source.info.run for source in sources if source.info.run is not None), None)
    return MeanWeights(
        info=dataclasses.replace(first.info, steps=steps, run=run),
        weights=weights,
        tokenizer=tokenizer,
        tokenizer_json=first.tokenizer_file.read_bytes(),
    )


def weighted_mean(sources: Sequence[WeightSource], shares: Sequence[float]) -> dict[str, torch.Tensor]:
    """Compute the mean of weights by their shares, which need not add up to 1.

    Raises:
        UserError: a source holds numbers that are not finite.
    """
    shapes = parameter_shapes(sources[0].info.model)
    mean = {name: torch.empty(shape) for name, shape in shapes.items()}
    for name, shape in shapes.items():
        block = max(1, _BLOCK_NUMBERS // torch.Size(shape[1:]).numel())
        for first in range(0, shape[0], block):
            rows = slice(first, min(first + block, shape[0]))
            total = torch.zeros_like(mean[name][rows], dtype=torch.float64)
            for source, share in zip(sources, shares, strict=True):
                total.add_(source.read(name, rows), alpha=share)
            # In float64, the sum of finite fp32 numbers is always finite.
            if not torch.isfinite(total.sum()):
                culprit = next(each for each in sources if not torch.isfinite(each.read(name, rows)).all())
                raise UserError(f"{culprit.path} has numbers in {name} that are not finite: leave this one out")
            mean[name][rows] = total.div_(sum(shares))
    return mean
