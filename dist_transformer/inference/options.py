"""Command-line options that every decoding command shares."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dist_transformer.base.errors import UserError
from dist_transformer.runtime.launch import as_typed, own_command

# Torch costs seconds, and the flags need none of it.
if TYPE_CHECKING:
    import torch

    from dist_transformer.inference.beam import BeamSettings
    from dist_transformer.inference.sampling.mbr import MbrSettings

PRECISIONS = {"fp32": "float32", "bf16": "bfloat16"}
"""Names of dtypes of torch by the names of their flags."""
DECODING_FLAGS = (
    "--direction --tag --beam --length-penalty --max-extra-tokens --precision --batch-tokens --mbr --utility --epsilon "
    "--seed --split-over --device"
)
"""Flags of this module for decoding, the model aside."""
MBR_CONFLICTS = {("--beam --length-penalty", "--mbr"): "which draws samples without a search"}
"""Flags without effect on minimum Bayes risk decoding."""
DECODING_PRECISIONS = (*PRECISIONS, "int8")
"""Precisions of a search. int8 means products of integers; all other operations are in bf16 or fp32."""
# Padded source tokens times beam size. CPU: `base` in fp32 decodes 5.5, 5.6 and 5.9 sentences per CPU second at 4,096,
# 8,192 and 16,384, where outputs as long as their sources take 0.4 GB. CUDA, by calculation: 2,048 hypotheses of
# sentences of up to 31 tokens, for which `base` in bf16 keeps 2.3 GB, and 0.8 GB for the probabilities of 37k words.
BATCH_TOKENS = {"cpu": 16384, "cuda": 65536}
"""Default of padded source tokens of a batch times beam."""
SCORED_TOKENS = {"cpu": 4096, "cuda": 32768}
"""Default tokens of a batch that is scored, counted on the longer side of each pair."""


def add_model_option(parser: argparse.ArgumentParser, *, required: bool = True) -> None:
    parser.add_argument("--model", type=Path, required=required, metavar="MODEL", help="model folder")


def add_models_option(parser: argparse.ArgumentParser, *, required: bool = True) -> None:
    """Add `--model` for one model folder, or for those of an ensemble."""
    text = "model folder; several are an ensemble: the mean of their probabilities"
    parser.add_argument("--model", type=Path, nargs="+", required=required, metavar="MODEL", help=text)


def add_device_option(
    parser: argparse.ArgumentParser | argparse._ArgumentGroup, *, several_processes: bool = False
) -> None:
    """Add `--device`, an argument of `find_device`.

    Args:
        several_processes: whether the command runs under a launcher.
    """
    devices = "cpu or cuda, or of a single process cuda:N" if several_processes else "cpu, cuda or cuda:N"
    parser.add_argument("--device", metavar="D", help=f"{devices} (default: cuda if there is one)")


def add_direction_options(parser: argparse.ArgumentParser | argparse._ArgumentGroup) -> None:
    parser.add_argument(
        "--direction", metavar="SRC-TGT", help="direction, such as en-de (required if the model has several)"
    )
    parser.add_argument(
        "--tag", nargs="+", metavar="TAG", help="tags in front of every source (default: those of the direction)"
    )


def translate_command(models: Sequence[Path], direction: str | None = None, tags: Sequence[str] | None = None) -> str:
    """Return the command that translates lines as they are typed, for a user who has a model."""
    flags = [*(("--direction", direction) if direction else ()), *(("--tag", *tags) if tags else ())]
    return as_typed(own_command("translate", "--model", *models, *flags))


def add_decoding_options(parser: argparse.ArgumentParser | argparse._ArgumentGroup) -> None:
    def option(name: str, text: str, **settings: Any) -> None:
        parser.add_argument(name, help=text, **settings)

    option("--beam", "hypotheses in search; 1 is greedy (default 4)", type=int, default=4, metavar="K")
    option("--length-penalty", "exponent of the length penalty (default 0.6)", type=float, default=0.6, metavar="A")
    option("--max-extra-tokens", "longest output: source tokens + N (default 50)", type=int, default=50, metavar="N")
    text = (
        "arithmetic; int8 is the fastest on a CPU (default: bf16 if the processor has instructions for it, else fp32)"
    )
    option("--precision", text, choices=DECODING_PRECISIONS)
    defaults = f"default {BATCH_TOKENS['cpu']} on a CPU, {BATCH_TOKENS['cuda']} on a GPU"
    option("--batch-tokens", f"padded source tokens of a batch times beam ({defaults})", type=int, metavar="N")


def add_mbr_options(parser: argparse.ArgumentParser | argparse._ArgumentGroup) -> None:
    """Add the flags of minimum Bayes risk decoding, two of which sampling shares; `mbr_settings` reads them."""

    def option(name: str, text: str, **settings: Any) -> None:
        parser.add_argument(name, help=text, **settings)

    option("--mbr", "of N samples, the one with the best mean utility", type=int, metavar="N")
    option("--utility", "similarity of two samples for --mbr (default chrf)", choices=("chrf", "bleu"))
    option("--epsilon", "sample tokens of probability E or more (--mbr: 0.02)", type=float, metavar="E")
    option("--seed", "seed of all random choices (default 1)", type=int, default=1, metavar="S")


def mbr_settings(arguments: argparse.Namespace, *, language: str, nbest: int | None = None) -> "MbrSettings | None":
    """Read the flags of minimum Bayes risk decoding; None: it was not asked for.

    Raises:
        UserError: a value is out of range.
    """
    if arguments.mbr is None:
        return None
    from dist_transformer.inference.sampling.mbr import DEFAULT_EPSILON, MbrSettings

    return MbrSettings(
        samples=arguments.mbr,
        utility=arguments.utility or "chrf",
        language=language,
        seed=arguments.seed,
        epsilon=DEFAULT_EPSILON if arguments.epsilon is None else arguments.epsilon,
        nbest=1 if nbest is None else nbest,
    )


def add_split_option(parser: argparse.ArgumentParser | argparse._ArgumentGroup, *, default: str) -> None:
    """Add `--split-over`; `choose_split_over` reads it."""
    text = f"split longer lines of several sentences; no: only lines too long for the model (default: {default})"
    parser.add_argument("--split-over", metavar="N|no", help=text)


def choose_split_over(given: str | int | None, default: int | None) -> int | None:
    """Read the value of `--split-over`, for a `Translator`; None: it was not given.

    Raises:
        UserError: it is neither a number above 0 nor `no`.
    """
    if given is None or given == "no":
        return default if given is None else None
    if not str(given).isdecimal() or int(given) < 1:
        raise UserError(f"split_over is {given!r:.60}: it must be a number of tokens above 0, or no")
    return int(given)


def beam_settings(arguments: argparse.Namespace, *, nbest: int = 1) -> "BeamSettings":
    from dist_transformer.inference.beam import BeamSettings

    return BeamSettings(
        beam_size=arguments.beam,
        length_penalty=arguments.length_penalty,
        max_extra_tokens=arguments.max_extra_tokens,
        nbest=nbest,
    )


def agreed_precision(wanted: str | None, device: "torch.device") -> str:
    """Choose the precision of decoding if it was not set: bf16 if all ranks have instructions for it, otherwise fp32.

    Collective: every rank must call it.
    """
    from dist_transformer.runtime.device import multiplies_bf16
    from dist_transformer.runtime.distributed import gather_objects

    return wanted or ("bf16" if all(gather_objects(multiplies_bf16(device))) else "fp32")


def as_arithmetic(precision: str, device: "torch.device") -> "tuple[torch.dtype, bool]":
    """Return the dtype of a model that decodes in a precision, and whether it multiplies in int8.

    Raises:
        UserError: there is no such precision, or this device does not support it.
    """
    from dist_transformer.model import cpu_kernels
    from dist_transformer.runtime.device import multiplies_bf16, multiplies_int8

    if precision not in DECODING_PRECISIONS:
        raise UserError(f"precision is {precision!r}: it must be fp32, bf16 or int8")
    if precision != "int8":
        return as_dtype(precision), False
    dtype = as_dtype("bf16" if multiplies_bf16(device) else "fp32")
    if not multiplies_int8(device):
        where = "it computes on a CPU alone" if device.type == "cuda" else "this CPU has no instructions for it (VNNI)"
        raise UserError(f"precision is int8, but {where}: use bf16 or fp32")
    if not cpu_kernels.takes(dtype):
        raise UserError("precision is int8, but there is no C++ compiler: install g++, or use bf16 or fp32")
    return dtype, True


def as_dtype(precision: str) -> "torch.dtype":
    """Return the dtype of a precision by name.

    Raises:
        UserError: there is no such precision.
    """
    if precision not in PRECISIONS:
        raise UserError(f"precision is {precision!r}: it must be {' or '.join(PRECISIONS)}")
    import torch

    dtype: torch.dtype = getattr(torch, PRECISIONS[precision])
    return dtype
